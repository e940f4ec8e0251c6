"""Entries and lookups: one tuned result, and one question of the autotuner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias, Union

from msgspec import Struct

from .errors import FormatError
from .key import MAX_NESTING, Extra, Key, Profile

__all__ = ["DEFAULT_TACTIC", "Entry", "Lookup", "ProfilingPolicy", "Tactic", "read_tactic", "tactic_json"]

Tactic: TypeAlias = Union[None, bool, int, float, str, tuple["Tactic", ...]]
"""What a runner is told to run. Nested lists of a file are tuples in memory, as in FlashInfer."""

ProfilingPolicy: TypeAlias = tuple[Union[None, bool, int, float, str], ...]
"""How one entry was timed, as FlashInfer 0.7.1 and newer write it beside the tactic."""

DEFAULT_TACTIC = -1
"""The tactic by which a runner is told to choose by itself."""

_INT64 = range(-(2**63), 2**63)


class Entry(Struct, frozen=True):
    """One tuned result.

    ``runner`` is the class that the value names; an entry is served only where it equals
    ``key.runner``. ``selection`` is what FlashInfer 0.7.4 writes about the choice (``time_ms``,
    ``runner_up_ms``, in milliseconds, ``margin``, ``candidates``) together with any mark of ours.
    """

    key: Key
    runner: str
    tactic: Tactic
    policy: ProfilingPolicy | None = None
    selection: Mapping[str, Any] | None = None

    @property
    def time_ms(self) -> float | None:
        """The winner's recorded time in milliseconds, if there is one."""
        time = (self.selection or {}).get("time_ms")
        return float(time) if type(time) in (int, float) and math.isfinite(time) and time > 0 else None


class Lookup(Struct, frozen=True):
    """One question of the autotuner, with its answer.

    ``runners`` are (class, extras) in the caller's order; ``winner`` is an index into them.
    """

    custom_op: str
    profile: Profile
    runners: tuple[tuple[str, tuple[Extra, ...]], ...]
    winner: int

    def __post_init__(self) -> None:
        if not 0 <= self.winner < len(self.runners):
            raise FormatError(f"lookup of {self.custom_op}: winner {self.winner} of {len(self.runners)} runners")

    def keys(self) -> tuple[Key, ...]:
        """The keys that FlashInfer looks for, in the order in which it looks."""
        return tuple(Key(self.custom_op, runner, self.profile, extras) for runner, extras in self.runners)


def read_tactic(value: object, depth: int = 0) -> Tactic:
    """A tactic from decoded JSON. Raises FormatError for dicts, huge integers, NaN and deep nesting."""
    if type(value) is int:
        if value not in _INT64:
            raise FormatError("a tactic holds an integer of more than 64 bits")
        return value
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise FormatError("a tactic holds a float that is not finite")
        return value
    if isinstance(value, (list, tuple)):
        if depth >= MAX_NESTING:
            raise FormatError(f"a tactic is nested deeper than {MAX_NESTING}")
        return tuple(read_tactic(item, depth + 1) for item in value)
    raise FormatError(f"a tactic holds a {type(value).__name__}")


def tactic_json(tactic: Tactic) -> Any:
    """The inverse of :func:`read_tactic`: tuples become lists."""
    return [tactic_json(item) for item in tactic] if isinstance(tactic, tuple) else tactic
