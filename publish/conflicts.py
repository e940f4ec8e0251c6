"""One answer to each key: what several sources say of it, and which of them counts where they disagree."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from fi_tunecache.entry import Entry, tactic_json
from fi_tunecache.key import Key

from .identity import entry_identity
from .left_out import LeftOutEntry, Reason

__all__ = ["Conflict", "Found", "OnConflict", "Settled", "Variant", "settle"]

_MAX_SHOWN = 4


class OnConflict(str, enum.Enum):
    """What to do where sources disagree about a key."""

    ERROR = "error"
    FASTEST = "fastest"
    NEWEST = "newest"


class Found(Struct, frozen=True, gc=False):
    """An entry, the source that has it, and when that was last changed (Unix seconds)."""

    entry: Entry
    source: str
    modified: float


class Variant(Struct, frozen=True):
    """One of the answers to a key: the sources that have it, and the time of the newest one (Unix seconds)."""

    entry: Entry
    sources: tuple[str, ...]
    modified: float

    def __str__(self) -> str:
        time = "no time" if self.entry.time_ms is None else f"{self.entry.time_ms:g} ms"
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return f"tactic {_json(tactic_json(self.entry.tactic))}, {time} in {self.sources[0]}{more}"


class Conflict(Struct, frozen=True):
    """Different answers to one key. ``chosen`` is an index into them, None where the rule leaves it open.

    ``problem`` then says why; its ``str()`` is a line.
    """

    key: Key
    variants: tuple[Variant, ...]
    chosen: int | None = None
    problem: str = ""

    def __str__(self) -> str:
        shown = "; ".join(map(str, self.variants[:_MAX_SHOWN]))
        more = f"; {len(self.variants) - _MAX_SHOWN} more" if len(self.variants) > _MAX_SHOWN else ""
        if self.chosen is None:
            return f"{self.key.text[:200]}: {shown}{more}{f' ({self.problem})' if self.problem else ''}"
        return f"{self.key.text[:200]}: {self.variants[self.chosen]} is taken, of {shown}{more}"

    def builtins(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "key": self.key.text,
            "chosen": self.chosen,
            "problem": self.problem,
            "variants": [
                {
                    "tactic": tactic_json(variant.entry.tactic),
                    "policy": None if variant.entry.policy is None else list(variant.entry.policy),
                    "time_ms": variant.entry.time_ms,
                    "sources": list(variant.sources),
                }
                for variant in self.variants
            ],
            "line": str(self),
        }


class Settled(Struct, frozen=True):
    """One entry a key, sorted by key; keys of open conflicts are missing.

    ``same`` counts the entries that another source has just so.
    """

    entries: tuple[Entry, ...]
    conflicts: tuple[Conflict, ...]
    left_out: tuple[LeftOutEntry, ...]
    same: int


def settle(found: Iterable[Found], rule: OnConflict) -> Settled:
    """Make one entry of each key, whatever the order of the sources.

    Equal entries (key, runner, tactic, policy) are one: that with the shortest recorded time, if any has one.
    Different ones are a conflict:

    * ``error``: it stays open;
    * ``fastest``: the least recorded time counts, of equal times the tactic that sorts first. It stays open where a
      time is missing or where they were timed under different policies;
    * ``newest``: the source that was changed last counts. It stays open where two are equally new.
    """
    by_key: dict[Key, dict[bytes, list[Found]]] = {}
    for item in found:
        by_key.setdefault(item.entry.key, {}).setdefault(entry_identity(item.entry)[1], []).append(item)
    same = 0
    entries: list[Entry] = []
    conflicts: list[Conflict] = []
    left_out: list[LeftOutEntry] = []
    for key in sorted(by_key, key=str):
        variants = tuple(_variant(items) for _, items in sorted(by_key[key].items()))
        same += sum(map(len, by_key[key].values())) - len(variants)
        if len(variants) == 1:
            entries.append(variants[0].entry)
            continue
        conflict = _decide(key, variants, rule)
        conflicts.append(conflict)
        if conflict.chosen is not None:
            entries.append(variants[conflict.chosen].entry)
            cause = Reason.SLOWER if rule is OnConflict.FASTEST else Reason.OLDER
            others = variants[: conflict.chosen] + variants[conflict.chosen + 1 :]
            left_out += [LeftOutEntry(variant.entry, cause) for variant in others]
    return Settled(tuple(entries), tuple(conflicts), tuple(left_out), same)


def _variant(items: list[Found]) -> Variant:
    best = min((item.entry for item in items), key=lambda entry: (*_time(entry), _json(entry.selection)))
    return Variant(best, tuple(sorted({item.source for item in items})), max(item.modified for item in items))


def _decide(key: Key, variants: tuple[Variant, ...], rule: OnConflict) -> Conflict:
    places = range(len(variants))
    if rule is OnConflict.FASTEST:
        if untimed := [variant for variant in variants if variant.entry.time_ms is None]:
            return Conflict(key, variants, problem=f"{untimed[0].sources[0]} records no time")
        if len({_json(variant.entry.policy) for variant in variants}) > 1:
            return Conflict(key, variants, problem="timed under different policies")
        return Conflict(key, variants, min(places, key=lambda place: _time(variants[place].entry)))
    if rule is OnConflict.NEWEST:
        newest = max(places, key=lambda place: variants[place].modified)
        if sum(variant.modified == variants[newest].modified for variant in variants) > 1:
            return Conflict(key, variants, problem="two sources are equally new")
        return Conflict(key, variants, newest)
    return Conflict(key, variants)


def _time(entry: Entry) -> tuple[bool, float]:
    time = entry.time_ms
    return time is None, time or 0.0


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True)
