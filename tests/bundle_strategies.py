"""Hypothesis strategies for bundles, built on those for what FlashInfer writes."""

from __future__ import annotations

from hypothesis import strategies as st
from strategies import entry_lists, environments, extra_values, finite, measurement_policies, names

from fi_tunecache.bundle import Bundle, Provenance, Workload
from fi_tunecache.entry import Entry, Lookup
from fi_tunecache.key import Key
from fi_tunecache.manifest import Yank

texts = st.text(max_size=12).filter(str.isprintable)
dates = st.dates().map(str)
counts = st.integers(1, 1024)
yanks = st.builds(Yank, reason=texts, date=dates)

workloads = st.builds(
    Workload,
    model=st.none() | texts,
    engine=st.none() | texts,
    tensor_parallel=st.none() | counts,
    expert_parallel=st.none() | counts,
    note=st.none() | texts,
)
provenances = st.builds(
    Provenance,
    created=dates,
    tool=texts,
    source=st.none() | texts,
    tuning_seconds=st.none() | finite,
    driver=st.none() | texts,
    mapped_cublas=st.none() | texts,
    power_limit_w=st.none() | finite,
    torch=st.none() | texts,
    python=st.none() | texts,
    workload=st.none() | workloads,
)


def _served(entry: Entry) -> Entry:
    return Entry(entry.key, entry.key.runner, entry.tactic, entry.policy, entry.selection)


@st.composite
def lookups(draw: st.DrawFn, won: Key) -> Lookup:
    """A lookup that the given key wins."""
    extras = st.lists(extra_values, max_size=3).map(tuple)
    before, after = (
        [
            Key(won.custom_op, runner, won.profile, extra)
            for runner, extra in draw(st.lists(st.tuples(names, extras), max_size=2))
        ]
        for _ in range(2)
    )
    return Lookup((*before, won, *after), len(before))


@st.composite
def bundles(draw: st.DrawFn) -> Bundle:
    """Bundles as they may be published; now and then one without recorded lookups."""
    entries = {entry.key.text: _served(entry) for entry in draw(entry_lists.filter(bool))}
    winners = draw(st.lists(st.sampled_from(sorted(entries)), max_size=3))
    return Bundle(
        environment=draw(environments),
        entries=entries,
        provenance=draw(provenances),
        policy=draw(measurement_policies),
        lookups=tuple(draw(lookups(entries[text].key)) for text in winners),
        default_raced=draw(st.none() | st.booleans()),
    )
