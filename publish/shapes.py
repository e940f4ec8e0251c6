"""Of each shape that several runners have, what can be published: a lookup's runners are taken or left whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from fi_tunecache.entry import Entry, Lookup
from fi_tunecache.verdict import Rule

from .identity import Shape, shape_of
from .left_out import LeftOutEntry
from .recorded_lookups import Question, answer

__all__ = ["Shaped", "shape_entries"]


class Shaped(Struct, frozen=True):
    """The entries and lookups that may be published, and the entries that may not."""

    entries: tuple[Entry, ...]
    lookups: tuple[Lookup, ...]
    left_out: tuple[LeftOutEntry, ...]


def shape_entries(
    tuned: Sequence[Entry], pulled: Iterable[Entry], questions: Sequence[Question], *, trust_winners: bool
) -> Shaped:
    """Answer the recorded lookups, and keep of each shape what can be served without misleading anybody.

    * A shape with a recorded lookup is kept whole, losers included.
    * At a shape without one, where several runner classes have an entry, nobody knows the caller's order: the fastest
      entry by recorded time is kept, and none if a time is missing.
    * What was pulled is not published, but it has raced: where it wins, its rivals are left out too.

    Parameters
    ----------
    tuned
        One entry a key.
    pulled
        Entries that are left out because they came from a registry; of a key that was tuned too they do not count.
    questions, trust_winners
        See :func:`~fi_tunecache.publish.recorded_lookups.answer`.

    Raises
    ------
    FormatError
        Recorded winners are not what the entries give.
    """
    publishable = {entry.key.text: entry for entry in tuned}
    raced = {entry.key.text: entry for entry in sorted(pulled, key=repr)} | publishable
    lookups = answer(questions, raced.values(), trust_winners=trust_winners)
    recorded = {shape_of(lookup) for lookup in lookups}
    lost = {shape_of(lookup) for lookup in lookups if lookup.winning_key.text not in publishable}
    by_shape: dict[Shape, list[Entry]] = {}
    for entry in raced.values():
        by_shape.setdefault(shape_of(entry), []).append(entry)
    kept: list[Entry] = []
    left_out: list[LeftOutEntry] = []
    for shape, rivals in by_shape.items():
        classes = sorted({entry.runner for entry in rivals})
        winner, cause = None, Rule.LEFT_OVER
        if shape not in lost:
            if shape in recorded or len(classes) == 1:
                kept += [entry for entry in rivals if entry.key.text in publishable]
                continue
            winner = _fastest(rivals)
            cause = Rule.NO_TIMES if winner is None else Rule.NOT_FASTEST
        for entry in rivals:
            if entry.key.text not in publishable:
                continue
            if entry is winner:
                kept.append(entry)
            else:
                left_out.append(LeftOutEntry(entry, cause, tuple(name for name in classes if name != entry.runner)))
    return Shaped(tuple(kept), tuple(lookup for lookup in lookups if shape_of(lookup) not in lost), tuple(left_out))


def _fastest(entries: Iterable[Entry]) -> Entry | None:
    """The entry with the least time, of equal ones that whose key sorts first; None if a time is missing."""
    timed = [(entry.time_ms, entry.key.text, entry) for entry in entries]
    if any(time is None for time, _, _ in timed):
        return None
    return min(timed, key=lambda item: (item[0] or 0.0, item[1]))[2]
