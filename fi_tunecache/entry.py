"""Entries and lookups: one tuned result, and one question of the autotuner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias, Union

from msgspec import Struct

from .errors import FormatError
from .json_document import INT64
from .key import MAX_NESTING, Key, Profile

__all__ = [
    "DEFAULT_TACTIC",
    "Entry",
    "LegacyEntry",
    "Lookup",
    "ProfilingPolicy",
    "Tactic",
    "read_policy",
    "read_tactic",
    "tactic_json",
]

Tactic: TypeAlias = Union[bool, int, float, str, tuple["Tactic", ...], None]
"""What a runner is told to run. Nested lists of a file are tuples in memory, as in FlashInfer."""

ProfilingPolicy: TypeAlias = tuple[Union[bool, int, float, str, None], ...]
"""How one entry was timed, as FlashInfer 0.7.1 and newer write it beside the tactic."""

DEFAULT_TACTIC = -1
"""The tactic by which a runner is told to choose by itself."""


class Entry(Struct, frozen=True, gc=False):
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
        if isinstance(time, bool) or not isinstance(time, (int, float)):
            return None
        return float(time) if math.isfinite(time) and time > 0 else None

    @property
    def is_cudnn_ordinal(self) -> bool:
        """Whether the tactic is a position in cuDNN's plan list, which FlashInfer drops (``load_configs``, 0.6.16+)."""
        return self.runner.startswith("Cudnn") and isinstance(self.tactic, int) and self.tactic >= 0


class LegacyEntry(Struct, frozen=True):
    """One result under a key without extras, as FlashInfer before 0.6.13 wrote it; to look at, never to serve.

    ``runner`` is the class that the value names; in a bundled module it is a position, which
    FlashInfer ignores (``load_from_file`` of ``flashinfer/autotuner/autotuner.py``).
    """

    STATEMENT: ClassVar[str] = "no lookup of FlashInfer 0.6.13 or newer can hit a key without extras"

    text: str
    runner: str | int
    tactic: Tactic


class Lookup(Struct, frozen=True, gc=False):
    """One question of the autotuner, with its answer.

    ``keys`` are those that FlashInfer looks for, one a runner, in the caller's order; they share
    the custom op and the profile. ``winner`` is an index into them.
    """

    keys: tuple[Key, ...]
    winner: int

    def __post_init__(self) -> None:
        if not 0 <= self.winner < len(self.keys):
            raise FormatError(f"a lookup names runner {self.winner} of {len(self.keys)} as its winner")

    @property
    def custom_op(self) -> str:
        return self.keys[0].custom_op

    @property
    def profile(self) -> Profile:
        return self.keys[0].profile

    @property
    def winning_key(self) -> Key:
        return self.keys[self.winner]

    @property
    def runners(self) -> tuple[str, ...]:
        """The runner classes that raced, in the caller's order."""
        return tuple(key.runner for key in self.keys)


def read_tactic(value: object, depth: int = 0) -> Tactic:
    """A tactic from decoded JSON. Raises FormatError for dicts, huge integers, NaN and deep nesting."""
    if type(value) is int:
        if value not in INT64:
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


def read_policy(value: object) -> ProfilingPolicy:
    """A profiling policy from decoded JSON. Raises FormatError for anything but a list of scalars."""
    if not isinstance(value, list):
        raise FormatError(f"a policy is a {type(value).__name__}, not a list")
    for item in value:
        if not isinstance(item, (type(None), bool, int, float, str)):
            raise FormatError(f"a policy holds a {type(item).__name__}")
    return tuple(value)


def tactic_json(tactic: Tactic) -> Any:
    """The inverse of :func:`read_tactic`: tuples become lists."""
    return [tactic_json(item) for item in tactic] if isinstance(tactic, tuple) else tactic
