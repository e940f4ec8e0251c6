"""The round trip before an upload: what FlashInfer would not load or serve is never published."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from made import CUBLASLT, CUDNN, H200, POLICY, TINY, bundle, entry, key, lookup
from made_flashinfer import add_autotuner
from made_machine import run_python

from fi_tunecache import __version__
from fi_tunecache.bundle import Bundle, read_bundle, write_bundle
from fi_tunecache.entry import Entry, Lookup
from fi_tunecache.errors import FormatError
from fi_tunecache.folder import Folder
from fi_tunecache.key import Dtype, Key
from fi_tunecache.publish.round_trip import OurRules, RoundTrip, find_problem, round_trip
from fi_tunecache.registry import open_registry
from fi_tunecache.registry_tree import EMBEDDED

OURS = f"fi-tunecache {__version__}"
REAL = "flashinfer 0.7.4"
NOT_CHECKED = "FlashInfer 0.7.4 did not check the bundle, our own rules did: "

ORDER = [CUDNN, CUBLASLT, TINY]
GOOD = bundle(
    [entry(key(CUDNN), (3, 1)), entry(key(CUBLASLT, 2), 7), entry(key(TINY, 3), -1)],
    [lookup(ORDER, CUDNN), lookup(ORDER, CUBLASLT, 2), lookup([TINY], TINY, 3)],
)
LISTED = Key("bf16_gemm", TINY, ((1, 4096), (0,)), ([1, 2],))
ALIAS = Key("bf16_gemm", TINY, ((1, 4096), (0,)), (Dtype("half"),))

UNSERVED = [
    pytest.param(
        bundle([entry(key(CUDNN), 3), entry(key(CUDNN, 2), 0), entry(key(TINY), 0)]),
        f"2 of 3 entries not loaded as written, the first {key(CUDNN)}",
        id="positions in cuDNN's list of plans, which FlashInfer drops",
    ),
    pytest.param(
        bundle([entry(key(TINY), 0), entry(LISTED, 0)]),
        f"1 of 2 entries not served, the first {LISTED}",
        id="extras that FlashInfer can't hash",
    ),
    pytest.param(
        bundle(
            [entry(key(CUDNN), (3, (1, 2))), entry(key(CUBLASLT), 7), entry(key(TINY, 2), 0)],
            [lookup(ORDER, CUBLASLT), lookup([TINY], TINY, 2)],
        ),
        f"1 of 2 recorded lookups not answered by the winner, the first by {CUDNN} instead of {key(CUBLASLT)}",
        id="a winner behind another runner with an entry",
    ),
    pytest.param(
        bundle([entry(key(TINY), 0)], [Lookup((key(TINY), Key("bf16_gemm", CUDNN, key(TINY).profile, ([],))), 0)]),
        f"1 of 1 recorded lookup not answered by the winner, the first by nothing instead of {key(TINY)}",
        id="a rival that FlashInfer can't look up",
    ),
]


def data_of(made: Bundle) -> bytes:
    return write_bundle(made)[0]


def without_flashinfer() -> list[str]:
    return [path for path in sys.path if not Path(path, "flashinfer").is_dir()]


def refusal(data: bytes, search_path: list[str], deadline: float = 120.0) -> str:
    with pytest.raises(FormatError) as caught:
        round_trip(data, search_path=search_path, deadline=deadline)
    return str(caught.value)


def embedded(version: str) -> list[Bundle]:
    registry, folder = open_registry(EMBEDDED), Folder(version, "nvidia-h200")
    return [registry.bundle(folder, row) for row in registry.manifest(folder).bundles]


class TestOurOwnRules:
    """Where FlashInfer of the bundle's version is not at hand."""

    def test_what_checked_is_said_and_why(self) -> None:
        done = round_trip(data_of(GOOD), search_path=without_flashinfer())
        assert done == RoundTrip(OURS, f"{NOT_CHECKED}FlashInfer is not installed for this Python")

    def test_the_path_is_that_of_this_process(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        add_autotuner(tmp_path, "0.7.2")
        monkeypatch.syspath_prepend(tmp_path)
        assert round_trip(data_of(GOOD)) == RoundTrip(OURS, f"{NOT_CHECKED}0.7.2 is installed here")

    @pytest.mark.parametrize("version", ["0.7.4", "0.7.2.post1"])
    def test_the_embedded_bundles_pass(self, version: str) -> None:
        for made in embedded(version):
            assert round_trip(data_of(made), search_path=without_flashinfer()).checked_with == OURS

    @pytest.mark.parametrize(("made", "problem"), UNSERVED)
    def test_refused(self, made: Bundle, problem: str) -> None:
        message = refusal(data_of(made), without_flashinfer())
        assert message == f"round trip with {OURS}: {problem}; leave them out, or tune again"


class TestBytes:
    """What is asked of them before anyone is asked."""

    def test_another_spelling_of_the_same_bundle_is_refused(self) -> None:
        data = data_of(GOOD) + b"\n"
        assert read_bundle(data) == GOOD
        message = refusal(data, without_flashinfer())
        assert message == "not the canonical bytes of this bundle; let fi-tunecache write it"

    def test_an_entry_of_another_runner_than_its_keys_is_refused(self) -> None:
        data = data_of(GOOD).replace(f'["{TINY}"'.encode(), f'["{CUBLASLT}"'.encode())
        assert f"a value names {CUBLASLT}, its key {TINY}" in refusal(data, without_flashinfer())


class TestAFlashInferThatCanNotBeAsked:
    """Our own rules decide, and the notice tells what is wrong with FlashInfer."""

    @pytest.mark.parametrize(
        ("parts", "reason"),
        [
            pytest.param(
                {"begin": "assert False, 'no GPU'"}, "FlashInfer can't be imported: AssertionError: no GPU", id="raises"
            ),
            pytest.param({"begin": "sys.exit(3)"}, "FlashInfer can't be imported: SystemExit: 3", id="exits"),
            pytest.param(
                {"begin": "os.kill(os.getpid(), signal.SIGKILL)"},
                "it could not be imported: its process was killed by signal 9",
                id="is killed",
            ),
            pytest.param(
                {"begin": "print('out of luck\\n'); sys.stdout.flush(); os._exit(3)"},
                "it could not be imported: its process ended with exit status 3 (out of luck)",
                id="ends the process",
            ),
            pytest.param(
                {"begin": "os._exit(0)"},
                "it could not be imported: its process ended with exit status 0 (nothing was printed)",
                id="ends the process in silence",
            ),
            pytest.param({"imported": "0.7.9"}, "FlashInfer 0.7.9 is imported, not 0.7.4", id="is another"),
            pytest.param({"end": "del AutoTuner"}, "flashinfer.autotuner has no AutoTuner", id="has no tuner"),
            pytest.param(
                {"parameter": ", device"},
                "search_cache can't be asked: TypeError: AutoTuner.search_cache() missing 1 required positional "
                "argument: 'device'",
                id="has another search_cache",
            ),
        ],
    )
    def test_one_line_says_why(self, tmp_path: Path, parts: dict[str, str], reason: str) -> None:
        add_autotuner(tmp_path, "0.7.4", **parts)
        done = round_trip(data_of(GOOD), search_path=[str(tmp_path), *sys.path])
        assert done == RoundTrip(OURS, NOT_CHECKED + reason)

    def test_an_import_that_hangs_is_killed_with_what_it_started(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MADE_NOTE", str(tmp_path / "note"))
        add_autotuner(tmp_path, "0.7.4", begin=HANG)
        done = round_trip(data_of(GOOD), search_path=[str(tmp_path), *sys.path], deadline=5)
        assert done.notice == f"{NOT_CHECKED}it could not be imported: its process did not finish within 5 s"
        assert_gone(tmp_path / "note")

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            pytest.param(
                "echo nonsense", "can't be read; it ended with exit status 0 (nothing was printed)", id="text"
            ),
            pytest.param("echo 7", "can't be read; it ended with exit status 0 (nothing was printed)", id="a number"),
            pytest.param(
                r"printf '\377'; echo oops >&2; exit 5", "can't be read; it ended with exit status 5 (oops)", id="bytes"
            ),
        ],
    )
    def test_garbage_is_no_answer(self, tmp_path: Path, script: str, reason: str) -> None:
        add_autotuner(tmp_path, "0.7.4")
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        done = round_trip(data_of(GOOD), python=str(python), search_path=[str(tmp_path), *sys.path])
        assert done.notice == f"{NOT_CHECKED}the answer of its process {reason}"

    def test_a_python_that_is_not_there(self, tmp_path: Path) -> None:
        add_autotuner(tmp_path, "0.7.4")
        done = round_trip(data_of(GOOD), python=str(tmp_path / "python"), search_path=[str(tmp_path), *sys.path])
        reason = "it could not be imported: its process did not start (No such file or directory)"
        assert done == RoundTrip(OURS, NOT_CHECKED + reason)


