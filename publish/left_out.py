"""What is read from a source and not published, with the reason, one line for all that shares it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, TypeAlias, Union

from msgspec import Struct

from fi_tunecache.entry import Entry
from fi_tunecache.verdict import Rule
from fi_tunecache.wording import count_entries, plural

__all__ = ["NEAR_TIE", "Cause", "LeftOut", "LeftOutEntry", "Reason", "summarise"]

NEAR_TIE = 0.02
"""How much less time than what is published a new entry must need to replace it, as a share.

One tactic timed twice in one process differs by up to 2 % in nine of ten cases (H200, 54 cases:
``freshly_tuned_us`` and its repetition in ``drift-timings.tsv``), so less than that is no difference. It
matters: of two tunes of the same 90 keys 13 winners differ, and most winners (115 of 156 that had a rival)
beat the second best by less than that.
"""


class Reason(enum.Enum):
    """Why a publisher leaves an entry out, beside the rules that a resolution has too (:class:`Rule`)."""

    PULLED = "it was pulled from a registry, not tuned"
    RECORD = "it is the result of an operation that tunes itself, for which a bundle has no place"
    SLOWER = "another source has a faster answer to the same key"
    OLDER = "another source has a newer answer to the same key"
    NEAR_TIE = f"what is published is as fast, within {NEAR_TIE:.0%}, or faster"

    def __str__(self) -> str:
        return self.value


Cause: TypeAlias = Union[Rule, Reason]


class LeftOutEntry(Struct, frozen=True, gc=False):
    """One entry that is left out. ``rivals`` and ``bundles`` made the cause apply."""

    entry: Entry
    cause: Cause
    rivals: tuple[str, ...] = ()
    bundles: tuple[str, ...] = ()


class LeftOut(Struct, frozen=True):
    """Entries that are left out for one cause; its ``str()`` is a line.

    ``rivals`` are the other runners of the shape, ``bundles`` those of a registry that made the cause apply.
    ``custom_op`` and ``runner`` are empty for records, which have none.
    """

    cause: Cause
    custom_op: str
    runner: str
    entries: int
    rivals: tuple[str, ...] = ()
    bundles: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f"{count_entries(self.entries)} of {self.runner}" if self.runner else plural(self.entries, "record")
        rivals = f" (rivals: {', '.join(self.rivals)})" if self.rivals else ""
        bundles = f" ({'bundle' if len(self.bundles) == 1 else 'bundles'} {', '.join(self.bundles)})"
        return f"{self.cause}: {what} left out{rivals}{bundles if self.bundles else ''}"

    def builtins(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "cause": str(self.cause),
            "custom_op": self.custom_op,
            "runner": self.runner,
            "entries": self.entries,
            "rivals": list(self.rivals),
            "bundles": list(self.bundles),
            "line": str(self),
        }


def summarise(items: Iterable[LeftOutEntry], records: int = 0) -> tuple[LeftOut, ...]:
    """Entries with one cause become one line; so do records."""
    counts: dict[tuple[Cause, str, str, tuple[str, ...], tuple[str, ...]], int] = {}
    for item in items:
        line = (item.cause, item.entry.key.custom_op, item.entry.key.runner, item.rivals, item.bundles)
        counts[line] = counts.get(line, 0) + 1
    if records:
        counts[Reason.RECORD, "", "", (), ()] = records
    lines = (
        LeftOut(cause, op, runner, count, rivals, bundles)
        for (cause, op, runner, rivals, bundles), count in counts.items()
    )
    return tuple(sorted(lines, key=lambda line: (line.custom_op, line.runner, str(line))))
