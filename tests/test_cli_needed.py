"""``fi-tunecache needed``: the answer, its reasons and its exit code, of what was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import made
import pytest
from command_line import LIKE, CommandLine, run_process, snapshot
from made_lookups import lookup

from fi_tunecache.environment import Environment
from fi_tunecache.flashinfer_json import read_cache_file
from fi_tunecache.recorded_lookup import RecordedLookup, Served, write_lookups
from fi_tunecache.selection import read_selection
from fi_tunecache.user_cache import UserCache
from fi_tunecache.workload import Workload
from fi_tunecache.workload_record import find_record, keep_workload

WORKLOAD = Workload.parse("model=llama,tp=2")


class Recorded:
    """A workload that the selection of the embedded registry covers, which is pulled for it."""

    def __init__(self, command_line: CommandLine, *options: str) -> None:
        data = Path(command_line.json("pull", *LIKE, *options)["path"]).read_bytes()
        self.environment = Environment.from_metadata(command_line.json("env", *LIKE)["environment"])
        self.selection = read_selection(data)
        self.covered = [
            RecordedLookup(keys=(entry.key,), served=Served.REGISTRY, runner=entry.runner, tactic=entry.tactic)
            for entry in read_cache_file(data).entries
        ]

    def keep(self, *more: RecordedLookup, workload: str = str(WORKLOAD)) -> None:
        keep_workload(workload, [*self.covered, *more], environment=self.environment, selection=self.selection)


@pytest.fixture
def recorded(command_line: CommandLine) -> Recorded:
    return Recorded(command_line)


def time_of(text: str = str(WORKLOAD)) -> str:
    record = find_record(UserCache.locate(), text)
    assert record is not None
    return record.recorded


def test_it_is_not_needed(command_line: CommandLine, recorded: Recorded) -> None:
    recorded.keep()
    before = snapshot(command_line.folder)

    assert command_line.output("needed", "model=llama,tp=2", *LIKE).splitlines() == [
        "model=llama,tp=2: autotuning is not needed: 0 lookups missing, 165 covered",
        "23 lookups got the default itself: tuning gains nothing there.",
        f"Recorded {time_of()} as {WORKLOAD.id}.",
    ]
    assert snapshot(command_line.folder) == before


def test_it_is_needed(command_line: CommandLine, recorded: Recorded) -> None:
    recorded.keep(
        lookup(Served.TUNED, op="toy_op", reason="no entry for the op"),
        lookup(Served.TUNED, op="toy_op", reason="no entry for the op", m=2),
        lookup(Served.DEFAULT, op="toy_op", reason="op known, shape not", m=4),
        lookup(Served.MEMORY, op="old_op"),
        lookup(Served.SKIPPED, op="skipped_op"),
    )
    done = command_line("needed", "tp=2,model=llama", *LIKE)

    assert (done.code, done.err) == (1, "")
    assert done.out.splitlines() == [
        "model=llama,tp=2: autotuning is needed: 4 lookups missing of old_op, toy_op, 165 covered",
        "  old_op: 1 lookup",
        "    1 memory",
        "  toy_op: 3 lookups",
        "    2 tuned: no entry for the op",
        "    1 default: op known, shape not",
        "23 lookups got the default itself: tuning gains nothing there.",
        "1 lookup not counted, excluded from tuning: skipped_op",
        f"Recorded {time_of()} as {WORKLOAD.id}.",
    ]


def test_json(command_line: CommandLine, recorded: Recorded) -> None:
    missing, skipped = lookup(Served.DEFAULT, op="toy_op", reason="no entry for the op"), lookup(Served.SKIPPED)
    recorded.keep(missing, skipped)
    document = command_line.json("needed", "model=llama,tp=2", *LIKE, code=1)

    assert len(document.pop("gains_nothing")) == 23
    assert document == {
        "workload": "model=llama,tp=2",
        "id": WORKLOAD.id,
        "needed": True,
        "why": "",
        "recorded": time_of(),
        "covered": 165,
        "missing": {"toy_op": json.loads(write_lookups([missing]))},
        "skipped": json.loads(write_lookups([skipped])),
        "others": [],
    }


GONE = "there was a selection when it was recorded, now there is none"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        pytest.param(
            ["--fact", "cudnn_version=92400"], "cudnn_version: recorded 91900, here 92400", id="another cuDNN"
        ),
        pytest.param(["--device", "NVIDIA B200"], "gpu: recorded NVIDIA H200, here NVIDIA B200", id="another GPU"),
        pytest.param(["--match", "compatible"], GONE, id="another level"),
        pytest.param(["--execution-mode", "eager"], GONE, id="another policy"),
        pytest.param(["--registry", "./elsewhere"], GONE, id="another registry"),
    ],
)
def test_it_is_not_known(command_line: CommandLine, recorded: Recorded, options: list[str], why: str) -> None:
    recorded.keep()
    facts = command_line.folder / "facts.json"
    facts.write_text(json.dumps(recorded.environment.metadata()), "utf-8")
    done = command_line("needed", "model=llama,tp=2", "--environment", facts, *options)

    assert (done.code, done.err) == (3, "")
    assert done.out.splitlines()[0] == (
        f"model=llama,tp=2: not known whether autotuning is needed: {why}; record the workload again"
    )


def test_registry_and_level_need_not_be_said_again(command_line: CommandLine) -> None:
    recorded = Recorded(command_line, "--match", "compatible", "--execution-mode", "cuda_graph")
    recorded.keep()
    facts = command_line.folder / "facts.json"
    facts.write_text(json.dumps(recorded.environment.metadata()), "utf-8")

    assert command_line.json("needed", "model=llama,tp=2", "--environment", facts)["covered"] == len(recorded.covered)


def test_a_workload_that_was_not_recorded(command_line: CommandLine, recorded: Recorded) -> None:
    recorded.keep()
    recorded.keep(workload="small")
    done = command_line("needed", "large", *LIKE)

    assert (done.code, done.err) == (3, "")
    assert done.out.splitlines() == [
        "name=large: not known whether autotuning is needed: nothing is recorded for this workload; "
        "run it with record_lookups(workload=...)",
        "Recorded are:",
        f"  model=llama,tp=2 ({WORKLOAD.id[:16]}, {time_of()})",
        f"  name=small ({Workload.of('small').id[:16]}, {time_of('small')})",
    ]
    document = command_line.json("needed", "large", *LIKE, code=3)
    assert (document["needed"], document["recorded"]) == (None, None)
    assert [other["workload"] for other in document["others"]] == ["model=llama,tp=2", "name=small"]


def test_nothing_was_recorded_yet(command_line: CommandLine) -> None:
    done = command_line("needed", "large", *LIKE)

    assert (done.code, done.err, len(done.out.splitlines())) == (3, "", 1)
    assert snapshot(command_line.folder) == {}


def test_the_beginning_of_an_id(command_line: CommandLine, recorded: Recorded) -> None:
    recorded.keep()

    assert command_line.json("needed", WORKLOAD.id[:16], *LIKE)["workload"] == "model=llama,tp=2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "Missing argument 'WORKLOAD'", id="no workload"),
        pytest.param(
            ["model=llama,fast"], "workload: 'fast' has no value; write it like model=llama,tp=2", id="no value"
        ),
        pytest.param([""], "workload: name can't be ''", id="an empty one"),
        pytest.param(["llama", "--match", "fuzzy"], "'fuzzy' is not one of", id="no level"),
    ],
)
def test_wrong_usage(command_line: CommandLine, arguments: list[str], message: str) -> None:
    assert message in command_line.fault(2, "needed", *arguments)


def test_a_damaged_record_is_told(command_line: CommandLine, recorded: Recorded) -> None:
    recorded.keep()
    path = command_line.cache / "workloads" / f"{WORKLOAD.id}.json"
    path.write_bytes(b"{}")
    done = command_line("needed", "model=llama,tp=2", *LIKE)

    assert done.code == 3
    assert "nothing is recorded" in done.out
    assert done.err.startswith(f"fi-tunecache: {path} was damaged (not the record of a workload")
    assert path.with_name(f"{path.name}.corrupt").exists()


def test_what_the_cache_tells_of_records(command_line: CommandLine, recorded: Recorded) -> None:
    recorded.keep()
    path = command_line.cache / "workloads" / f"{WORKLOAD.id}.json"

    def line() -> str:
        return command_line.output("cache", "list").splitlines()[-1]

    assert line().split(maxsplit=5)[:2] == ["workloads", WORKLOAD.id[:16]]
    assert line().endswith("  model=llama,tp=2, 165 lookups")
    assert command_line("verify", "cache").code == 0
    path.write_bytes(b"{}")
    assert line().endswith("  damaged")
    assert command_line("verify", "cache").code == 5
    path.unlink()
    recorded.keep()
    path.rename(path.with_name(f"{'0' * 32}.json"))
    assert "its id is not its name; record the workload again" in command_line("verify", "cache").out


def test_publish_takes_the_record(command_line: CommandLine) -> None:
    """With it both runners of a shape are published, and whether the default raced is known."""
    source = Path(__file__).parent / "data" / "h200-flashinfer-0.7.4" / "gemm-a.v1.json"
    entries = read_cache_file(source.read_bytes()).entries
    lookups = [
        RecordedLookup(keys=(entry.key,), served=Served.TUNED, runner=entry.runner, tactic=entry.tactic, raced=True)
        for entry in entries
    ]
    path = keep_workload(WORKLOAD, lookups, environment=made.H200, selection=None)
    command_line("publish", source, "--lookups", path, "--to", "./registry", "--yes")
    (row,) = command_line.json("list", "--registry", "./registry")["bundles"]

    assert (row["entry_count"], row["lookups"], row["default_raced"]) == (90, 90, True)


def test_a_start_script_can_rely_on_the_exit_code(command_line: CommandLine, recorded: Recorded) -> None:
    recorded.keep(lookup(Served.TUNED, op="toy_op"))
    arguments = ["needed", "model=llama,tp=2", *LIKE]

    assert run_process(*arguments, folder=command_line.folder).returncode == 1
    recorded.keep()
    assert run_process(*arguments, folder=command_line.folder).returncode == 0
