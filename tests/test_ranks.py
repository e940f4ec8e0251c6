"""Ranks agree: all install the same bytes or none does, in time, whatever becomes of one of them.

Real processes under torch.distributed: see ``rank_program.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fi_tunecache.errors import UsageError
from fi_tunecache.ranks import Ranks, many_ranks

PLENTY = 30.0
"""Seconds: a deadline that nobody should need."""
SLACK = 2.0
"""Seconds for which a busy machine may let a process wait."""
MIB = 1024 * 1024

Outcomes = list[Any]
Behaviour = dict[int, dict[str, Any]]


class RankProgram:
    """``rank_program.py``, started once."""

    def __init__(self, folder: Path) -> None:
        self._errors = folder / "stderr.txt"
        # torch asks the name server for the name of every address; a silent one would cost 10 seconds each time.
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:1"}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("rank_program.py")), str(folder)],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.many_ranks_before = self._answer()

    def play(self, *steps: dict[str, Any], ranks: int, store: str = "apart", meet: bool = False) -> list[Outcomes]:
        case = {"ranks": ranks, "store": store, "meet": meet, "steps": steps}
        assert self._process.stdin is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        outcomes: list[Outcomes] = self._answer()
        return outcomes

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the program ended:\n{self._errors.read_text(errors='replace')[-4000:]}"
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProgram]:
    running = RankProgram(tmp_path_factory.mktemp("ranks"))
    yield running
    running.close()


def step(
    topic: str = "layer-1",
    *,
    seconds: float = PLENTY,
    size: int = 320_000,
    behaviour: Behaviour | None = None,
    **rest: Any,
) -> dict[str, Any]:
    return {"topic": topic, "seconds": seconds, "size": size, "behaviour": behaviour or {}, **rest}


def bytes_of(topic: str, size: int) -> str:
    """The sha256 of what the leader offers."""
    return hashlib.sha256(hashlib.sha256(topic.encode()).digest() * (size // 32)).hexdigest()


def all_install(outcomes: Outcomes, topic: str = "layer-1", size: int = 320_000) -> None:
    """Those that tell anything install the bytes, which each of them was asked about."""
    told = [outcome for outcome in outcomes if outcome is not None]
    assert [(outcome["install"], outcome["reason"]) for outcome in told] == [(True, "")] * len(told)
    digests = {digest for each in told for digest in (each["sha256"], each["data"], *each["given"])}
    assert digests == {bytes_of(topic, size)}
    assert all(len(each["given"]) == 1 for each in told)


def none_installs(outcomes: Outcomes, reason: str) -> None:
    """Nor does any say another reason."""
    told = [outcome for outcome in outcomes if outcome is not None and "install" in outcome]
    assert [(each["install"], each["data"], each["sha256"]) for each in told] == [(False, None, "")] * len(told)
    for outcome in told:
        assert re.fullmatch(reason, outcome["reason"])


def in_time(outcomes: Outcomes, seconds: float) -> None:
    assert max(outcome["seconds"] for outcome in outcomes if outcome and "seconds" in outcome) < seconds + SLACK


@pytest.mark.slow
@pytest.mark.parametrize("store", ["rank 0", "apart", "file"])
def test_eight_ranks_get_the_same_bytes(program: RankProgram, store: str) -> None:
    chunks = [f"fi_tunecache/large/1/data/{start}" for start in range(0, 20 * MIB, MIB)]
    first, again, large, subgroup, world, unregistered = program.play(
        step(),
        step(),
        step("large", size=20 * MIB, sizes=chunks),
        step("large", group=[2, 3, 5]),
        step("large", group="world"),
        step("large", group="unregistered"),
        ranks=8,
        store=store,
        meet=True,
    )
    for outcomes in (first, again):
        all_install(outcomes)
        in_time(outcomes, 1)
        assert [each["place"] for each in outcomes] == [[rank, 8, rank == 0] for rank in range(8)]
    all_install(large, "large", 20 * MIB)
    in_time(large, 5)
    assert large[0]["sizes"] == [0] * 20  # the store does not keep them

    stranger = {"many": True, "error": "this process is not in the group; give a group that it is in"}
    assert [each for rank, each in enumerate(subgroup) if rank not in (2, 3, 5)] == [stranger] * 5
    members = [subgroup[rank] for rank in (2, 3, 5)]
    all_install(members, "large")
    assert [each["place"] for each in members] == [[0, 3, True], [1, 3, False], [2, 3, False]]

    all_install(world, "large")
    all_install(unregistered, "large")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "dead", "reason"),
    [
        pytest.param({5: {"absent": True}}, (), "rank 5 has not answered in time", id="one without the package"),
        pytest.param({5: {"raises": "can't be read"}}, (), "rank 5: can't be read", id="one with an unreadable cache"),
        pytest.param({5: {"dies": "asked"}}, (5,), "rank 5 has not answered in time", id="one dies before it is ready"),
        pytest.param({5: {"dies": 0.3}, 1: {"takes": 0.6}}, (5,), None, id="one dies after it was ready"),
        pytest.param({0: {"raises": "nothing\nfits"}}, (), "rank 0: nothing fits", id="the leader has nothing"),
        pytest.param({0: {"late": 0.5}}, (), None, id="the leader is late"),
        pytest.param({0: {"takes": 0.5}, 3: {"late": 0.8}}, (), None, id="the leader is slow, a follower is late"),
    ],
)
def test_eight_ranks_go_on_with_none_or_with_all(
    program: RankProgram, behaviour: Behaviour, dead: tuple[int, ...], reason: str | None
) -> None:
    slow = reason is not None and "in time" in reason
    behaviour = {**behaviour, 0: {**behaviour.get(0, {}), "seconds": 1.0 if slow else PLENTY}}

    [outcomes] = program.play(step(behaviour=behaviour), ranks=8, store="rank 0")

    assert tuple(rank for rank, outcome in enumerate(outcomes) if outcome is None) == dead
    if reason is None:
        all_install(outcomes)
    else:
        none_installs(outcomes, reason)
    in_time(outcomes, 1.5)


GONE = "the process group's store fails: .*(reset|closed|pipe).*"
SILENT = "the process group's store does not answer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "behaviour", "reason"),
    [
        pytest.param(
            "apart", {0: {"dies": "asked"}}, r"rank \d was offered nothing in time", id="leader, before it posts"
        ),
        pytest.param(
            "apart",
            {0: {"dies": 0.3}, 1: {"takes": 0.6}},
            r"rank \d learnt of no decision in time",
            id="leader, before it decides",
        ),
        pytest.param("apart", {0: {"dies": "told"}}, None, id="leader, after it decided"),
        pytest.param("rank 0", {0: {"dies": "asked"}}, GONE, id="leader with the store, before it posts"),
        pytest.param(
            "rank 0", {0: {"dies": 0.3}, 1: {"takes": 0.6}}, GONE, id="leader with the store, before it decides"
        ),
        pytest.param("file", {0: {"dies": "told"}}, None, id="leader with a file, after it decided"),
        pytest.param("apart", {1: {"store": signal.SIGKILL}}, GONE, id="the store"),
        pytest.param("apart", {1: {"store": signal.SIGSTOP}}, SILENT, id="the store, without closing anything"),
        pytest.param("apart", {0: {"store": signal.SIGSTOP}}, SILENT, id="the store, before anything is posted"),
    ],
)
def test_what_dies(program: RankProgram, store: str, behaviour: Behaviour, reason: str | None) -> None:
    [outcomes] = program.play(step(seconds=1.0, behaviour=behaviour), ranks=3, store=store)

    assert (outcomes[0] is None) == ("dies" in behaviour.get(0, {}))
    if reason is None:
        all_install(outcomes)
    else:
        none_installs(outcomes, reason)
    in_time(outcomes, 1.5)


@pytest.mark.slow
def test_a_leader_that_dies_with_the_store_just_after_its_decision(program: RankProgram) -> None:
    """The window: a rank that has not read the decision yet installs nothing. All are back, at once."""
    [outcomes] = program.play(step(behaviour={0: {"dies": "told"}}), ranks=3, store="rank 0")

    assert outcomes[0] is None
    for outcome in outcomes[1:]:
        assert outcome["reason"] == "" if outcome["install"] else re.fullmatch(GONE, outcome["reason"])
    in_time(outcomes, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "late", "reason"),
    [
        pytest.param({0: {"late": 1.2}}, 0, r"rank \d was offered nothing in time", id="leader"),
        pytest.param({2: {"late": 1.2}}, 2, "rank 2 has not answered in time", id="follower"),
    ],
)
def test_who_comes_when_the_others_have_given_up_goes_on_at_once(
    program: RankProgram, behaviour: Behaviour, late: int, reason: str
) -> None:
    others = {rank: {"seconds": 0.5 if rank == 0 or late == 0 else PLENTY} for rank in range(3) if rank != late}

    [outcomes] = program.play(step(behaviour={**others, **behaviour}), ranks=3)

    none_installs(outcomes, reason)
    assert outcomes[late]["given"] == []  # not even asked
    assert outcomes[late]["seconds"] < SLACK < PLENTY
    in_time(outcomes, 0.5)


@pytest.mark.slow
def test_a_rank_that_was_stopped_beyond_its_deadline_learns_what_the_others_do(program: RankProgram) -> None:
    stopped = {"seconds": 0.5, "stops": [0.2, 1.0]}

    [outcomes] = program.play(step(behaviour={1: {"takes": 0.6}, 2: stopped}), ranks=3)

    all_install(outcomes)
    assert outcomes[2]["seconds"] > 1.0
    in_time(outcomes[:2], 0.6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "behaviour", "reason"),
    [
        pytest.param(
            64,
            {2: {"late": 0.5, "writes": {"fi_tunecache/layer-1/1/data/0": "other"}}},
            "rank 2: the bytes in the process group's store are not those that the leader posted",
            id="other bytes",
        ),
        pytest.param(
            64,
            {2: {"late": 0.5, "writes": {"fi_tunecache/layer-1/1/offer": "{"}}},
            "rank 2: what the leader offers can't be read",
            id="no offer",
        ),
        pytest.param(
            64,
            {2: {"writes": {"fi_tunecache/layer-1/1/decision": "\x1b[31mno\nway"}}},
            "\N{REPLACEMENT CHARACTER}.31mno way",
            id="a decision of somebody else",
        ),
        pytest.param(
            64 * MIB + 32,
            {},
            "rank 0: a selection has 67,108,896 bytes; 67,108,864 are allowed",
            id="more than a selection may have",
        ),
        pytest.param(
            64, {1: {"breaks": "a\nstack"}}, "rank 1: RuntimeError: a", id="an error of the kind torch raises"
        ),
        pytest.param(64, {1: {"breaks": ""}}, "rank 1: RuntimeError", id="an error without words"),
        pytest.param(64, {0: {"raises": 3000 * "x"}}, "rank 0: x{492}", id="an error with too many words"),
    ],
)
def test_what_nobody_installs(program: RankProgram, size: int, behaviour: Behaviour, reason: str) -> None:
    [outcomes] = program.play(step(size=size, behaviour=behaviour), ranks=3)

    none_installs(outcomes, reason)
    in_time(outcomes, 1)


@pytest.mark.slow
def test_nobody_installs_what_another_does_not(program: RankProgram) -> None:
    """Deadlines and delays that make deciding and giving up meet, again and again."""
    chance = random.Random(20)
    steps = []
    for number in range(30):
        behaviour = {
            rank: {
                "late": chance.choice([0, 0, chance.uniform(0, 0.1)]),
                "takes": chance.choice([0, chance.uniform(0, 0.1)]),
                "seconds": chance.choice([PLENTY, chance.uniform(0.05, 0.3)]),
            }
            for rank in range(4)
        }
        behaviour[chance.randrange(4)]["seconds"] = 0.3  # somebody's time comes, whatever the others have
        steps.append(step(f"layer-{number % 5}", size=64, behaviour=behaviour))

    rounds = program.play(*steps, ranks=4, meet=True)

    for asked, outcomes in zip(steps, rounds, strict=True):
        if outcomes[0]["install"]:
            all_install(outcomes, asked["topic"], 64)
        else:
            none_installs(outcomes, re.escape(outcomes[0]["reason"]))
        in_time(outcomes, 0.5)
    assert {outcomes[0]["install"] for outcomes in rounds} == {True, False}


@pytest.mark.slow
def test_a_rank_that_has_left_one_out_meets_the_decision_that_was_made_without_it(program: RankProgram) -> None:
    leader = {"seconds": 0.5}

    _, second = program.play(
        step(behaviour={0: leader, 2: {"absent": True}}), step(behaviour={0: leader}), ranks=3, meet=True
    )

    none_installs(second, "rank 2 has not answered in time")
    assert second[2]["given"] == []


@pytest.mark.slow
def test_one_rank_agrees_with_itself_and_is_not_many(program: RankProgram) -> None:
    [[alone]] = program.play(step(), ranks=1)
    all_install([alone])
    assert not alone["many"]

    [two] = program.play(step(), ranks=2)
    assert [each["many"] for each in two] == [True, True]
    assert program.many_ranks_before is False  # torch.distributed is imported, but not initialised


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "error"),
    [
        ("nothing", "None is no process group; give a torch.distributed.ProcessGroup, or True"),
        ("without store", "the process group has no store; give a group with one, such as of gloo or NCCL"),
    ],
)
def test_what_is_no_group_of_ranks(program: RankProgram, group: str, error: str) -> None:
    [[outcome]] = program.play(step(group=group), ranks=1)
    assert outcome["error"] == error


def test_without_torch_there_are_not_many_ranks_and_none_to_agree_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    had_torch = "torch" in sys.modules

    assert not many_ranks()
    with pytest.raises(
        UsageError, match=r"^torch.distributed is not initialised in this process; initialise it first$"
    ):
        Ranks.of(True)

    assert had_torch == ("torch" in sys.modules)


def test_while_torch_is_being_imported_there_are_not_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", ModuleType("torch.distributed"))
    assert not many_ranks()
