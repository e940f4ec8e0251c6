"""Runs command lines: in this process, where nothing of the machine but the given folder is used, or in a new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fi_tunecache.cli import main

LIKE = ("--like", "0.7.4/nvidia-h200")
"""The environment of the embedded bundles, for whoever needs one."""


TOKENS = ("hf_SECRETsecretSECRETsecretSECRETsecret", "api_org_SECRETsecretSECRETsecret")
"""What tests log in with. They are in no output, and in no file but one that is named ``token``."""


class Done(NamedTuple):
    code: int
    out: str
    err: str


def secret_free(done: Done) -> Done:
    """What was run, which has told no token."""
    assert not any(token in text for token in TOKENS for text in (done.out, done.err))
    return done


class CommandLine:
    """``fi-tunecache`` with its cache and working directory below one folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> Done:
        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return secret_free(Done(code, *self._capsys.readouterr()))

    def output(self, *arguments: str | Path) -> str:
        """What a command that succeeds prints; nothing on standard error."""
        done = self(*arguments)
        assert (done.code, done.err) == (0, "")
        return done.out

    def json(self, *arguments: str | Path, code: int = 0) -> Any:
        """The one document that a command with ``--json`` prints."""
        done = self(*arguments, "--json")
        assert (done.code, done.err) == (code, "")
        return json.loads(done.out)

    def fault(self, code: int, *arguments: str | Path) -> str:
        """The one line of a command that fails, without its prefix. Nothing is printed, nothing written."""
        before = snapshot(self.folder)
        done = self(*arguments)
        assert (done.code, done.out) == (code, ""), done
        assert snapshot(self.folder) == before
        return only_line(done.err)


def only_line(err: str) -> str:
    (line,) = err.splitlines()
    assert line.startswith("fi-tunecache: "), line
    assert line.isprintable()
    return line.removeprefix("fi-tunecache: ")


def snapshot(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """Every file and folder with its inode, mode, size and time of change; locks and their folders left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_dir() and path.suffix != ".lock":
            status = path.lstat()
            found[name] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def run_process(
    *arguments: str | Path,
    folder: Path,
    environ: dict[str, str] | None = None,
    code: str | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """``python -m fi_tunecache`` in a new process, or ``python -c`` with ``code``; warnings are errors."""
    command = [sys.executable, "-W", "error", *(("-m", "fi_tunecache") if code is None else ("-c", code))]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env=isolated(folder, environ),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )
    secret_free(Done(done.returncode, done.stdout, done.stderr))
    return done


@contextmanager
def child(*command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes, which does not outlive a test that fails."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()  # does nothing where it has ended


NO_HUB = "http://127.0.0.1:9"
"""An endpoint where nobody listens: no test asks the true Hub."""
_OURS = ("FI_TUNECACHE_", "HF_", "HUGGING", "TRANSFORMERS_OFFLINE", "COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def reads(name: str) -> bool:
    """Whether our commands, or those that they start, act on a variable."""
    if name.startswith("FI_TUNECACHE_TEST_"):
        return False
    return name.startswith((*_OURS, "CUDA_VISIBLE_DEVICES")) or name.lower() in _PROXIES


def isolated(folder: Path, environ: dict[str, str] | None = None) -> dict[str, str]:
    """This process's variables without those that our commands read, the caches below ``folder``.

    Coverage is not measured there: it would write a file where a test lets nothing be written.
    """
    kept = {
        name: value for name, value in os.environ.items() if not reads(name) and not name.startswith("COVERAGE_PROCESS")
    }
    homes = {"FI_TUNECACHE_DIR": str(folder / "cache"), "HF_HOME": str(folder / "hf"), "HF_ENDPOINT": NO_HUB}
    return {**kept, **homes, **(environ or {})}