class TestAFlashInferThatIsAsked:
    """It has the last word."""

    @pytest.mark.parametrize(
        "begin",
        [
            pytest.param("", id="quiet"),
            pytest.param("print('[]'); os.write(1, b'[]'); os.write(2, b'[]')", id="one that prints"),
            pytest.param("import atexit; atexit.register(os.abort)", id="one that crashes when it is done"),
        ],
    )
    def test_what_it_serves_passes(self, tmp_path: Path, begin: str) -> None:
        add_autotuner(tmp_path, "0.7.4", begin=begin)
        assert round_trip(data_of(GOOD), search_path=[str(tmp_path), *sys.path]) == RoundTrip(REAL)

    @pytest.mark.parametrize(
        ("parts", "problem"),
        [
            pytest.param({"load": "return False"}, "3 of 3 entries not loaded as written, the first ", id="loads none"),
            pytest.param(
                {"loaded": "self._file_configs.popitem()"},
                f"1 of 3 entries not loaded as written, the first {key(TINY, 3)}",
                id="leaves one out",
            ),
            pytest.param(
                {"loaded": "self._file_configs[max(self._file_configs)] = (runner, 0)"},
                f"1 of 3 entries not loaded as written, the first {key(TINY, 3)}",
                id="loads another tactic",
            ),
            pytest.param(
                {"loaded": "self._file_config_policies.clear()"},
                "3 of 3 entries not loaded as written, the first ",
                id="loses the policies",
            ),
            pytest.param(
                {"hit": f"if runners[0].__class__.__name__ == {TINY!r}: continue"},
                f"1 of 3 entries not served, the first {key(TINY, 3)}",
                id="does not serve one",
            ),
            pytest.param(
                {"hit": "if len(runners) > 1: return True, 2, -1, None"},
                f"2 of 3 recorded lookups not answered by the winner, the first by {TINY} instead of {key(CUDNN)}",
                id="has another rule for several runners",
            ),
        ],
    )
    def test_what_it_does_not_serve_is_refused(self, tmp_path: Path, parts: dict[str, str], problem: str) -> None:
        add_autotuner(tmp_path, "0.7.4", **parts)
        message = refusal(data_of(GOOD), [str(tmp_path), *sys.path])
        assert message.startswith(f"round trip with {REAL}: {problem}")
        assert message.endswith("; leave them out, or tune again")

    @pytest.mark.parametrize(
        ("load", "end"),
        [
            pytest.param("raise KeyError(0)", "ended with exit status 1 (KeyError: 0)", id="raises"),
            pytest.param("os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9", id="is killed"),
            pytest.param("time.sleep(60)", "did not finish within 5 s", id="hangs"),
        ],
    )
    def test_what_it_fails_over_is_refused(self, tmp_path: Path, load: str, end: str) -> None:
        add_autotuner(tmp_path, "0.7.4", load=load)
        message = refusal(data_of(GOOD), [str(tmp_path), *sys.path], deadline=5 if "sleep" in load else 120)
        assert message == f"round trip with {REAL}: its process {end}; try again; report this if it stays so"

    def test_it_is_kept_apart_from_the_users_settings_and_caches(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("FLASHINFER_TACTICS_BLOCKLIST", "FLASHINFER_WORKSPACE_BASE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.setenv(name, "/mine")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        monkeypatch.setenv("MADE_NOTE", str(tmp_path / "note"))
        note = "json.dump([dict(os.environ), sys.stdin.read(), sys.path], open(os.environ['MADE_NOTE'], 'w'))"
        add_autotuner(tmp_path, "0.7.4", begin=note)
        path = [str(tmp_path), *sys.path]
        assert round_trip(data_of(GOOD), search_path=path) == RoundTrip(REAL)

        environ, stdin, seen = json.loads((tmp_path / "note").read_text())
        assert "/mine" not in environ.values()
        assert (environ["CUDA_VISIBLE_DEVICES"], environ["HF_HUB_OFFLINE"], stdin, seen) == ("", "1", "", path)
        assert not Path(environ["FLASHINFER_WORKSPACE_BASE"]).exists()

    def test_an_interrupt_leaves_nothing_running(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        note = tmp_path / "note"
        monkeypatch.setenv("MADE_NOTE", str(note))
        add_autotuner(tmp_path, "0.7.4", begin=HANG)

        def interrupt() -> None:
            while not note.exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            round_trip(data_of(GOOD), search_path=[str(tmp_path), *sys.path])
        assert_gone(note)


HANG = (
    "child = subprocess.Popen(['sleep', '60'])\n"
    "note = os.environ['MADE_NOTE']\n"
    "open(note + '~', 'w').write(f'{os.getpid()} {child.pid}')\n"
    "os.rename(note + '~', note)\n"
    "time.sleep(60)"
)


def assert_gone(note: Path) -> None:
    """That the processes in a note have ended; nobody may have waited for them yet."""
    for number in note.read_text().split():
        stat = Path("/proc", number, "stat")
        end = time.monotonic() + 10
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
            assert time.monotonic() < end, f"process {number} is still running"
            time.sleep(0.05)


@pytest.mark.slow
class TestTheRealFlashInfer:
    @pytest.mark.parametrize("version", ["0.7.4", "0.7.2.post1"])
    def test_serves_every_embedded_bundle(self, flashinfer_folder: Callable[[str], Path], version: str) -> None:
        bundles = embedded(version)
        path = [str(flashinfer_folder(version)), *sys.path]
        done = [round_trip(data_of(made), search_path=path) for made in bundles]
        assert done == [RoundTrip(f"flashinfer {version}")] * len(bundles)

    def test_serves_in_a_version_that_nothing_was_published_for(
        self, flashinfer_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
        (made,) = embedded("0.7.2.post1")
        made = msgspec.structs.replace(made, environment=made.environment.with_facts({"flashinfer_version": "0.7.2"}))
        path = [str(flashinfer_folder("0.7.2")), *sys.path]
        assert round_trip(data_of(made), search_path=path) == RoundTrip("flashinfer 0.7.2")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("made", "problem"),
        [
            *UNSERVED,
            pytest.param(
                bundle([entry(ALIAS, 0), entry(key(TINY), 0)]),
                f"1 of 2 entries not served, the first {ALIAS}",
                id="a dtype by a name that it does not print",
            ),
        ],
    )
    def test_refuses(self, flashinfer_folder: Callable[[str], Path], made: Bundle, problem: str) -> None:
        message = refusal(data_of(made), [str(flashinfer_folder("0.7.4")), *sys.path])
        assert message == f"round trip with {REAL}: {problem}; leave them out, or tune again"

    def test_serves_ten_thousand_entries_soon(self, flashinfer_folder: Callable[[str], Path]) -> None:
        sizes = range(1, 5001)
        entries = [entry(key(runner, m), m) for m in sizes for runner in (CUBLASLT, TINY)]
        made = bundle(entries, [lookup(ORDER, CUBLASLT, m) for m in sizes])
        path = [str(flashinfer_folder("0.7.4")), *sys.path]
        start = time.monotonic()
        assert round_trip(data_of(made), search_path=path) == RoundTrip(REAL)
        assert time.monotonic() - start < 60

    @pytest.mark.parametrize("version", ["0.7.4", "0.7.2.post1", "0.7.2"])
    def test_agrees_with_our_own_rules(
        self, flashinfer_folder: Callable[[str], Path], version: str, tmp_path: Path
    ) -> None:
        chance = random.Random(20261201)
        made = [made_by_chance(chance, version) for _ in range(200)]
        for number, one in enumerate(made):
            (tmp_path / f"{number}.json").write_bytes(data_of(one))
        environ = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
        theirs = run_python(PROBLEMS.format(str(tmp_path), len(made)), flashinfer_folder(version), environ=environ)
        ours = [find_problem(read_bundle(data_of(one)), OurRules(one)) for one in made]
        assert theirs == ours
        for word in ("loaded", "served", "answered"):
            assert any(word in problem for problem in ours)
        assert ours.count("") > 50


PROBLEMS = """
import json
from pathlib import Path
from flashinfer.autotuner import AutoTuner
from fi_tunecache.autotuner import Autotuner
from fi_tunecache.bundle import read_bundle
from fi_tunecache.publish.round_trip import find_problem
problems = []
for number in range({1}):
    file = Path({0!r}, str(number) + ".json")
    bundle = read_bundle(file.read_bytes())
    AutoTuner._instance = None
    autotuner = Autotuner(bundle.environment)
    autotuner.load(file)
    problems.append(find_problem(bundle, autotuner))
print(json.dumps(problems))
"""


def made_by_chance(chance: random.Random, version: str) -> Bundle:
    """A few entries and lookups, most of them good."""
    extras = [(), (Dtype("bfloat16"), True), (None, (1, "a", 0.5))] + [([1],)] * (chance.random() < 0.2)
    keys = [
        Key("op", runner, profile, chance.choice(extras))
        for runner in (CUDNN, CUBLASLT, TINY)
        for profile in (((1, -1), (0,)), ((2, 64), ()))
    ]
    tactics = [-1, (3, (1, "a")), True, "a", None, 1.5, 7] if chance.random() < 0.2 else [-1, (3, ()), "b"]
    entries = [
        Entry(at, at.runner, chance.choice(tactics), chance.choice([None, (), POLICY]))
        for at in chance.sample(keys, chance.randint(1, len(keys)))
    ]
    held = {made.key for made in entries}
    lookups = []
    for profile in {made.key.profile for made in entries}:
        order = chance.sample([at for at in keys if at.profile == profile], 3)
        winners = [index for index, at in enumerate(order) if at in held]
        lookups.append(Lookup(tuple(order), winners[0] if chance.random() < 0.8 else winners[-1]))
    return bundle(entries, lookups, environment=H200.with_facts({"flashinfer_version": version}))
