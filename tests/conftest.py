"""Fixtures that several test modules share."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import CommandLine
from hub_server import HubServer
from hypothesis import settings
from real_flashinfer import RealFlashInfer

settings.register_profile("tests", deadline=None)  # a busy machine is no failure
settings.load_profile("tests")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control ignores it for what it starts in the background, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def flashinfer_folder() -> Callable[[str], Path]:
    """Where a release of flashinfer-python is installed. Fails, rather than skips, where it is not."""

    def folder(version: str) -> Path:
        variable = "FI_TUNECACHE_TEST_FLASHINFER"
        root = os.environ.get(variable)
        if not root:
            pytest.fail(f"{variable} is not set; scripts/check installs FlashInfer's releases and sets it")
        found = Path(root, version)
        if not (found / "flashinfer").is_dir():
            pytest.fail(f"{variable}={root} holds no FlashInfer {version}; scripts/check installs it")
        return found

    return folder


@pytest.fixture(scope="session")
def flashinfer(
    flashinfer_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], RealFlashInfer]]:
    """The real FlashInfer of a version; started once, at its first use."""
    running: dict[str, RealFlashInfer] = {}

    def start(version: str) -> RealFlashInfer:
        if version not in running:
            running[version] = RealFlashInfer(flashinfer_folder(version), tmp_path_factory.mktemp("flashinfer"))
        return running[version]

    yield start
    for process in running.values():
        process.close()


@pytest.fixture
def shared_path() -> Iterator[Path]:
    """A directory that every user may enter, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Command lines in this process, with the cache and the working directory below ``tmp_path``."""
    roots = ("FLASHINFER_AUTOTUNE_CACHE_DIR", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR")
    for name in ("FI_TUNECACHE_REGISTRY", "FI_TUNECACHE_MATCH", "CUDA_VISIBLE_DEVICES", *roots):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "flashinfer"))
    monkeypatch.setenv("FI_TUNECACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return CommandLine(tmp_path, capsys)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """An empty Hub that is open to everybody; no request may have failed inside it."""
    with HubServer(tmp_path / "hub") as server:
        yield server
    assert server.errors == []


@pytest.fixture(scope="session")
def client_python() -> Callable[[str], str]:
    """The Python that has a version of huggingface_hub. Fails, rather than skips, where there is none."""

    def python(version: str) -> str:
        variable = "FI_TUNECACHE_TEST_HUB"
        root = os.environ.get(variable)
        if not root:
            pytest.fail(f"{variable} is not set; scripts/check makes an environment for each huggingface_hub")
        found = Path(root, version, "bin", "python")
        if not found.exists():
            pytest.fail(f"{variable}={root} holds no environment of huggingface_hub {version}; scripts/check makes it")
        return str(found)

    return python
