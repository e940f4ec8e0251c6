"""What was asked of the autotuner while somebody watched, and what became of it; in memory and as JSON.

A file of recorded lookups is a list of objects in the form that :mod:`fi_tunecache.publish.recorded_lookups` reads
(``custom_op``, ``runners``, ``profile``, ``winner``), with fields of our own beside. An extra that JSON has no form
for is an object: ``{"list": [...]}`` (a list is a tuple) and ``{"text": "torch.x"}`` (such a text is a dtype).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from .entry import DEFAULT_TACTIC, ProfilingPolicy, Tactic, read_policy, read_tactic, tactic_json
from .errors import FormatError
from .json_document import decode_json, naming
from .key import MAX_NESTING, Dtype, Extra, Key, Profile

__all__ = [
    "MAX_LOOKUPS_BYTES",
    "MAX_LOOKUPS_NESTING",
    "RecordedLookup",
    "Served",
    "lookup_json",
    "lookups_from",
    "read_extra",
    "read_lookups",
    "write_lookups",
]

MAX_LOOKUPS_BYTES = 64 * 1024 * 1024
MAX_LOOKUPS_NESTING = 2 * MAX_NESTING + 5
"""Extras, of which a list takes two levels, lie in a pair in the runners of a lookup in the list of a record."""

_MAX_REASON = 2000
_AGAIN = "record it again"


class Served(Enum):
    """Who answered a lookup.

    ``MEMORY`` are winners that this process has tuned and kept nowhere else; a winner in memory that lies
    in a file or store too counts as coming from there.
    """

    REGISTRY = "registry"
    MEMORY = "memory"
    FILE = "file"
    STORE = "store"
    BUNDLED = "bundled"
    TUNED = "tuned"
    DEFAULT = "default"
    SKIPPED = "skipped"

    @property
    def lasts(self) -> bool:
        """Whether a new process finds the same answer without tuning."""
        return self in (Served.REGISTRY, Served.FILE, Served.STORE, Served.BUNDLED)

    @property
    def answers(self) -> bool:
        """Whether somebody chose a runner and a tactic, rather than leave it to the default."""
        return self not in (Served.DEFAULT, Served.SKIPPED)


class RecordedLookup(Struct, frozen=True, kw_only=True):
    """One question, asked ``count`` times with the same outcome.

    ``keys`` are those that FlashInfer looks for, one a runner, in the caller's order; they share the custom
    op and the profile. ``runner`` and ``tactic`` are the answer, of ``DEFAULT`` and ``SKIPPED`` the first
    runner and -1. ``raced`` tells whether the caller's context would race the default, ``tuning`` whether it
    would tune, ``policy`` how it would time an entry (None: not known).
    ``reason`` says why nobody but the tuning or the default answered; it is empty where somebody did.
    Several outcomes of one question stand in the order in which each was first seen.
    """

    keys: tuple[Key, ...]
    served: Served
    runner: str
    tactic: Tactic
    raced: bool = False
    tuning: bool = False
    policy: ProfilingPolicy | None = None
    reason: str = ""
    count: int = 1

    @property
    def custom_op(self) -> str:
        return self.keys[0].custom_op

    @property
    def profile(self) -> Profile:
        return self.keys[0].profile

    @property
    def is_default(self) -> bool:
        """Whether the answer is what FlashInfer takes without one: the caller's first runner, left to choose."""
        return self.runner == self.keys[0].runner and self.tactic == DEFAULT_TACTIC


class _Stored(Struct, frozen=True):
    custom_op: str
    runners: tuple[tuple[str, list[Any]], ...]
    profile: tuple[tuple[int, ...], ...]
    served: Served
    raced: bool
    tuning: bool
    count: Annotated[int, msgspec.Meta(ge=1)]
    winner: tuple[str, Any] | None = None
    policy: list[Any] | None = None
    reason: Annotated[str, msgspec.Meta(max_length=_MAX_REASON)] = ""


