"""Every error that fi-tunecache raises on purpose, as one tree.

::

    FiTuneCacheError
    ├── UsageError (ValueError)             what was asked for makes no sense       exit 2
    ├── HardwareError (LookupError)         no GPU, several GPUs, unknown facts     exit 2
    ├── CacheError (OSError)                the user cache or an output is unusable exit 2
    ├── NoMatchError (LookupError)          nothing in the registry fits            exit 3
    ├── RegistryError (OSError)             a registry can't be reached or refuses  exit 4
    └── FormatError (ValueError)            bytes are not what they claim to be     exit 5
        └── IntegrityError                  bytes are not the ones the manifest names

Each error says in one line what is wrong (``problem``) and what to do about it
(``next_step``), is also the fitting builtin, and survives pickling with its attributes.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "CacheError",
    "FiTuneCacheError",
    "FormatError",
    "HardwareError",
    "IntegrityError",
    "NoMatchError",
    "RegistryError",
    "UsageError",
]

_MAX_LINE = 2000


class FiTuneCacheError(Exception):
    """Base of all errors of this package.

    Parameters
    ----------
    problem
        What is wrong, one line, no trailing full stop.
    next_step
        What the reader can do about it; may be empty.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, problem: str, next_step: str = "") -> None:
        self.problem = _one_line(problem)
        self.next_step = _one_line(next_step)
        super().__init__(self.problem)

    def __str__(self) -> str:
        return f"{self.problem}; {self.next_step}" if self.next_step else self.problem

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError's own __reduce__ would call the class with errno and strerror.
        return _restore, (type(self), dict(self.__dict__))


def _restore(cls: type[FiTuneCacheError], attributes: dict[str, Any]) -> FiTuneCacheError:
    error = cls.__new__(cls)
    FiTuneCacheError.__init__(error, attributes["problem"], attributes["next_step"])
    error.__dict__.update(attributes)
    return error


def _one_line(text: str) -> str:
    """Names of files and facts come from outside: keep them from breaking the line, the terminal or the log."""
    line = " ".join(text[: 2 * _MAX_LINE].split())
    line = line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE - 1]}\N{HORIZONTAL ELLIPSIS}"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


class UsageError(FiTuneCacheError, ValueError):
    """What was asked for makes no sense, or contradicts itself."""


class HardwareError(FiTuneCacheError, LookupError):
    """The machine lacks what is needed, or what it is could not be determined."""


class CacheError(FiTuneCacheError, OSError):
    """The user cache, or a file that was to be written, can't be used."""


class NoMatchError(FiTuneCacheError, LookupError):
    """The registry holds nothing that fits this environment."""

    exit_code = 3


class RegistryError(FiTuneCacheError, OSError):
    """A registry can't be reached, does not exist, or refuses."""

    exit_code = 4


class FormatError(FiTuneCacheError, ValueError):
    """Bytes are not what they claim to be.

    ``source`` names the file or object; it may be empty.
    """

    exit_code = 5

    def __init__(self, problem: str, next_step: str = "", *, source: str = "") -> None:
        super().__init__(f"{source}: {problem}" if source else problem, next_step)
        self.source = source


class IntegrityError(FormatError):
    """Bytes are intact but not the ones that the manifest names.

    ``expected`` and ``actual`` are what was compared (a sha256 or a size in bytes, as text).
    """

    def __init__(
        self, problem: str, next_step: str = "", *, source: str = "", expected: str = "", actual: str = ""
    ) -> None:
        super().__init__(problem, next_step, source=source)
        self.expected = expected
        self.actual = actual
