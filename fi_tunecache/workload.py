"""The workload: what is served, in the words of whoever serves it. Its lookups are kept under its id."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from .errors import UsageError

__all__ = ["Workload"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_MAX_VALUE = 500
_MAX_PARTS = 32
_EXAMPLE = "write it like model=llama,tp=2"
_ALONE = "name"


class Workload(Struct, frozen=True):
    """Everything that decides what a program asks of the autotuner and that FlashInfer does not record.

    ``parts`` are (name, value) in sorted order, such as model, parallel sizes and maximal batch. ``str()`` and
    :meth:`parse` are inverse.

    Raises UsageError for more than 32 parts or none, for a name that is no word of letters, digits, ``_``, ``.``
    and ``-``, and for a value that is not printable, is longer than 500 characters, begins or ends with a space, or
    holds a comma.
    """

    parts: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.parts) <= _MAX_PARTS:
            raise UsageError(f"a workload of {len(self.parts)} parts", f"name 1 to {_MAX_PARTS} of them")
        for name, value in self.parts:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise UsageError(f"{str(name)[:80]!r} can't name a part of a workload", _EXAMPLE)
            if not isinstance(value, str) or not _is_value(value):
                raise UsageError(
                    f"workload: {name} can't be {str(value)[:80]!r}",
                    f"give one printable line of at most {_MAX_VALUE} characters without commas",
                )
        names = [name for name, _ in self.parts]
        if names != sorted(set(names)):
            raise UsageError(f"the parts of a workload are not in order, or one is named twice: {', '.join(names)}")

    @classmethod
    def of(cls, given: Workload | Mapping[str, str | int] | str) -> Workload:
        """The workload of these parts, or of a text as :meth:`parse` reads it; a number is its text."""
        if isinstance(given, Workload):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        if not isinstance(given, Mapping):
            raise UsageError(f"workload: a {type(given).__name__} names none", _EXAMPLE)
        parts = {name: str(value) if type(value) is int else value for name, value in given.items()}
        return cls(tuple(sorted(parts.items(), key=lambda part: str(part[0]))))  # type: ignore[arg-type]

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read ``model=llama,tp=2``, in any order; one word without ``=`` is the part ``name``."""
        if "=" not in text:
            return cls(((_ALONE, text),))
        parts: dict[str, str] = {}
        for part in text.split(","):
            name, separator, value = part.partition("=")
            if not separator:
                raise UsageError(f"workload: {part[:80]!r} has no value", _EXAMPLE)
            if name in parts:
                raise UsageError(f"workload: {name[:80]!r} is named twice", "name it once")
            parts[name] = value
        return cls.of(parts)

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.parts)

    @property
    def id(self) -> str:
        """32 hex digits; equal for equal parts, and for nothing else."""
        return hashlib.sha256(msgspec.json.encode(self.parts)).hexdigest()[:32]


def _is_value(text: str) -> bool:
    return 0 < len(text) <= _MAX_VALUE and text.isprintable() and text == text.strip() and "," not in text
