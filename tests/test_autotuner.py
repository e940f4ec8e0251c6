"""The adapter to FlashInfer's private functions: one line whatever it meets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from made_machine import add_package, run_python

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
@pytest.mark.parametrize("version", ["0.7.4", "0.7.2.post1", "0.7.2"])
def test_the_real_flashinfer(flashinfer_folder: Callable[[str], Path], version: str) -> None:
    error, facts = run_python(CALL, flashinfer_folder(version))
    assert error == ""
    assert facts["flashinfer_version"] == version
