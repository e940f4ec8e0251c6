"""The adapter to FlashInfer's private names: what it finds there, and one line where it finds something else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from made import CUBLASLT, CUDNN, POLICY, TINY, entry, key
from made_flashinfer import add_autotuner
from made_machine import add_package, run_python

from fi_tunecache.entry import Entry
from fi_tunecache.flashinfer_json import CacheFile, write_cache_file
from fi_tunecache.key import Dtype, Key

VERSIONS = ["0.7.4", "0.7.2.post1", "0.7.2"]

CALL = (
    "import json\n"
    "from fi_tunecache.autotuner import collect_metadata\n"
    "from fi_tunecache.errors import FiTuneCacheError\n"
    "try:\n"
    "    environment = collect_metadata()\n"
    "    print(json.dumps(['', environment.metadata()]))\n"
    "except FiTuneCacheError as error:\n"
    "    print(json.dumps([type(error).__name__, str(error)]))\n"
)


@pytest.mark.parametrize(
    ("autotuner", "error", "message"),
    [
        pytest.param(
            None,
            "HardwareError",
            "FlashInfer can't be imported: ModuleNotFoundError: No module named 'flashinfer.autotuner';"
            " use --probe light",
            id="no autotuner",
        ),
        pytest.param(
            "assert False, 'no\\nGPU'",
            "HardwareError",
            "FlashInfer can't be imported: AssertionError: no GPU; use --probe light",
            id="an import that fails",
        ),
        pytest.param(
            "",
            "FormatError",
            "flashinfer.autotuner has no _collect_metadata; use --probe light, or update fi-tunecache",
            id="no such function",
        ),
        pytest.param(
            "def _collect_metadata(device): return {}",
            "HardwareError",
            "FlashInfer can't tell its environment: TypeError: _collect_metadata() missing 1 required positional"
            " argument: 'device'; use --probe light",
            id="another signature",
        ),
        pytest.param(
            "def _collect_metadata(): raise RuntimeError('CUDA error: ' + 'x' * 999)",
            "HardwareError",
            f"FlashInfer can't tell its environment: RuntimeError: CUDA error: {'x' * 188}; use --probe light",
            id="a function that fails",
        ),
        pytest.param(
            "def _collect_metadata(): return [1]",
            "FormatError",
            "flashinfer.autotuner._collect_metadata returns no facts; use --probe light",
            id="a list",
        ),
        pytest.param(
            "def _collect_metadata(): return {1: 'a'}",
            "FormatError",
            "flashinfer.autotuner._collect_metadata returns no facts; use --probe light",
            id="names that are no text",
        ),
    ],
)
def test_a_flashinfer_that_can_not_be_asked(tmp_path: Path, autotuner: str | None, error: str, message: str) -> None:
    add_package(tmp_path, "flashinfer", **({} if autotuner is None else {"autotuner": autotuner}))
    assert run_python(CALL, tmp_path) == [error, message]


def test_a_fact_that_is_no_text_is_refused(tmp_path: Path) -> None:
    add_package(tmp_path, "flashinfer", autotuner="def _collect_metadata(): return {'gpu': 7}")
    error, message = run_python(CALL, tmp_path)
    assert error == "FormatError"
    assert message.startswith("flashinfer.autotuner._collect_metadata: gpu is ")


def test_facts_are_taken_as_they_are_and_unknown_is_undetermined(tmp_path: Path) -> None:
    facts = {"flashinfer_version": "0.7.9", "cuda_version": "unknown", "gpu": "NVIDIA H200", "driver": "580"}
    add_package(tmp_path, "flashinfer", autotuner=f"def _collect_metadata(): return {facts}")
    assert run_python(CALL, tmp_path) == [
        "",
        {"flashinfer_version": "0.7.9", "gpu": "NVIDIA H200", "driver": "580"},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_real_flashinfer(flashinfer_folder: Callable[[str], Path], version: str) -> None:
    error, facts = run_python(CALL, flashinfer_folder(version))
    assert error == ""
    assert facts["flashinfer_version"] == version


TRY = """
import json, os
from pathlib import Path
from fi_tunecache.autotuner import Autotuner
from fi_tunecache.environment import Environment
from fi_tunecache.errors import FiTuneCacheError
from fi_tunecache.key import Key
try:
    autotuner = Autotuner(Environment(flashinfer_version=os.environ["MADE_VERSION"], gpu="NVIDIA H200"))
    for file in json.loads(os.environ["MADE_FILES"]):
        autotuner.load(Path(file))
    found = [autotuner.search(list(map(Key.parse, keys))) for keys in json.loads(os.environ["MADE_LOOKUPS"])]
    print(json.dumps([autotuner.entries(), found]))
