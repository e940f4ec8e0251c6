"""Fixtures that several test modules share."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from command_line import TOKENS, CommandLine, isolated
from hub_registry import REGISTRY, Machine, as_process, in_process, one_bundle, publish
from hub_server import Account, HubServer
from hypothesis import settings
from programs import Machine as ServingMachine
from programs import Programs, bundles_of
from real_flashinfer import RealFlashInfer

from fi_tunecache.bundle import Bundle
from fi_tunecache.publish.directory import add_bundles

settings.register_profile("tests", deadline=None)  # a busy machine is no failure
settings.load_profile("tests")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control ignores it for what it starts in the background, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """No test prints a token, nor does what it runs."""
    report = yield
    if any(token in text for token in TOKENS for _, text in report.sections):
        report.outcome, report.longrepr = "failed", "a token was printed"
    return report


@pytest.fixture(scope="session", autouse=True)
def _no_token_is_written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No file below any test's folder holds one, but those named ``token``, and these tests where one copies them."""
    yield
    wanted = [word for token in TOKENS for word in ("-e", token)]
    command = [
        "grep",
        "-rlsaF",
        "--exclude=token",
        "--exclude=command_line.py",
        *wanted,
        str(tmp_path_factory.getbasetemp()),
    ]
    assert subprocess.run(command, capture_output=True, text=True).stdout == ""


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


@pytest.fixture(scope="session")
def programs(
    flashinfer_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Programs]]:
    """Programs that use the real FlashInfer of a version; it is imported once, at its first use."""
    running: dict[str, Programs] = {}

    def start(version: str) -> Programs:
        if version not in running:
            running[version] = Programs(version, flashinfer_folder(version), tmp_path_factory.mktemp("programs"))
        return running[version]

    yield start
    for each in running.values():
        each.close()


@pytest.fixture
def serving_machine(programs: Callable[[str], Programs], tmp_path: Path) -> Callable[..., ServingMachine]:
    """A machine with a directory registry of bundles; by default those of 0.7.4 whose default raced."""

    def make(*bundles: Bundle, version: str = "0.7.4") -> ServingMachine:
        chosen = bundles or tuple(bundles_of(version))
        add_bundles(tmp_path / "registry", "made", list(chosen))
        folder = tmp_path / "machine"
        folder.mkdir()
        return ServingMachine(programs(version), folder, chosen, FI_TUNECACHE_REGISTRY=str(tmp_path / "registry"))

    return make


@pytest.fixture
def serving_with_hub(serving_machine: Callable[..., ServingMachine], hub: HubServer) -> ServingMachine:
    """The same with a registry on the Hub."""
    here = serving_machine()
    publish(hub, *here.bundles)
    here.environ |= {"HF_ENDPOINT": hub.endpoint, "FI_TUNECACHE_REGISTRY": REGISTRY}
    hub.clear_log()
    return here


@pytest.fixture
def shared_path() -> Iterator[Path]:
    """A directory that every user may enter, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Command lines in this process, with the caches and the working directory below ``tmp_path``."""
    roots = ("FLASHINFER_AUTOTUNE_CACHE_DIR", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR")
    environ = isolated(tmp_path, {"FLASHINFER_WORKSPACE_BASE": str(tmp_path / "flashinfer")})
    for name in (*(os.environ.keys() - environ.keys()), *roots):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return CommandLine(tmp_path, capsys)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """An empty Hub that is open to everybody; no request may have failed inside it."""
    with HubServer(tmp_path / "hub") as server:
        yield server
    assert server.errors == []


@pytest.fixture(scope="session")
def _pulled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hub and a cache with the first of two bundles; the Hub has got the other one since."""
    folder = tmp_path_factory.mktemp("pulled")
    with HubServer(folder / "hub") as server:
        publish(server, one_bundle(1))
        assert Machine(folder / "machine", server.endpoint, as_process()).entries() == 1
        publish(server, one_bundle(2))
    return folder


@pytest.fixture
def pulled_machine(
    hub: HubServer,
    tmp_path: Path,
    _pulled: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> Machine:
    """A machine, logged in to ``hub``, that has pulled the first of two bundles there.

    It has the client that is installed here, or the version of huggingface_hub that the test asks for.
    """
    version = getattr(request, "param", None)
    run = as_process(request.getfixturevalue("client_python")(version)) if version else in_process(capsys)
    shutil.copytree(_pulled / "hub", hub.folder, dirs_exist_ok=True)
    hub.tokens[TOKENS[0]] = Account()
    found = Machine(tmp_path / "machine", hub.endpoint, run, HF_TOKEN=TOKENS[0])
    shutil.copytree(_pulled / "machine" / "cache", found.cache, symlinks=True)
    return found


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
