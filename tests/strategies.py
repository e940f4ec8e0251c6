"""Hypothesis strategies for what FlashInfer writes, shared by the property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from fi_tunecache.entry import Entry
from fi_tunecache.environment import FACTS, Environment
from fi_tunecache.key import Dtype, Key
from fi_tunecache.measurement_policy import MeasurementPolicy

int64 = st.integers(-(2**63), 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
short_text = st.text(max_size=8)
scalars = st.none() | st.booleans() | int64 | finite | short_text

names = st.text('abcXYZ019_:."é ', min_size=1, max_size=24)
"""Names of ops and runner classes: whatever prints without an escape."""

dtypes = st.sampled_from(["bfloat16", "float16", "float8_e4m3fn", "uint8"]).map(Dtype)
extra_values = st.recursive(
    scalars | dtypes,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
profiles = st.lists(st.lists(int64, max_size=4).map(tuple), max_size=4).map(tuple)
keys = st.builds(Key, names, names, profiles, st.lists(extra_values, max_size=4).map(tuple))

tactics = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
policies = st.lists(scalars, max_size=6).map(tuple)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(short_text, inner, max_size=3),
    max_leaves=6,
)
selections = st.dictionaries(short_text, json_values, max_size=3)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    """Entries as a v1 file may hold them; one in a few names another runner than its key."""
    key = draw(keys)
    policy = draw(st.none() | policies)
    return Entry(
        key=key,
        runner=draw(st.just(key.runner) | names),
        tactic=draw(int64 | tactics),
        policy=policy,
        selection=None if policy is None else draw(st.none() | selections),
    )


entry_lists = st.lists(entries(), max_size=5, unique_by=lambda entry: entry.key.text)

facts = st.text("0123456789.+abc-;=: ", min_size=1, max_size=20).filter(str.strip)
environments = st.fixed_dictionaries(dict.fromkeys(FACTS, facts)).map(Environment.from_metadata)
measurement_policies = st.sampled_from(["auto", "eager", "cuda_graph"]).map(MeasurementPolicy.from_execution_mode)