def lookup_json(lookup: RecordedLookup) -> dict[str, Any]:
    """The JSON form of a lookup. ``winner`` is None where the default answered.

    Raises FormatError for a key that FlashInfer could not read back.
    """
    keys = [Key.parse(key.text) for key in lookup.keys]  # by its text FlashInfer compares a key
    return {
        "custom_op": keys[0].custom_op,
        "runners": [[key.runner, [_extra_json(extra) for extra in key.extras]] for key in keys],
        "profile": [list(shape) for shape in keys[0].profile],
        "winner": [lookup.runner, tactic_json(lookup.tactic)] if lookup.served.answers else None,
        "served": lookup.served.value,
        "raced": lookup.raced,
        "tuning": lookup.tuning,
        "policy": None if lookup.policy is None else list(lookup.policy),
        "reason": lookup.reason,
        "count": lookup.count,
    }


def write_lookups(lookups: Iterable[RecordedLookup]) -> bytes:
    """A file of recorded lookups, as ``fi-tunecache publish --lookups`` takes it. See :func:`lookup_json`."""
    lines = [msgspec.json.encode(lookup_json(lookup)) for lookup in lookups]
    return b"[\n" + b",\n".join(lines) + b"\n]\n"


def read_lookups(data: bytes, *, source: str = "") -> tuple[RecordedLookup, ...]:
    """The inverse of :func:`write_lookups`. Raises FormatError for anything else than such a file."""
    document = decode_json(data, max_bytes=MAX_LOOKUPS_BYTES, max_nesting=MAX_LOOKUPS_NESTING, source=source)
    with naming(source):
        return lookups_from(document)


def lookups_from(document: object) -> tuple[RecordedLookup, ...]:
    """Recorded lookups from decoded JSON that is within the limits. Raises FormatError for anything else."""
    try:
        stored = msgspec.convert(document, tuple[_Stored, ...])
    except msgspec.ValidationError as error:
        raise FormatError(f"not recorded lookups ({error})", _AGAIN) from None
    return tuple(map(_lookup, stored))


def _lookup(stored: _Stored) -> RecordedLookup:
    keys = tuple(
        Key.parse(Key(stored.custom_op, runner, stored.profile, tuple(map(read_extra, extras))).text)
        for runner, extras in stored.runners
    )
    op = stored.custom_op[:80]
    if not keys:
        raise FormatError(f"a lookup of {op} names no runners", _AGAIN)
    if (stored.winner is not None) is not stored.served.answers:
        raise FormatError(f"a lookup of {op}, served by {stored.served.value}, must say who won, or must not", _AGAIN)
    runner, tactic = stored.winner or (keys[0].runner, DEFAULT_TACTIC)
    if runner not in {key.runner for key in keys}:
        raise FormatError(f"a lookup of {op} was won by {runner[:80]!r}, which is none of its runners", _AGAIN)
    if not stored.reason.isprintable():
        raise FormatError(f"the reason of a lookup of {op} is no printable line", _AGAIN)
    return RecordedLookup(
        keys=keys,
        served=stored.served,
        runner=runner,
        tactic=read_tactic(tactic),
        raced=stored.raced,
        tuning=stored.tuning,
        policy=None if stored.policy is None else read_policy(stored.policy),
        reason=stored.reason,
        count=stored.count,
    )


def _extra_json(extra: Extra) -> Any:
    if isinstance(extra, Dtype):
        return str(extra)
    if isinstance(extra, tuple):
        return [_extra_json(item) for item in extra]
    if isinstance(extra, list):
        return {"list": [_extra_json(item) for item in extra]}
    if isinstance(extra, str) and extra.startswith("torch."):
        return {"text": extra}
    return extra


def read_extra(value: object) -> Extra:
    """One of a runner's extras from decoded JSON that is within the limits. Raises FormatError for what is none."""
    if isinstance(value, list):
        return tuple(map(read_extra, value))
    if isinstance(value, str) and value.startswith("torch."):
        return Dtype(value.removeprefix("torch."))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    match value:
        case {"list": list(items), **others} if not others:
            return list(map(read_extra, items))
        case {"text": str(text), **others} if not others:
            return text
    raise FormatError(f"a lookup's extras hold a {type(value).__name__}", _AGAIN)
