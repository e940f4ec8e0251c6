"""The selection for a program that serves: made in a process of its own, which is ended at the deadline.

A program that serves must not wait for a registry longer than it said, and a request can't be ended otherwise.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from . import errors
from .deadline import Deadline
from .errors import FiTuneCacheError, RegistryError
from .hub_failure import without_tokens
from .selection import Request

__all__ = ["Downloaded", "download"]

_START = "import sys; sys.path[:] = sys.argv[1:]; from fi_tunecache.download import main; main()"
_PYTHON = re.compile(r"(python|pypy)[\d.]*[a-z]*(\.exe)?$")
"""What the name of an interpreter ends with. An embedded or frozen one names the program itself, which would be started
a second time."""
_SHARE = 0.9
"""Of the deadline, for the process to end by itself and tell why."""


class _Asked(Struct):
    token: str
    request: Request
    root: str
    offline: bool
    deadline: float


class Downloaded(Struct):
    """A selection file's bytes, and what went wrong and was dealt with, a line each."""

    data: bytes
    notices: tuple[str, ...] = ()


class _Failed(Struct):
    kind: str
    problem: str
    next_step: str


class _Answer(Struct):
    failed: _Failed | None = None
    downloaded: Downloaded | None = None


def download(request: Request, root: Path, deadline: Deadline, *, offline: bool) -> Downloaded:
    """Make the selection for a request, and keep it in the user cache below ``root`` where that can be written.

    Where this process is killed meanwhile, the other one goes on for the rest of its time.

    Parameters
    ----------
    request, root
        What is asked for, and where the user cache is.
    deadline
        When the process is ended, whatever it does.
    offline
        Ask no Hub; take what is cached of it.

    Raises
    ------
    FiTuneCacheError
        Whatever :func:`~fi_tunecache.retrieval.pull` raises; RegistryError at the deadline, and where no process
        can be started or it says nothing.
    """
    token = secrets.token_hex(16)  # whatever else prints in that process can't take its words for an answer
    asked = msgspec.json.encode(_Asked(token, request, str(root), offline, deadline.remaining() * _SHARE))
    names = without_tokens(", ".join(request.registries))
    if not _PYTHON.search(sys.executable or ""):
        raise RegistryError(
            f"{names}: this program does not run in a Python that could start another ({sys.executable})",
            "pull before the start",
        )
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, *(folder for folder in sys.path if isinstance(folder, str))],
            env={**os.environ, "FI_TUNECACHE": "off"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it may name a token
            start_new_session=True,
        )
    except OSError as error:  # such as no memory
        raise RegistryError(f"{names}: no process can be started ({error.strerror})", "free memory") from error
    with process:
        try:
            said, _ = process.communicate(asked, deadline.remaining())
        except subprocess.TimeoutExpired:
            raise RegistryError(
                f"{names}: no answer in {deadline.seconds:g} s", "pull before the start, or give it more time"
            ) from None
        finally:
            _end(process)
    try:
        answer = msgspec.msgpack.decode(said.partition(token.encode())[2], type=_Answer)
    except msgspec.DecodeError:
        raise RegistryError(f"{names}: the download ended without an answer", "pull by hand to see why") from None
    if answer.failed is not None:
        kind = getattr(errors, answer.failed.kind) if answer.failed.kind in errors.__all__ else FiTuneCacheError
        raise kind(answer.failed.problem, answer.failed.next_step)
    assert answer.downloaded is not None
    return answer.downloaded


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, and the one that it may have started to talk to a Hub."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """What the process does: reads what is asked for from its input, and answers on its output."""
    from .retrieval import pull
    from .user_cache import UserCache

    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=_Asked)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get in between
    cache = UserCache(Path(asked.root))
    try:
        pulled = pull(asked.request, cache=cache, offline=asked.offline, deadline=asked.deadline)
    except FiTuneCacheError as error:
        answer = _Answer(failed=_Failed(type(error).__name__, error.problem, error.next_step))
    else:
        if pulled.not_stored is not None:
            cache.notice(f"not kept in the cache, so every start does it again: {pulled.not_stored}")
        answer = _Answer(downloaded=Downloaded(pulled.data, tuple(cache.notices)))
    answers.write(asked.token.encode() + msgspec.msgpack.encode(answer))
    answers.close()
