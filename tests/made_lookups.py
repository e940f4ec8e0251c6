"""Recorded lookups, made by name, and the strategy for them."""

from __future__ import annotations

from collections.abc import Sequence

import made
from hypothesis import strategies as st
from strategies import extra_values, int64, names, policies, profiles, tactics

from fi_tunecache.entry import ProfilingPolicy, Tactic
from fi_tunecache.errors import FormatError
from fi_tunecache.key import Key
from fi_tunecache.recorded_lookup import RecordedLookup, Served


def lookup(
    served: Served,
    runners: Sequence[str] = (made.CUDNN, made.TINY),
    answer: tuple[str, Tactic] | None = None,
    *,
    m: int = 1,
    op: str = "bf16_gemm",
    raced: bool = False,
    policy: ProfilingPolicy | None = made.POLICY,
    reason: str = "",
    count: int = 1,
) -> RecordedLookup:
    """``answer`` is a runner and its tactic; by default the second runner's tactic 7, or the default."""
    if answer is None:
        answer = (runners[-1], 7) if served.answers else (runners[0], -1)
    return RecordedLookup(
        keys=tuple(made.key(runner, m, op) for runner in runners),
        served=served,
        runner=answer[0],
        tactic=answer[1],
        raced=raced,
        tuning=served is Served.TUNED,
        policy=policy,
        reason=reason,
        count=count,
    )


def is_readable(key: Key) -> bool:
    try:
        return Key.parse(key.text) == key
    except FormatError:
        return False


@st.composite
def lookups(draw: st.DrawFn) -> RecordedLookup:
    op, profile = draw(names), draw(profiles)
    extras = st.lists(extra_values, max_size=3).map(tuple)
    key = st.builds(Key, st.just(op), names, st.just(profile), extras).filter(is_readable)
    keys = tuple(draw(st.lists(key, min_size=1, max_size=3)))
    served = draw(st.sampled_from(Served))
    won = (draw(st.sampled_from(keys)).runner, draw(int64 | tactics))
    runner, tactic = won if served.answers else (keys[0].runner, -1)
    return RecordedLookup(
        keys=keys,
        served=served,
        runner=runner,
        tactic=tactic,
        raced=draw(st.booleans()),
        tuning=draw(st.booleans()),
        policy=draw(st.none() | policies),
        reason=draw(names | st.just("")),
        count=draw(st.integers(1, 10**6)),
    )
