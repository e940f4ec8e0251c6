"""Several answers to one key: equal ones are one, others are a conflict, decided by a rule or left open."""

from __future__ import annotations

from typing import Any

import made
import pytest
from made_sources import PROVENANCE, gathered, lines, source

from fi_tunecache.entry import Entry, Tactic
from fi_tunecache.errors import UsageError
from fi_tunecache.key import Key
from fi_tunecache.publish.conflicts import Conflict, Found, OnConflict, Settled, settle
from fi_tunecache.publish.gather import gather
from fi_tunecache.publish.left_out import Reason
from fi_tunecache.publish.plan import make_plan
from fi_tunecache.publish.published import Published

KEY = made.key(made.CUTLASS)


def entry(tactic: Tactic, time_ms: float | None = None, *, key: Key = KEY, policy: Any = made.POLICY) -> Entry:
    made_entry = made.entry(key, tactic, time_ms)
    return Entry(key, key.runner, tactic, policy, made_entry.selection)


def settled(rule: OnConflict, *found: tuple[Entry, float]) -> Settled:
    """Each entry with the time at which its source was changed; the sources are a, b, c, …"""
    return settle((Found(item, "abcdefg"[number], when) for number, (item, when) in enumerate(found)), rule)


@pytest.mark.parametrize("rule", list(OnConflict))
@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        pytest.param([entry(1), entry(1)], 0, id="just the same"),
        pytest.param([entry(1), entry(1, 0.5)], 1, id="the one with a time"),
        pytest.param([entry(1, 0.5), entry(1, 0.4), entry(1)], 1, id="the one with the shortest time"),
        pytest.param([entry((1, (2,))), entry((1, (2,)), 0.1)], 1, id="a nested tactic"),
        pytest.param([entry(1, policy=None), entry(1, policy=None)], 0, id="no policy"),
    ],
)
def test_equal_entries_are_one(rule: OnConflict, entries: list[Entry], kept: int) -> None:
    for order in (entries, entries[::-1]):
        found = settled(rule, *((item, 0.0) for item in order))
        assert (found.entries, found.conflicts, found.left_out) == ((entries[kept],), (), ())
        assert found.same == len(entries) - 1


NONE = OnConflict.ERROR, OnConflict.FASTEST, OnConflict.NEWEST


@pytest.mark.parametrize(
    ("rule", "found", "chosen", "problem"),
    [
        pytest.param(OnConflict.ERROR, [(entry(1, 0.1), 1.0), (entry(2, 0.2), 2.0)], None, "", id="error"),
        pytest.param(OnConflict.FASTEST, [(entry(1, 0.2), 2.0), (entry(2, 0.1), 1.0)], 1, "", id="fastest"),
        pytest.param(OnConflict.FASTEST, [(entry(1, 0.1), 2.0), (entry(2, 0.1), 1.0)], 0, "", id="equal times"),
        pytest.param(
            OnConflict.FASTEST, [(entry(1), 1.0), (entry(2, 0.1), 1.0)], None, "a records no time", id="no time"
        ),
        pytest.param(
            OnConflict.FASTEST,
            [(entry(1, 0.1), 1.0), (entry(2, 0.2, policy=("x", 1)), 1.0)],
            None,
            "timed under different policies",
            id="times that can't be compared",
        ),
        pytest.param(OnConflict.NEWEST, [(entry(1, 0.1), 1.0), (entry(2), 2.0)], 1, "", id="newest"),
        pytest.param(
            OnConflict.NEWEST,
            [(entry(1), 3.0), (entry(2), 2.0), (entry(1), 1.0)],
            0,
            "",
            id="newest, of several sources",
        ),
        pytest.param(
            OnConflict.NEWEST, [(entry(1), 2.0), (entry(2), 2.0)], None, "two sources are equally new", id="equally new"
        ),
        pytest.param(OnConflict.NEWEST, [(entry(1), 1.0), (entry(1, policy=None), 2.0)], 1, "", id="another policy"),
        pytest.param(OnConflict.NEWEST, [(entry(1), 1.0), (entry(True), 2.0)], 1, "", id="1 is not true"),
        pytest.param(OnConflict.NEWEST, [(entry(1), 1.0), (entry(1.0), 2.0)], 1, "", id="1 is not 1.0"),
    ],
)
def test_a_conflict(rule: OnConflict, found: list[tuple[Entry, float]], chosen: int | None, problem: str) -> None:
    """``chosen`` is the place of what counts; what does not is left out, by the reason."""
    for order in (found, found[::-1]):
        result = settled(rule, *order)
        (conflict,) = result.conflicts
        if chosen is None:
            assert result.entries == ()
            assert result.left_out == ()
            assert conflict.chosen is None
        else:
            assert [repr(item) for item in result.entries] == [repr(found[chosen][0])]
            assert conflict.chosen is not None
            assert repr(conflict.variants[conflict.chosen].entry) == repr(found[chosen][0])
            cause = Reason.SLOWER if rule is OnConflict.FASTEST else Reason.OLDER
            assert [item.cause for item in result.left_out] == [cause] * (len(conflict.variants) - 1)
    assert settled(rule, *found).conflicts[0].problem == problem


