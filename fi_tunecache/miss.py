"""Why a lookup was not answered: a small set of reasons, and which of them holds. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from msgspec import Struct

__all__ = ["KnownKeys", "Miss", "nearest_miss"]


class Miss(Enum):
    """The reasons but one: what was dropped at resolution is told with its cause."""

    SKIPPED = "the op is in skip_ops"
    RANKED = "op tunes by rank_tactics, which ignores saved entries"
    OTHER_TABLES = "a managed store or a measurement policy is in use, which has its own entries"
    NOT_RACED = "the default did not race for the entry, and this context would race it"
    LEFT_OUT = "the default did not race for the entry, so it was not put into the managed store"
    POLICY = "the policy differs"
    RUNNER = "the runner differs"
    EXTRAS = "the extras differ"
    SHAPE = "the op is known, the shape is not"
    OP = "no entry for the op"
    REFUSED = "the runner's own check refuses the tactic"
    DISCARDED = "FlashInfer has discarded the entry"
    OWN_COMES_FIRST = "the program has an entry of its own for the shape, under another runner"
    BLOCKED = "FlashInfer's blocklist forbids the tactic"
    LATE = "the entry came after FlashInfer had looked for it"
    NOTHING = "no entries are loaded: nothing is enabled, or there is no selection"
    OBSERVED = "an entry would be served: FI_TUNECACHE=observe serves none"

    def __str__(self) -> str:
        return self.value


_BEGINNING = re.compile(r"\('([^']+)', '[^']+', (\((?:\([-\d, ]*\)(?:, )?)*,?\)), ")
"""The op, the runner and the profile of a key's text; the extras follow."""


class KnownKeys(Struct, frozen=True):
    """What there are entries for: ops, (op, profile), and keys without their extras, as text."""

    ops: frozenset[str]
    shapes: frozenset[tuple[str, str]]
    beginnings: frozenset[str]

    @classmethod
    def of(cls, texts: Iterable[str]) -> KnownKeys:
        """``texts`` are keys; one that is none (FlashInfer loads what a file holds) is passed over."""
        matches = [match for match in map(_BEGINNING.match, texts) if match is not None]
        return cls(
            ops=frozenset(match[1] for match in matches),
            shapes=frozenset((match[1], match[2]) for match in matches),
            beginnings=frozenset(match[0] for match in matches),
        )

    def has_shape(self, key: str) -> bool:
        """Whether there is an entry for a key's op and profile."""
        match = _BEGINNING.match(key)
        return match is not None and (match[1], match[2]) in self.shapes


def nearest_miss(
    custom_op: str,
    runners: Sequence[str],
    keys: Sequence[str],
    known: Sequence[KnownKeys],
    dropped: Mapping[tuple[str, str], str],
) -> str:
    """The reason for a lookup none of whose keys had an entry: what comes nearest to it.

    Parameters
    ----------
    runners, keys
        Their classes and the texts of their keys, in the caller's order.
    known
        What there were entries for.
    dropped
        Why entries of an op and a runner were dropped at resolution.
    """
    matches = [match for match in map(_BEGINNING.match, keys) if match is not None]
    if any(match[0] in each.beginnings for match in matches for each in known):
        return str(Miss.EXTRAS)
    cause = next((dropped[custom_op, runner] for runner in runners if (custom_op, runner) in dropped), None)
    if cause is not None:
        return f"dropped at resolution: {cause}"
    if any((match[1], match[2]) in each.shapes for match in matches for each in known):
        return str(Miss.RUNNER)
    if any(custom_op in each.ops for each in known):
        return str(Miss.SHAPE)
    return str(Miss.OP if any(each.ops for each in known) else Miss.NOTHING)