except FiTuneCacheError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def tried(folder: Path, version: str, *files: Path, lookups: Iterable[Sequence[Key]] = ()) -> Any:
    """What is loaded and what is found, or the error."""
    environ = {
        "FLASHINFER_WORKSPACE_BASE": str(folder.parent),
        "MADE_VERSION": version,
        "MADE_FILES": json.dumps(list(map(str, files))),
        "MADE_LOOKUPS": json.dumps([[item.text for item in keys] for keys in lookups]),
    }
    return run_python(TRY, folder, environ=environ)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        pytest.param(
            {"begin": "raise OSError('libcudart.so')"},
            "HardwareError",
            "FlashInfer can't be imported: OSError: libcudart.so; install it again",
            id="an import that fails",
        ),
        pytest.param(
            {"imported": "0.7.2"}, "HardwareError", "FlashInfer 0.7.2 is imported, not 0.7.4", id="another version"
        ),
        pytest.param(
            {"end": "del TuningConfig"},
            "FormatError",
            "flashinfer.autotuner has no TuningConfig; update fi-tunecache",
            id="no such class",
        ),
        pytest.param(
            {"end": "del _collect_metadata"},
            "FormatError",
            "flashinfer.autotuner has no _collect_metadata; update fi-tunecache",
            id="no function that collects metadata",
        ),
        pytest.param(
            {"end": "del AutoTuner.load_configs"},
            "FormatError",
            "AutoTuner has no load_configs; update fi-tunecache",
            id="no such method",
        ),
        pytest.param(
            {"end": "AutoTuner.__init__ = lambda self: setattr(self, '_file_configs', {})"},
            "FormatError",
            "AutoTuner has no _file_config_policies; update fi-tunecache",
            id="older than the policies",
        ),
        pytest.param(
            {"end": "AutoTuner.search_cache = lambda *arguments: True"},
            "FormatError",
            "search_cache can't be asked: TypeError: cannot unpack non-iterable bool object; update fi-tunecache",
            id="another answer to a lookup",
        ),
    ],
)
def test_an_autotuner_of_another_shape(tmp_path: Path, parts: dict[str, str], error: str, message: str) -> None:
    add_autotuner(tmp_path, "0.7.4", **parts)
    assert tried(tmp_path, "0.7.4") == [error, message]


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
class TestTheRealAutotuner:
    @pytest.fixture
    def asked(self, flashinfer_folder: Callable[[str], Path], version: str, tmp_path: Path) -> Callable[..., Any]:
        """What a file with these entries gives, in an environment of this version."""

        def ask(entries: list[Entry], lookups: Iterable[Sequence[Key]], gpu: str = "NVIDIA H200") -> Any:
            file = tmp_path / "file.json"
            file.write_bytes(write_cache_file(CacheFile(tuple(entries), {"flashinfer_version": version, "gpu": gpu})))
            return tried(flashinfer_folder(version), version, file, lookups=lookups)

        return ask

    def test_a_file_is_loaded_and_looked_up(self, asked: Callable[..., Any]) -> None:
        entries = [
            entry(key(CUDNN, 1), (3, (1, 2))),
            entry(key(CUDNN, 2), 3),
            entry(key(CUBLASLT, 2), 7),
            Entry(key(TINY, 2), TINY, -1),
        ]
        lookups = {
            (key(CUDNN, 1), key(TINY, 1)): [0, [3, [1, 2]]],
            (key(CUDNN, 2), key(CUBLASLT, 2), key(TINY, 2)): [1, 7],
            (key(TINY, 2), key(CUBLASLT, 2)): [0, -1],
            (key(TINY, 4),): None,
        }
        loaded, found = asked(entries, lookups)
        assert loaded == {
            key(CUDNN, 1).text: [CUDNN, [3, [1, 2]], list(POLICY)],
            key(CUBLASLT, 2).text: [CUBLASLT, 7, list(POLICY)],
            key(TINY, 2).text: [TINY, -1, None],
        }
        assert found == list(lookups.values())

    def test_extras_must_be_what_flashinfer_would_print(self, asked: Callable[..., Any]) -> None:
        found = {
            (): True,
            (None, True, 1, -0.5, "torch.bfloat16", (Dtype("float8_e4m3fn"), ())): True,
            (Dtype("float1_of_tomorrow"),): True,  # this torch can't tell
            (Dtype("half"),): False,  # prints torch.float16
            (Dtype("nn"),): False,
        }
        keys = [Key("an op: é", "A runner", ((1, -1), (), (0,)), extras) for extras in found]
        keys.append(Key("op", "Runner", ((1,),), ([1],)))  # a list has no hash
        loaded, answers = asked([entry(at, 5) for at in keys], [[at] for at in keys])
        assert loaded.keys() == {at.text for at in keys}
        assert answers == [[0, 5] if served else None for served in (*found.values(), False)]

    def test_nothing_is_loaded_from_another_environment(self, asked: Callable[..., Any]) -> None:
        assert asked([entry(key(TINY), 0)], [[key(TINY)]], gpu="NVIDIA H100") == [{}, [None]]
