"""Publishing, whatever the sources: nothing depends on their order, nothing gets lost, nothing is done twice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import made
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_sources import OF_0_7_2, PROVENANCE, source

from fi_tunecache.bundle import MARK, read_bundle
from fi_tunecache.entry import Entry
from fi_tunecache.errors import UsageError
from fi_tunecache.manifest import BundleRow
from fi_tunecache.measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from fi_tunecache.publish.conflicts import OnConflict
from fi_tunecache.publish.gather import Gathered, gather
from fi_tunecache.publish.identity import entry_identity
from fi_tunecache.publish.plan import Plan, Status, make_plan
from fi_tunecache.publish.published import Published, PublishedBundle
from fi_tunecache.publish.recorded_lookups import Question, questions_of
from fi_tunecache.resolution import choose
from fi_tunecache.source import Source, SourceKind
from fi_tunecache.verdict import Candidate

RUNNERS = (made.CUTLASS, made.CUBLASLT, made.TINY)
COLLECTIVE = "flashinfer::pcie_ipc_all_reduce"
ELSEWHERE = made.H200.with_facts({"cutlass_dsl_version": "nvidia-cutlass-dsl==4.8.1"})  # compared as the same
EAGER = MeasurementPolicy.from_execution_mode("eager")

times = st.none() | st.sampled_from([0.5, 0.505, 0.52, 1.0])
lookups = st.builds(
    lambda runners, m: made.lookup(runners, runners[0], m),
    st.permutations(RUNNERS).flatmap(lambda order: st.integers(1, 3).map(lambda count: order[:count])),
    st.sampled_from([1, 2]),
)
questions = st.lists(lookups, max_size=3).map(questions_of)


@st.composite
def entries(draw: st.DrawFn, *, clean: bool) -> Entry:
    op = draw(st.sampled_from(["bf16_gemm"] * 5 + [COLLECTIVE]))
    key = made.key(draw(st.sampled_from(RUNNERS)), draw(st.sampled_from([1, 2])), op)
    policy = draw(st.sampled_from([made.POLICY, made.POLICY, None]))
    selection: dict[str, Any] | None = None if policy is None else {}
    if selection is not None and (time := draw(times)) is not None:
        selection["time_ms"] = time
    if selection is not None and not clean and draw(st.integers(0, 19)) == 0:
        selection[MARK] = "0" * 16
    runner = key.runner if clean or draw(st.integers(0, 29)) else "Another"
    return Entry(key, runner, draw(st.sampled_from([1, 2, True])), policy, selection)


def sources(*, clean: bool) -> st.SearchStrategy[list[Source]]:
    one = st.builds(
        source,
        st.sampled_from("abcdef"),
        st.lists(
            entries(clean=clean), min_size=0 if not clean else 1, max_size=6, unique_by=lambda item: item.key.text
        ),
        environment=st.sampled_from([made.H200, ELSEWHERE, OF_0_7_2]),
        policy=st.sampled_from([DEFAULT_POLICY, EAGER]),
        kind=st.sampled_from([SourceKind.CACHE_FILE, SourceKind.STORE]),
        modified=st.sampled_from([1.0, 2.0]),
        records=st.integers(0, 2),
    )
    return st.lists(one, min_size=1, max_size=4, unique_by=lambda item: item.path)


def outcome(found: Sequence[Source], **how: Any) -> tuple[Gathered, ...] | str:
    try:
        return gather(found, PROVENANCE, **how)
    except UsageError as error:
        return str(error)


rules = st.sampled_from(OnConflict)


@given(sources(clean=False), questions, rules, st.booleans(), st.randoms())
def test_the_order_of_the_sources_does_not_matter(
    found: list[Source], asked: tuple[Question, ...], rule: OnConflict, skip: bool, chance: Any
) -> None:
    how = {"questions": asked, "on_conflict": rule, "skip_pulled": skip}
    shuffled = chance.sample(found, len(found))
    assert repr(outcome(found, **how)) == repr(outcome(shuffled, **how))


@given(sources(clean=False), questions, rules, st.booleans())
def test_a_source_named_twice_counts_once(
    found: list[Source], asked: tuple[Question, ...], rule: OnConflict, skip: bool
) -> None:
    how = {"questions": asked, "on_conflict": rule, "skip_pulled": skip}
    assert repr(outcome(found, **how)) == repr(outcome(found + found[:2], **how))


@given(sources(clean=False), questions, rules, st.booleans())
def test_nothing_gets_lost(found: list[Source], asked: tuple[Question, ...], rule: OnConflict, skip: bool) -> None:
    """Every entry is published, or named in a line of what is left out, or refused."""
    result = outcome(found, questions=asked, on_conflict=rule, skip_pulled=skip)
    if isinstance(result, str):
        assert any(str(item.path) in result for item in found)
        return
    assert sum(item.read for item in result) == sum(len(item.sections[0].entries) for item in found)
    by_source = {name: item for item in result for name in item.sources}
    assert by_source.keys() == {str(item.path) for item in found}
    for item in found:
        (section,) = item.sections
        there = by_source[str(item.path)]
        assert bool(section.records) <= any(not line.runner for line in there.left_out)
        if any(conflict.chosen is None for conflict in there.conflicts):
            assert there.bundle is None
            with pytest.raises(UsageError, match="different answers"):
                make_plan(result, Published())
            continue
        published = {*map(entry_identity, there.bundle.entries.values())} if there.bundle else set()
        named = {(line.custom_op, line.runner) for line in there.left_out}
        for entry in section.entries:
            assert entry_identity(entry) in published or (entry.key.custom_op, entry.key.runner) in named
    for there in result:
        left_out = sum(line.entries for line in there.left_out if line.runner)
        if there.bundle or not there.conflicts:
            assert there.read == there.same + left_out + (len(there.bundle.entries) if there.bundle else 0)


def add(known: Published, plan: Plan) -> Published:
    rows: list[tuple[BundleRow, bytes]] = [
        (row, plan.files[f"{folder}/{row.file}"]) for folder, rows in plan.rows.items() for row in rows
    ]
    return Published((*known.bundles, *(PublishedBundle(row.bundle_id, read_bundle(data), row) for row, data in rows)))


def publish(found: Sequence[Source], known: Published, **how: Any) -> Published:
    try:
        plan = make_plan(gather(found, PROVENANCE, published=known, **how), known)
    except UsageError:  # an open conflict, or taken for pulled
        return known
    return add(known, plan)


publications = st.lists(st.tuples(sources(clean=True), questions), min_size=1, max_size=4)


@given(publications, st.sampled_from([OnConflict.FASTEST, OnConflict.NEWEST]))
def test_the_same_publication_again_is_nothing(
    every: list[tuple[list[Source], tuple[Question, ...]]], rule: OnConflict
) -> None:
    known = Published()
    for found, asked in every:
        how = {"questions": asked, "on_conflict": rule, "skip_pulled": True, "trust_winners": False}
        known = publish(found, known, **how)
        try:
            again = make_plan(gather(found, PROVENANCE, published=known, **how), known)
        except UsageError:
            continue
        assert {item.status for item in again.bundles} == {Status.UNCHANGED}


def served(known: Published) -> set[tuple[str, object]]:
    """The shapes that a client has an entry for, over all environments and policies."""
    found = set()
    for environment, policy in itertools.product((made.H200, OF_0_7_2), (DEFAULT_POLICY, EAGER)):
        rows = [
            item
            for item in known.bundles
            if item.bundle.environment.flashinfer_version == environment.flashinfer_version
        ]
        candidates = [Candidate("r", item.row, item.bundle) for item in rows if item.row is not None]
        chosen = choose(candidates, environment, policy=policy).chosen
        found |= {(environment.flashinfer_version, policy, item.entry.key.profile) for item in chosen.values()}
    return found


@given(publications)
def test_publishing_takes_nothing_away(every: list[tuple[list[Source], tuple[Question, ...]]]) -> None:
    """A shape that had an entry has one after each further publication."""
    known = Published()
    for found, asked in every:
        before = served(known)
        known = publish(found, known, on_conflict=OnConflict.FASTEST, questions=asked)
        assert before <= served(known)