def test_keys_do_not_mix() -> None:
    other = made.key(made.CUTLASS, 2)
    found = settled(OnConflict.ERROR, (entry(1), 0.0), (entry(2, key=other), 0.0), (entry(3), 0.0))

    assert [item.key for item in found.entries] == [other]
    assert [conflict.key for conflict in found.conflicts] == [KEY]


def test_a_conflict_is_shown_with_all_answers() -> None:
    found = settled(OnConflict.ERROR, (entry(1, 0.25), 0.0), (entry((2, (3,))), 0.0), (entry(1), 0.0))

    assert str(found.conflicts[0]) == (f"{KEY.text}: tactic 1, 0.25 ms in a and 1 more; tactic [2, [3]], no time in b")
    (decided,) = settled(OnConflict.FASTEST, (entry(1, 0.25), 0.0), (entry(2, 0.125), 0.0)).conflicts
    assert str(decided) == (
        f"{KEY.text}: tactic 2, 0.125 ms in b is taken, of tactic 1, 0.25 ms in a; tactic 2, 0.125 ms in b"
    )
    many = settled(OnConflict.FASTEST, *((entry(number), 0.0) for number in range(6))).conflicts[0]
    assert str(many).endswith("tactic 3, no time in d; 2 more (a records no time)")


def test_a_conflict_in_json() -> None:
    (conflict,) = settled(OnConflict.FASTEST, (entry(1, 0.25), 0.0), (entry((2,), policy=None), 0.0)).conflicts

    assert conflict.builtins() == {
        "key": KEY.text,
        "chosen": None,
        "problem": "b records no time",
        "variants": [
            {"tactic": 1, "policy": list(made.POLICY), "time_ms": 0.25, "sources": ["a"]},
            {"tactic": [2], "policy": None, "time_ms": None, "sources": ["b"]},
        ],
        "line": str(conflict),
    }


# --- of sources


A = source("a.json", [entry(1, 0.25)], modified=1.0)
B = source("b.json", [entry(2, 0.5), entry(9, key=made.key(made.CUTLASS, 2))], modified=2.0)


def test_an_open_conflict_is_returned_and_refused_by_the_plan() -> None:
    found = gathered(A, B)

    assert found.bundle is None
    (conflict,) = found.conflicts
    assert isinstance(conflict, Conflict)
    with pytest.raises(UsageError) as caught:
        make_plan([found], Published())
    assert str(caught.value) == (
        f"sources have different answers to 1 key, the first {KEY.text}: tactic 1, 0.25 ms in a.json; "
        "tactic 2, 0.5 ms in b.json; decide with --on-conflict fastest or newest, or leave a source out"
    )


@pytest.mark.parametrize(
    ("rule", "tactic", "cause"),
    [(OnConflict.FASTEST, 1, Reason.SLOWER), (OnConflict.NEWEST, 2, Reason.OLDER)],
)
def test_a_conflict_decided(rule: OnConflict, tactic: int, cause: Reason) -> None:
    found = gathered(A, B, on_conflict=rule)

    assert found.bundle is not None
    assert found.bundle.entries[KEY.text].tactic == tactic
    assert len(found.bundle.entries) == 2
    assert lines(found.left_out) == [(cause, made.CUTLASS, 1)]
    (planned,) = make_plan([found], Published()).bundles
    assert planned.conflicts == found.conflicts


def test_sources_of_other_environments_do_not_conflict() -> None:
    elsewhere = made.H200.with_facts({"cudnn_version": "91800"})
    found = gather([A, source("c.json", [entry(2)], environment=elsewhere)], PROVENANCE)

    assert [item.conflicts for item in found] == [(), ()]
