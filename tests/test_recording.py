"""Recording the lookups of a program: who has answered, and why nobody has. Real FlashInfer, no GPU.

The programs are the scenes of ``recording_scenes.py``, which are played once for each release.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made
import pytest
from made_flashinfer import add_autotuner
from made_machine import run_python
from programs import Answer, Machine, Programs

from fi_tunecache.autotuner.observation import OF_CLASS, plain
from fi_tunecache.autotuner.recording import Recorder
from fi_tunecache.entry import Entry, ProfilingPolicy
from fi_tunecache.errors import FormatError
from fi_tunecache.key import Key
from fi_tunecache.publish.directory import add_bundles

VERSIONS = ["0.7.4", "0.7.2.post1", "0.7.2"]
HOT: ProfilingPolicy = ("cuda_graph_profile_replays", None, "l2_cache_policy", "hot")
COLD: ProfilingPolicy = ("cuda_graph_profile_replays", None, "l2_cache_policy", "cold")


def entry(op: str, m: int, tactic: int, policy: ProfilingPolicy = HOT, runner: str = "First") -> Entry:
    return Entry(Key(op, runner, ((m, 8),), ()), runner, tactic, policy)


RACED = [
    entry("toy", 1, 70),
    entry("toy", 2, 70, COLD),
    entry("blocked", 1, 71),
    entry("own", 1, 72),
    entry("dropped", 1, 73),
    entry("dropped", 1, 73, runner="Second"),
]
UNRACED = [entry("unraced", 1, 74), entry("unraced two", 1, 74)]


@pytest.fixture(scope="session")
def played(programs: Callable[[str], Programs], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answer]:
    answers: dict[str, Answer] = {}

    def play(version: str) -> Answer:
        if version not in answers:
            folder = tmp_path_factory.mktemp("recording")
            environment = made.H200.with_facts({"flashinfer_version": version})
            raced = made.bundle(RACED, environment=environment)
            unraced = made.bundle(UNRACED, environment=environment, default_raced=False)
            add_bundles(folder / "registry", "made", [raced, unraced])
            (folder / "machine").mkdir()
            here = Machine(
                programs(version), folder / "machine", [raced], FI_TUNECACHE_REGISTRY=str(folder / "registry")
            )
            answers[version] = here.run("import recording_scenes\nresult = recording_scenes.play(os.getcwd())", [])
        return answers[version]

    return play


@pytest.fixture(params=VERSIONS)
def told(request: pytest.FixtureRequest, played: Callable[[str], Answer]) -> Callable[[str], Any]:
    """What a scene tells, where nothing was logged."""

    def tell(scene: str) -> Any:
        result, log = played(request.param).result[scene]
        assert log == []
        assert not isinstance(result, str), result
        return result

    return tell


def buckets(line: str) -> list[str]:
    """The same for M = 1, 2 and 4."""
    return [line.replace(" M:", f" {m}:") for m in (1, 2, 4)]


TUNED = buckets("1 tune toy M: tuned First 2 NOTHING")

ANSWERS = {
    "nothing is loaded": ["3 toy 2: default First -1 NOTHING"],
    # A call that tunes asks for all buckets, and at last for its own shape, which is one of them.
    "tuned and asked again": [
        *TUNED,
        "1 tune toy 2: memory First 2",
        "1 tune toy 1: memory First 2",
        "1 tune toy 4: memory First 2",
        "1 toy 2: memory First 2",
    ],
    "tuned before": ["1 toy 1: memory First 2"],
    "tuned into a file": [*TUNED, "1 toy 1: file First 2"],
    # Not all that is in memory is saved, and FlashInfer does not tell what is.
    "tuned saved and tuned on": [
        *TUNED,
        *buckets("1 tune other M: tuned First 2 NOTHING"),
        "1 toy 1: memory First 2",
    ],
    "the faster runner": buckets("1 tune toy M: tuned Second (8, 1) NOTHING"),
    "a tactic that is a list": [
        *buckets("1 tune toy M: tuned Unhashable (8, (1, 2)) NOTHING"),
        "2 toy 1: memory Unhashable (8, (1, 2))",
    ],
    "no tactic works": buckets("2 tune toy M: default First -1 NOTHING"),
    "out of memory": ["1 tune toy 1: default First -1 NOTHING"],
    "tuning raises": ["1 tune toy 1: default First -1 NOTHING"],
    "tuned under other extras": [
        *buckets("1 tune toy M: default Exact -1 EXTRAS"),
        "1 toy 2: default Exact -1 EXTRAS",
    ],
    "a loaded file": [
        "1 toy 2: file First 7",
        "1 toy 2: file Second (5, 1)",
        "1 toy 4: file First -1",
        "1 tune toy 1: tuned First 2 SHAPE",
        "1 tune toy 2: file First 7",
        "1 tune toy 4: file First -1",
    ],
    "a file and then another": [
        "1 toy 1: file First 7",
        "1 toy 1: default First -1 NOTHING",
        "1 toy 1: file First 8",
    ],
    "a managed store": [
        [*buckets("1 tune race toy M: tuned First 2 NOTHING"), "1 toy 1: store First 2"],
        [
            "2 race toy 1: default First -1 REFUSED",
            "1 race toy 1: store First 2",
            "1 race other 1: default First -1 OP",
            "1 race toy 1: default Second -1 RUNNER",
        ],
    ],
    "a store that can not be written": [
        *buckets("1 tune race toy M: tuned First 2 NOTHING"),
        "1 toy 1: memory First 2",
    ],
    "a policy without a store": [
        *buckets("1 tune race toy M: tuned First 2 NOTHING"),
        *buckets("1 tune race toy M: memory First 2"),
    ],
    "a bundled module": ["1 toy 1: bundled First 6", "1 toy 2: default First -1 NOTHING"],
    "search cache itself": [
        "3 toy 2: file First 7",
        "1 toy 1: default First -1 SHAPE",
        "1 tune toy 4: default First -1 SHAPE",
    ],
}

REASONS = {
    "what comes nearest": [
        "1 other 1: default First -1 OP",
        "1 toy 2: default Third -1 RUNNER",
        "1 toy 2: default First -1 RUNNER",
        "1 toy 1: default First -1 EXTRAS",
        "1 toy 4: default First -1 RUNNER",
        "1 toy 4: default Second -1 RUNNER",
        "1 toy 1: default First -1 REFUSED",
    ],
    "what was tuned counts as known": ["1 toy 2: default First -1 SHAPE"],
    # Outside tuning FlashInfer serves an entry of whatever policy.
    "another policy": [
        "1 tune toy 1: tuned First 2 POLICY",
        "1 tune toy 2: file First 7",
        "1 tune toy 4: file First 7",
        "1 toy 1: memory First 2",
    ],
    "a winner of another policy": [*buckets("1 tune toy M: tuned First 2 POLICY"), "1 toy 1: memory First 2"],
    "a store without policies": buckets("1 tune race toy M: tuned First 2 POLICY"),
    # With the buckets of the context, 1 and 2, M = 3 is 2.
    "skipped": [
        "3 toy 2: skipped First -1 SKIPPED",
        "1 tune toy 2: skipped First -1 SKIPPED",
        "1 tune ranked 1: skipped First -1 SKIPPED",
    ],
    "ranked": [
        "1 tune ranked 1: tuned First 2 RANKED",
        "2 tune ranked 1: memory First 2",
        "1 tune ranked 2: tuned First 2 SHAPE",
        "1 tune ranked 4: tuned First 2 SHAPE",
        "1 tune nothing to rank 1: default First -1 RANKED",
        "1 ranked 1: memory First 2",
    ],
    "the policy of the context": [["cuda_graph_profile_replays", 1, "l2_cache_policy", "hot"]] * 2,
    "buckets of the context": [
        "1 tune toy 1: tuned First 2 NOTHING",
        "1 tune toy 3: tuned First 2 NOTHING",
        "1 tune ranked 3: tuned First 2 RANKED",
        "1 toy 3: memory First 2",
        "1 toy 2: default First -1 SHAPE",
    ],
}

# Since 0.7.4 FlashInfer discards what it tunes again, wherever that came from.
DISCARDED = [
    ("0.7.4", "what flashinfer has discarded", "1 race toy 1: default First -1 DISCARDED"),
    ("0.7.2.post1", "what flashinfer has discarded", "1 race toy 1: file First 7"),
    ("0.7.2", "what flashinfer has discarded", "1 race toy 1: file First 7"),
    ("0.7.4", "a registry that was tuned over", "1 toy 2: default First -1 DISCARDED"),
    ("0.7.2.post1", "a registry that was tuned over", "1 toy 2: registry First 70"),
    ("0.7.2", "a registry that was tuned over", "1 toy 2: registry First 70"),
]

# Since 0.7.4 it replaces in a store, too, what it tunes again. So what has not raced the default is put there, is
# served in replay, and gives way where the default races.
IN_A_STORE = [
    (
        "0.7.4",
        [
            "1 race unraced 1: registry First 74",
            "1 tune race unraced 1: tuned First 2 NOT_RACED",
            "1 unraced 1: store First 2",
        ],
    ),
    *(
        (
            version,
            [
                "1 race unraced 1: default First -1 LEFT_OUT",
                "1 tune race unraced 1: tuned First 2 LEFT_OUT",
                "1 unraced 1: store First 2",
            ],
        )
        for version in ("0.7.2.post1", "0.7.2")
    ),
]

WHY_DROPPED = "dropped at resolution: no recorded lookup tells the caller's order and times are missing"
REGISTRY = {
    # Of its eight entries two were dropped.
    "a registry": [
        "2 toy 1: registry First 70",
        "1 toy 4: default First -1 SHAPE",
        "1 other 1: default First -1 OP",
        "1 toy 1: default Second -1 RUNNER",
        "1 toy 1: default First -1 EXTRAS",
        "1 toy 1: default First -1 REFUSED",
        "1 blocked 1: default First -1 BLOCKED",
        f"1 dropped 1: default First -1 {WHY_DROPPED}",
        "1 own 1: default First -1 OWN_COMES_FIRST",
        "1 own 1: file Second 5",
        "1 toy 2: registry First 70",
        "1 tune toy 1: registry First 70",
        "1 tune toy 2: tuned First 2 POLICY",
        "1 tune toy 4: tuned First 2 SHAPE",
        "1 toy 2: file First 2",
        [6],
    ],
    "a registry without its reasons": [["1 dropped 1: default First -1 OP"]] * 3,
    "a registry where the default races": [
        "1 tune race unraced 1: tuned First 2 NOT_RACED",
        "1 tune race toy 1: registry First 70",
        "1 race unraced two 1: registry First 74",
    ],
    "a registry and a policy": [
        "1 toy 1: registry First 70",
        "1 race toy 1: default First -1 OTHER_TABLES",
    ],
    "a store that is seeded": [
        "2 race toy 1: registry First 70",
        "1 race blocked 1: default First -1 BLOCKED",
        f"1 race dropped 1: default First -1 {WHY_DROPPED}",
        "1 race toy 4: default First -1 SHAPE",
        "1 tune race mine 1: tuned First 2 OP",
        "1 mine 1: store First 2",
    ],
    "a store that is seeded too late": [
        "1 race toy 1: default First -1 LATE",
        "1 race toy 1: registry First 70",
    ],
    "enabled and disabled": [
        "2 toy 1: default First -1 NOTHING",
        "1 toy 1: registry First 70",
        "1 toy 1: file First 70",
    ],
    "observed": [
        "1 toy 1: default First -1 OBSERVED",
        "1 blocked 1: default First -1 BLOCKED",
        "1 own 1: default First -1 OWN_COMES_FIRST",
        "1 other 1: default First -1 OP",
        "1 unraced 1: default First -1 OBSERVED",
        "1 toy 4: default First -1 SHAPE",
        "1 tune toy 2: tuned First 2 POLICY",
        "1 tune toy 1: tuned First 2 OBSERVED",
        "1 tune race unraced two 1: tuned First 2 NOT_RACED",
        "1 race toy 1: default First -1 OBSERVED",
    ],
}

RECORDING = {
    "a runner that asks": [
        "1 tune outer 1: tuned Outer 2 NOTHING",
        "1 tune inner 1: tuned Inner 2 NOTHING",
        "1 tune inner 1: memory Inner 2",
        "1 tune ranked 1: tuned Ranked 2 RANKED",
    ],
    # 4 threads ask by choose_one for three buckets, 4 for one by search_cache, 4 skip one op and tune another.
    "many threads": {
        "toy 1 file": 1600,
        "toy 2 tuned": 1,
        "toy 2 memory": 799,
        "toy 4 tuned": 1,
        "toy 4 memory": 799,
        "skipped 1 skipped": 800,
        **{f"tuned {m} tuned": 4 for m in (1, 2, 4)},
        **{f"tuned {m} memory": 796 for m in (1, 2, 4)},
    },
    "plain again": [True, ["choose_one", "rank_tactics", "search_cache"], [True, True, True], True],
    "two recordings": [
        ["2 toy 1: default First -1 NOTHING", "1 toy 2: default First -1 NOTHING"],
        ["1 toy 1: default First -1 NOTHING"],
        True,
    ],
    "somebody else wraps too": [
        [
            "1 toy 1: default First -1 NOTHING",
            "1 tune skipped 1: skipped First -1 SKIPPED",
            "1 tune ranked 1: tuned First 2 RANKED",
        ],
        [
            "1 toy 1: default First -1 OP",
            "1 tune skipped 1: skipped First -1 SKIPPED",
            "1 tune ranked 1: memory First 2",
        ],
        12,
        True,
    ],
    "the end while a call runs": ["First", 2, []],
    "a small table": [f"10 toy {m}: default First -1 NOTHING" for m in (1, 2, 4)],
    "a configuration for each call": [["100 toy 1: default First -1 NOTHING"], 1, 1],
    "what was kept is let go": [2, 0, 0],
    "arguments named like ours": ["1 toy 1: default First -1 NOTHING"],
    "a policys winner is not saved": [f"1 tune race toy {m}: memory First 2" for m in (1, 2, 4)],
    "a configuration without a hash": ["2 toy 1: default First -1 NOTHING"],
    "a file for publish": [True, 4],
    "a report while it goes on": [0, 1, 2],
    "kept": [True, True, "NVIDIA H200", "autotuning is needed: 1 lookup missing of toy, 1 covered"],
    "a fault in each function": {},
}


def cases(table: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("scene", "expected"), [pytest.param(*item, id=item[0]) for item in table.items()])


@pytest.mark.slow
@cases(ANSWERS)
def test_who_has_answered(told: Callable[[str], Any], scene: str, expected: Any) -> None:
    assert told(scene) == expected


@pytest.mark.slow
@cases(REASONS)
def test_why_nobody_has(told: Callable[[str], Any], scene: str, expected: Any) -> None:
    assert told(scene) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("version", "scene", "last"), DISCARDED)
def test_what_is_discarded(played: Callable[[str], Answer], version: str, scene: str, last: str) -> None:
    result, log = played(version).result[scene]
    assert (result[-1], log) == (last, [])


@pytest.mark.slow
@pytest.mark.parametrize(("version", "expected"), IN_A_STORE)
def test_what_has_not_raced_in_a_store(played: Callable[[str], Answer], version: str, expected: list[str]) -> None:
    result, log = played(version).result["what has not raced and a store"]
    assert (result, log) == (expected, [])


@pytest.mark.slow
@cases(REGISTRY)
def test_with_entries_of_a_registry(told: Callable[[str], Any], scene: str, expected: Any) -> None:
    assert told(scene) == expected


@pytest.mark.slow
@cases(RECORDING)
def test_the_recording(told: Callable[[str], Any], scene: str, expected: Any) -> None:
    assert told(scene) == expected


FAULT = (
    "recording has stopped: TypeError: 'NoneType' object is not callable; "
    "this is a fault of fi-tunecache: please report it"
)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("scene", "expected", "warnings"),
    [
        pytest.param(
            "not kept",
            [["UsageError", "UsageError"], [None, None, None]],
            [
                "the lookups of name=raises are not kept: the program has raised",
                "the lookups of name=asks nothing are not kept: there were none",
                f"{FAULT}; FlashInfer goes on",
                f"the lookups of name=has a fault are not kept: {FAULT}",
            ],
            id="not kept",
        ),
        pytest.param(
            "too many",
            [
                ["3 toy 1: default First -1 NOTHING", "1 toy 2: default First -1 NOTHING"],
                ["3 lookups more: too many different ones to tell apart"],
            ],
            [
                "the lookups of name=toy are not kept: there were too many different ones, and 3 are not told apart",
            ],
            id="too many",
        ),
        pytest.param(
            "keys that no file can hold",
            ["toy", "default", "('toy', 'First', ((1, 8),), (<class 'object'>,))", "FormatError", False],
            [
                "the lookups of name=toy are not kept: extras can't be read (invalid syntax (<unknown>, line 1)): "
                "(<class 'object'>,)"
            ],
            id="keys that no file can hold",
        ),
    ],
)
def test_what_is_not_kept(
    played: Callable[[str], Answer], version: str, scene: str, expected: Any, warnings: list[str]
) -> None:
    assert played(version).result[scene] == [expected, [f"fi-tunecache: {line}" for line in warnings]]


@pytest.mark.slow
def test_replay_coverage_agrees(played: Callable[[str], Answer]) -> None:
    """The numbers, and source by source: what FlashInfer serves from memory is told from where it came there."""
    result, log = played("0.7.4").result["as replay coverage says"]
    assert (result, log) == (
        [
            [
                True,
                {"registry": 6, "memory": 8, "file": 2, "default": 24, "skipped": 8},
                [
                    "fallback: default",
                    "legacy: file",
                    "legacy: registry",
                    "memory: memory",
                    "skip_ops: skipped",
                ],
            ],
            [
                True,
                {"registry": 6, "file": 2, "store": 8, "default": 24, "skipped": 8},
                [
                    "fallback: default",
                    "legacy: file",
                    "managed: registry",
                    "managed: store",
                    "memory: registry",
                    "memory: store",
                    "skip_ops: skipped",
                ],
            ],
        ],
        [],
    )


@pytest.mark.slow
def test_a_strict_replay_raises_as_ever(played: Callable[[str], Answer]) -> None:
    result, log = played("0.7.4").result["a strict replay"]
    assert (result, log) == ([["1 race toy 1: store First 2", "2 race other 1: default First -1 OP"], 2, 1, 2], [])


BEFORE_ITS_IMPORT = """
import sys
from fi_tunecache.lookups import record_lookups
with record_lookups() as lookups:
    assert "flashinfer" not in sys.modules and "torch" not in sys.modules
    from flashinfer.autotuner import AutoTuner, TunableRunner, TuningConfig
    search = AutoTuner.search_cache
    class First(TunableRunner):
        get_valid_tactics = forward = None
    assert AutoTuner.get().choose_one("toy", [First()], TuningConfig(), [])[1] == -1
