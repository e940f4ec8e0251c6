"""Ask a process of our own to talk to a Hub, and end it where it takes too long."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from .deadline import Deadline
from .errors import FiTuneCacheError
from .hub_failure import hub_error, without_tokens
from .hub_messages import Answer, Asked, Failure, Question

__all__ = ["HubError", "HubProcess"]

_START = "import sys; sys.path[:] = sys.argv[4:]; from fi_tunecache.hub_worker import main; main(*sys.argv[1:4])"
_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",  # without it a look into the cache may wait 3 seconds for a request
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_ENABLE_HF_TRANSFER": "0",  # where it is set and that package is missing, nothing can be downloaded
    "HF_HUB_DISABLE_SYMLINKS_WARNING": "1",
}
_MAX_COMPLAINT = 300
_WRONG_ANSWER = Failure("crashed", detail="wrong answer")
_GRACE = 0.2
"""Seconds in which the process may leave by itself."""

_Expected = TypeVar("_Expected", bound=Answer)


class HubError(Exception):
    """The Hub did not give what was asked for. ``error`` is what to raise at whoever does not know better."""

    def __init__(self, name: str, failure: Failure) -> None:
        self.failure = failure
        self.error: FiTuneCacheError = hub_error(name, failure)
        super().__init__(str(self.error))


class HubProcess:
    """The process behind one registry; started at the first question, ended with this object or at exit.

    Parameters
    ----------
    name
        The registry, for messages.
    repository
        ``organisation/name`` of the dataset repository.
    hub_cache
        The folder of huggingface_hub's cache; where it can't be written, downloads are not kept.
    deadline
        When the process is killed, whatever it does.
    offline
        Answer from the hub cache alone.
    """

    def __init__(
        self, name: str, repository: str, hub_cache: Path, deadline: Deadline, *, offline: bool = False
    ) -> None:
        self._name = name
        self._repository = repository
        self._cache = hub_cache
        self._deadline = deadline
        self._offline = offline
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] | None = None

    def ask(self, question: Question, expected: type[_Expected]) -> _Expected:
        """Send a question and wait for its answer. Raises HubError for every failure."""
        asked = Asked(question, self._deadline.remaining())
        answer = self._exchange(msgspec.json.encode(asked) + b"\n")
        if isinstance(answer, expected):
            return answer
        raise HubError(self._name, answer if isinstance(answer, Failure) else _WRONG_ANSWER)

    def _exchange(self, line: bytes) -> Answer:
        try:
            process = self._process or self._start()
        except OSError as error:  # such as no memory
            return Failure("crashed", detail=type(error).__name__)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            self._write(process.stdin, line)
            return msgspec.json.decode(self._read_line(process.stdout), type=Answer)
        except TimeoutError:
            self._stop(process)
            return Failure("deadline", detail=f"{self._deadline.seconds:.3g} s")
        except msgspec.DecodeError:
            self._stop(process)
            return _WRONG_ANSWER
        except OSError:
            self._stop(process)
            return Failure("crashed", detail=self._complaint(process.returncode))

    def _start(self) -> subprocess.Popen[bytes]:
        mode = "offline" if self._offline else "online"
        environ = {**os.environ, **_QUIET, **({"HF_HUB_OFFLINE": "1"} if self._offline else {})}
        with contextlib.ExitStack() as stack:
            self._complaints = stack.enter_context(_open_complaints())
            process = self._process = subprocess.Popen(
                [sys.executable, "-c", _START, self._repository, str(self._cache), mode, *sys.path],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
            )
            assert process.stdin is not None
            os.set_blocking(process.stdin.fileno(), False)
            weakref.finalize(self, _end, process, stack.pop_all())
        return process

    def _write(self, stream: IO[bytes], line: bytes) -> None:
        """Raises as :meth:`_read_line`: a process that reads nothing must not hold up who asks."""
        rest = memoryview(line)
        while rest:
            self._wait(stream, selectors.EVENT_WRITE)
            rest = rest[os.write(stream.fileno(), rest) :]

    def _read_line(self, stream: IO[bytes]) -> bytes:
        """Raises TimeoutError at the deadline, OSError where the process has ended."""
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            self._wait(stream, selectors.EVENT_READ)
            part = os.read(stream.fileno(), 1 << 20)
            if not part:
                raise BrokenPipeError
            parts.append(part)
        return b"".join(parts)

    def _wait(self, stream: IO[bytes], event: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(stream, event)
            if not selector.select(self._deadline.remaining()):
                raise TimeoutError

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        self._process = None

    def _complaint(self, code: int) -> str:
        """The last line that the process printed, without what could be a token."""
        assert self._complaints is not None
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
        return without_tokens(last)[:_MAX_COMPLAINT]


def _open_complaints() -> IO[bytes]:
    """Where the process prints to: memory where that can be, since it may hold a token, and there may be no disk."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("complaints"), "w+b")
    return tempfile.TemporaryFile()


def _end(process: subprocess.Popen[bytes], complaints: contextlib.ExitStack) -> None:
    """It leaves when its standard input ends, taking away what it has in temporary folders."""
    complaints.close()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
