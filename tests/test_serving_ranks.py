"""``enable(group=…)``: eight ranks of a program have the same entries, or none, and none of them waits too long."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from programs import Machine, Programs, bundles_of

from fi_tunecache.publish.directory import add_bundles

pytestmark = pytest.mark.slow

SIZE = 8
DEADLINE = 3.0
VERSIONS = ("0.7.4", "0.7.2.post1")

PROGRAM = """
fault, lookups = given
def work(rank):
    started = time.perf_counter()
{fault}
    with {context}:
        answers = [ask(lookup) for lookup in lookups]
    warnings = [message for level, message in program.log if level == "WARNING"]
    return [answers, program.profiles, time.perf_counter() - started, warnings]
result = in_ranks({size}, work)
"""
ENABLE = f"    fi_tunecache.enable(group=True, deadline={DEADLINE})"
PLAIN = "    pass"


@pytest.fixture
def machine(programs: Callable[[str], Programs], tmp_path: Path) -> Callable[..., Machine]:
    """One whose registry holds the results of one op of two."""

    def make(version: str) -> Machine:
        (bundle,) = bundles_of(version)
        known = {text: entry for text, entry in bundle.entries.items() if entry.key.custom_op == "fp8_gemm"}
        lookups = tuple(lookup for lookup in bundle.lookups if lookup.custom_op == "fp8_gemm")
        half = msgspec.structs.replace(bundle, entries=known, lookups=lookups)
        add_bundles(tmp_path / "registry", "made", [half])
        folder = tmp_path / "machine"
        folder.mkdir()
        return Machine(programs(version), folder, [bundle], FI_TUNECACHE_REGISTRY=str(tmp_path / "registry"))

    return make


def play(here: Machine, fault: str, context: str = "autotune(False)") -> list[Any]:
    program = PROGRAM.format(fault=fault, context=context, size=SIZE)
    answers: list[Any] = here.run(program, ["", here.lookups]).result
    assert not [answer for answer in answers if isinstance(answer, str)], answers
    return answers


def only(here: Machine, op: str, answers: list[Any]) -> list[Any]:
    return [answer for lookup, answer in zip(here.asked, answers, strict=True) if lookup.custom_op == op]


EVERYBODY = range(SIZE)


@pytest.mark.parametrize(
    ("fault", "all_have", "gone", "warned", "waits"),
    [
        pytest.param(ENABLE, True, [], [], 0.0, id="all is well"),
        pytest.param(
            f"    if rank != 5:\n    {ENABLE}", False, [], set(EVERYBODY) - {5}, DEADLINE, id="one lacks the package"
        ),
        pytest.param(
            "    if rank in (0, 5): os.environ['FI_TUNECACHE_DIR'] = os.path.abspath('no')\n" + ENABLE,
            True,
            [],
            [0],
            0.0,
            id="rank 0 and another have a cache that can't be used",
        ),
        pytest.param(
            "    if rank == 5: os._exit(1)\n" + ENABLE, False, [5], set(EVERYBODY) - {5}, DEADLINE, id="one dies"
        ),
        pytest.param(
            "    if rank == 0: os._exit(1)\n" + ENABLE, False, [0], set(EVERYBODY) - {0}, DEADLINE, id="rank 0 dies"
        ),
        pytest.param(
            f"    if rank == 5: time.sleep({DEADLINE / 4})\n" + ENABLE, True, [], [], DEADLINE / 4, id="one is late"
        ),
        pytest.param(
            f"    if rank == 5: time.sleep({DEADLINE * 1.5})\n" + ENABLE,
            False,
            [],
            EVERYBODY,
            DEADLINE * 1.5,
            id="one is too late",
        ),
        pytest.param(
            "    if rank == 5: os.environ['FI_TUNECACHE_MATCH'] = 'compatible'\n" + ENABLE,
            False,
            [],
            EVERYBODY,
            0.0,
            id="one asks for something else",
        ),
    ],
)
def test_all_or_none(
    machine: Callable[..., Machine],
    fault: str,
    all_have: bool,
    gone: list[int],
    warned: Collection[int],
    waits: float,
) -> None:
    """``waits`` is for how many seconds the slowest has to wait for the others."""
    here = machine("0.7.4")
    (here.folder / "no").write_bytes(b"")  # a file where the cache's directory should be
    alone = here.run("result = [ask(lookup) for lookup in given]").result
    expected = only(here, "fp8_gemm", here.expected if all_have else alone)
    answers = play(here, fault)
    assert [rank for rank, answer in enumerate(answers) if answer is None] == gone
    there = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    assert {rank for rank, (*_, warnings) in there.items() if warnings} == set(warned)
    for rank, (answer, profiles, seconds, _) in there.items():
        assert (rank, only(here, "fp8_gemm", answer)) == (rank, expected)
        assert only(here, "bf16_gemm", answer) == only(here, "bf16_gemm", alone)
        assert profiles == 0
        assert seconds < waits + 2.5


def test_several_ranks_and_no_group(machine: Callable[..., Machine]) -> None:
    here = machine("0.7.4")
    alone = here.run("result = [ask(lookup) for lookup in given]").result
    for answer, profiles, _, warnings in play(here, "    fi_tunecache.enable()"):
        assert (answer, profiles) == (alone, 0)
        (line,) = warnings
        assert "there are several ranks, and nothing is installed; name them with enable(group=…)" in line


def test_ranks_that_are_not_initialised_yet(machine: Callable[..., Machine]) -> None:
    """As torchrun starts them: one that finds its entries before, alone, may have others than the rest."""
    here = machine("0.7.4")
    alone = here.run("result = [ask(lookup) for lookup in given]").result
    answer = here.run("fi_tunecache.enable()\nresult = [ask(lookup) for lookup in given]", WORLD_SIZE="2", RANK="0")
    assert answer.result == alone
    (line,) = answer.lines("WARNING")
    assert "initialise torch.distributed before the first lookup" in line


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("writable", [True, False], ids=["all can be written", "one can't"])
def test_stores_are_seeded_on_all_ranks_or_on_none(
    machine: Callable[..., Machine], version: str, writable: bool
) -> None:
    here = machine(version)
    if not writable:
        (here.folder / "store5").write_bytes(b"")
    context = "autotune_v2('replay', cache_root=f'store{rank}')"
    alone = here.run("result = [ask(lookup) for lookup in given]").result
    expected = only(here, "fp8_gemm", here.expected if writable else alone)
    for answer, *_, warnings in play(here, ENABLE, context):
        assert only(here, "fp8_gemm", answer) == expected
        assert (warnings == []) == writable
    assert bool(list(here.folder.glob("store*/v2/*/entries/*.json"))) == writable


@pytest.mark.parametrize("version", VERSIONS)
def test_ranks_that_tune_together(machine: Callable[..., Machine], version: str) -> None:
    """What is covered is timed by no rank; the rest by all of them, in step, or a collective would be an error."""
    here = machine(version)
    ops = {op: [lookup for lookup in here.asked if lookup.custom_op == op] for op in ("fp8_gemm", "bf16_gemm")}
    small = [lookup for asked in ops.values() for lookup in sorted(asked, key=lambda lookup: lookup.profile)[:3]]
    here.keep(small)  # each shape and all smaller ones are timed, with some collectives for each
    together = "    autotuner.set_autotune_process_group(distributed.group.WORLD)\n"
    begin = "    import torch.distributed as distributed\n"
    context = "autotune(True)"
    alone = play(here, begin + together + PLAIN, context)
    answers = play(here, begin + together + ENABLE, context)
    for (answer, profiles, _, warnings), (own, more, *_) in zip(answers, alone, strict=True):
        assert only(here, "fp8_gemm", answer) == only(here, "fp8_gemm", here.expected)
        assert only(here, "bf16_gemm", answer) == only(here, "bf16_gemm", own)
        assert 0 < profiles < more
        assert warnings == []
    assert len({profiles for _, profiles, *_ in answers}) == 1