assert AutoTuner.search_cache is not search
(lookup,) = lookups.recorded()
print(lookup.custom_op, lookup.served.value, lookup.count)
"""


@pytest.mark.slow
def test_it_begins_when_flashinfer_is_imported(flashinfer_folder: Callable[[str], Path], tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "PYTHONPATH": str(flashinfer_folder("0.7.4")),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
    }
    process = subprocess.run(
        [sys.executable, "-c", BEFORE_ITS_IMPORT], env=environ, check=True, capture_output=True, text=True
    )
    assert process.stdout.splitlines()[-1] == "toy default 1"


NOTHING_TO_RECORD = """
import json, logging
from fi_tunecache.errors import UsageError
from fi_tunecache.lookups import record_lookups, report
warnings = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("fi_tunecache").addHandler(handler)
try:
    report()
except UsageError as error:
    before = str(error)
with record_lookups() as lookups:
    {program}
print(json.dumps([before, str(report()).splitlines(), warnings]))
"""


@pytest.mark.parametrize(
    ("program", "notes", "warnings"),
    [
        pytest.param("pass", [], [], id="FlashInfer is not used"),
        pytest.param(
            "import flashinfer.autotuner",
            ["recording has stopped: AutoTuner has no choose_one; update fi-tunecache"],
            [
                "fi-tunecache: recording has stopped: AutoTuner has no choose_one; update fi-tunecache; "
                "FlashInfer goes on"
            ],
            id="an autotuner that is not known",
        ),
    ],
)
def test_nothing_to_record(tmp_path: Path, program: str, notes: list[str], warnings: list[str]) -> None:
    add_autotuner(tmp_path, "0.9.0")
    before, told, logged = run_python(NOTHING_TO_RECORD.format(program=program), tmp_path)
    assert before == "no lookups were recorded in this process; use record_lookups()"
    assert told == ["0 lookups of 0 questions: none", *notes]
    assert logged == warnings


@pytest.mark.parametrize(
    ("tactic", "expected"),
    [
        pytest.param(-1, -1, id="default"),
        pytest.param(True, True, id="bool"),
        pytest.param(None, None, id="none"),
        pytest.param([8, [1, (2, "x")]], (8, (1, (2, "x"))), id="nested lists"),
        pytest.param(range(3), (0, 1, 2), id="another sequence"),
        pytest.param(object, "<class 'object'>", id="what no entry can hold"),
    ],
)
def test_a_tactic_is_kept_as_an_entry_has_it(tactic: object, expected: object) -> None:
    found = plain(tactic)
    assert (found, type(found)) == (expected, type(expected))


def autotuner_with(**functions: Any) -> Any:
    def choose_one(self, custom_op, runners, tuning_config, inputs, **kwargs):  # type: ignore[no-untyped-def]
        raise AssertionError

    names = dict.fromkeys([*OF_CLASS, "search_cache", "rank_tactics", "save_configs"])
    kind = type("AutoTuner", (), {**names, "choose_one": choose_one, **functions})
    return SimpleNamespace(AutoTuner=kind, _collect_metadata=dict)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        pytest.param(
            {"search_cache": lambda self, custom_op: None},
            "AutoTuner.search_cache takes self, custom_op; update fi-tunecache",
            id="other arguments",
        ),
        pytest.param(
            {
                "search_cache": lambda self, custom_op, runners, input_shapes, tuning_config, inputs, more=1: None,
                "rank_tactics": lambda self: None,
            },
            "AutoTuner.rank_tactics takes self; update fi-tunecache",
            id="only more of them",
        ),
    ],
)
def test_an_autotuner_of_another_shape_is_left_alone(functions: dict[str, Any], message: str) -> None:
    module = autotuner_with(**functions)
    before = dict(vars(module.AutoTuner))
    with pytest.raises(FormatError, match=f"^{re.escape(message)}$"):
        Recorder(module, print)
    assert dict(vars(module.AutoTuner)) == before
