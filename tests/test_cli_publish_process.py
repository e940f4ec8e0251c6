"""``fi-tunecache publish`` as a process: the question that it asks at a terminal, and what an interrupt leaves."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import made
import pytest
from command_line import Done, child, isolated, only_line, run_process, secret_free
from hub_registry import NAME, REGISTRY
from hub_server import Fault, HubServer
from made_sources import v1_file

from fi_tunecache.folder import Folder
from fi_tunecache.manifest import read_manifest

FOLDER = "0.7.4/nvidia-h200"
QUESTION = "Publish this to ./registry? [y/N]:"
INTERRUPTED = "interrupted; nothing was half-written"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return v1_file(tmp_path / "tuned.json", [made.entry(made.key(made.CUTLASS, m), 3, 0.5) for m in (1, 2)])


@contextmanager
def publishing(folder: Path, *arguments: str, stdin: int, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A process that publishes; standard output and error are pipes."""
    command = [sys.executable, "-W", "error", "-m", "fi_tunecache", "publish", "tuned.json", *arguments]
    with child(*command, cwd=folder, env=isolated(folder, environ), stdin=stdin) as process:
        yield process


def end(process: subprocess.Popen[str], read: str = "") -> Done:
    out, err = process.communicate(timeout=60)
    return secret_free(Done(process.returncode, out, read + err))


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    read = ""
    while not read.endswith(text):
        piece = process.stderr.read(1)
        assert piece, read
        read += piece
    return read


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def answered(folder: Path, answer: Callable[[subprocess.Popen[str], int], None]) -> Done:
    """Publish at a terminal; standard error begins with the question."""
    ours, theirs = pty.openpty()
    try:
        with publishing(folder, "--to", "./registry", stdin=theirs) as process:
            os.close(theirs)
            read = read_until(process, QUESTION)
            answer(process, ours)
            done = end(process, read)
    finally:
        os.close(ours)
    return Done(done.code, done.out, done.err[done.err.index(QUESTION) :])


def types(text: bytes) -> Callable[[subprocess.Popen[str], int], None]:
    return lambda process, terminal: (os.write(terminal, text), None)[1]


def interrupt(process: subprocess.Popen[str]) -> None:
    """Once it waits: the moment before, Python notes a signal and reads on."""
    time.sleep(0.2)
    state = Path(f"/proc/{process.pid}/stat")
    wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "S")
    process.send_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(types(b"n\n"), id="no"),
        pytest.param(types(b"\n"), id="return"),
        pytest.param(types(b"\x04"), id="end of input"),
        pytest.param(lambda process, _: interrupt(process), id="interrupt"),
    ],
)
def test_who_does_not_say_yes(
    tmp_path: Path, source: Path, answer: Callable[[subprocess.Popen[str], int], None]
) -> None:
    done = answered(tmp_path, answer)
    assert done.code == 130
    assert done.err.rstrip("\n").endswith(f"fi-tunecache: {INTERRUPTED}")
    assert done.out.splitlines()[-1].startswith("1 bundle with 2 entries, "), "the plan was shown before"
    assert not (tmp_path / "registry").exists()


@pytest.mark.parametrize("word", [b"y\n", b"YES\n", b"what?\nyes\n"])
def test_who_says_yes(tmp_path: Path, source: Path, word: bytes) -> None:
    done = answered(tmp_path, types(word))
    assert done.code == 0
    assert done.out.splitlines()[-2].startswith("Published to ./registry at ")
    assert len(rows((tmp_path / "registry" / FOLDER / "manifest.json").read_bytes())) == 1


def test_json_asks_nobody_what_was_not_shown(tmp_path: Path, source: Path) -> None:
    ours, theirs = pty.openpty()
    with publishing(tmp_path, "--to", "./registry", "--json", stdin=theirs) as process:
        os.close(theirs)
        done = end(process)
    os.close(ours)
    assert (done.code, done.out) == (2, "")
    assert only_line(done.err.splitlines()[-1]) == (
        "--json shows the plan when all is done; give --yes, or look first with --dry-run"
    )
    assert not (tmp_path / "registry").exists()


def rows(manifest: bytes) -> list[str]:
    return [row.file for row in read_manifest(manifest, Folder.parse(FOLDER)).bundles]


# --- interrupts


@pytest.mark.parametrize(
    ("fault", "commits"),
    [
        pytest.param(Fault("/commit/", hang=60), 2, id="it has committed"),
        pytest.param(Fault("/commit/", status=500, hang=60), 1, id="it has not"),
    ],
)
def test_an_interrupt_while_the_hub_commits(
    tmp_path: Path, source: Path, hub: HubServer, fault: Fault, commits: int
) -> None:
    """Whichever it was, publishing again makes it whole."""
    hub.fault(fault)
    with publishing(tmp_path, "--to", REGISTRY, "--yes", stdin=subprocess.DEVNULL, HF_ENDPOINT=hub.endpoint) as process:
        wait_for(lambda: hub.requests("/commit/"))
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        done = end(process)
    assert time.monotonic() - started < 10
    assert done.code == 130
    assert done.err.splitlines()[-1] == f"fi-tunecache: {INTERRUPTED}"
    assert len(hub.commits(NAME)) == commits

    hub.clear_faults()
    again = run_process(
        "publish", source, "--to", REGISTRY, "--yes", folder=tmp_path, environ={"HF_ENDPOINT": hub.endpoint}
    )
    assert again.returncode == 0
    assert again.stdout.splitlines()[-1].startswith("Nothing to add" if commits == 2 else "Get it where it serves")
    assert len(hub.commits(NAME)) == 2
    assert len(rows(hub.read(NAME, f"{FOLDER}/manifest.json"))) == 1


def test_an_interrupt_while_somebody_else_writes(tmp_path: Path, source: Path) -> None:
    """It waits for the lock of the directory."""
    registry = tmp_path / "registry"
    registry.mkdir()
    with (
        filelock.FileLock(registry / ".fi-tunecache.lock"),
        publishing(tmp_path, "--to", "./registry", "--yes", stdin=subprocess.DEVNULL) as process,
    ):
        assert process.stdout is not None
        while not process.stdout.readline().startswith("1 bundle with "):
            pass
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        done = end(process)
    assert done.code == 130
    assert only_line(done.err.splitlines()[-1]) == INTERRUPTED
    assert [path.name for path in registry.iterdir()] == [".fi-tunecache.lock"]


def test_somebody_else_who_writes_for_too_long(tmp_path: Path, source: Path) -> None:
    registry = tmp_path / "registry"
    registry.mkdir()
    with filelock.FileLock(registry / ".fi-tunecache.lock"):
        done = run_process("publish", source, "--to", "./registry", "--yes", "--timeout", "0.5", folder=tmp_path)
    assert done.returncode == 4
    assert only_line(done.stderr.splitlines()[-1]) == "./registry is being written by somebody else; try again"
    assert [path.name for path in registry.iterdir()] == [".fi-tunecache.lock"]
