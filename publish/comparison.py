"""Compare a gathered bundle with what is published: what is new, what changes, and what had better stay. Pure.

Where what is published is as fast (:data:`~.left_out.NEAR_TIE`), it stays: ours is left out, and machines go on with
what they have. So what is published has to answer in its place:

* At a shape with recorded lookups an entry is left out only if every lookup that it wins is published. Those lookups
  go with it, and where none remains at the shape, so does the rest of it, or a loser would be served alone.
* At a shape without any, here and there, published entries of other runner classes are rivals: a client keeps only
  the fastest of all, and none if it can't tell, so ours must be faster beyond doubt.

And nothing is taken away: where a client would have no entry for a shape any more, since lookups of ours and of what
is published can't be served together, ours is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from fi_tunecache.bundle import Bundle, write_bundle
from fi_tunecache.entry import Entry
from fi_tunecache.manifest import describe_bundle
from fi_tunecache.resolution import choose
from fi_tunecache.verdict import Candidate, Resolution, Rule, Verdict

from .identity import Shape, entry_identity, lookup_texts, shape_of
from .left_out import NEAR_TIE, Cause, LeftOutEntry, Reason
from .published import PublishedBundle

__all__ = ["Comparison", "compare"]

_NEW = "new"


class Comparison(Struct, frozen=True):
    """What of a bundle remains to be published, by how it differs from what is published.

    ``bundle`` has the ``new``, ``changed`` and ``unchanged`` entries; it is empty where nothing remains.
    ``new_lookups`` counts lookups that are not published; ``held_by`` are the ids of the bundles that have the
    unchanged entries. ``adds`` tells whether there is any use in publishing it; ``verdict`` is then what a client in
    the same environment makes of it, beside what is published.
    """

    bundle: Bundle
    new: tuple[Entry, ...] = ()
    changed: tuple[Entry, ...] = ()
    unchanged: tuple[Entry, ...] = ()
    left_out: tuple[LeftOutEntry, ...] = ()
    new_lookups: int = 0
    held_by: tuple[str, ...] = ()
    adds: bool = False
    verdict: Verdict | None = None


class _Answer(Struct, frozen=True):
    entry: Entry
    bundle_id: str


class _Standing(Struct, frozen=True):
    """What a client with all published bundles would have: of each key and lookup the first bundle's answer."""

    entries: Mapping[str, _Answer]
    lookups: Mapping[tuple[str, ...], _Answer]
    recorded: frozenset[Shape]
    by_shape: Mapping[Shape, Sequence[Entry]]

    @classmethod
    def of(cls, published: Sequence[PublishedBundle]) -> _Standing:
        entries: dict[str, _Answer] = {}
        lookups: dict[tuple[str, ...], _Answer] = {}
        for item in published:
            for text, entry in item.bundle.entries.items():
                entries.setdefault(text, _Answer(entry, item.bundle_id))
            for lookup in item.bundle.lookups:
                winner = item.bundle.entries[lookup.winning_key.text]
                lookups.setdefault(lookup_texts(lookup), _Answer(winner, item.bundle_id))
        recorded = frozenset(shape_of(lookup) for item in published for lookup in item.bundle.lookups)
        by_shape: dict[Shape, list[Entry]] = {}
        for answer in entries.values():
            by_shape.setdefault(shape_of(answer.entry), []).append(answer.entry)
        return cls(entries, lookups, recorded, by_shape)


def compare(ours: Bundle, published: Sequence[PublishedBundle], *, as_it_is: bool = False) -> Comparison:
    """Compare a bundle with the published ones of its environment and policy, best first, none of them yanked.

    A bundle all of which is in a published one adds nothing, whichever of the published ones a client prefers.

    Parameters
    ----------
    as_it_is
        The bundle is published unchanged or not at all: nothing of it is left out, and it adds something unless
        itself is published.
    """
    if (holder := _holder(ours, published, whole=as_it_is)) is not None:
        return Comparison(ours, unchanged=tuple(ours.entries.values()), held_by=(holder.bundle_id,))
    standing = _Standing.of(published)
    left_out = {} if as_it_is else _left_out(ours, standing)
    remaining = _without(ours, left_out)
    before = _served(_resolve(ours, published, None))
    while lost := before - _served(resolution := _resolve(ours, published, remaining)):
        if as_it_is:
            break
        taking = [entry for entry in remaining.entries.values() if shape_of(entry) in lost]
        left_out.update((entry.key.text, LeftOutEntry(entry, Rule.CONTRADICTED)) for entry in taking)
        remaining = _without(ours, left_out)
    entries, lookups = remaining.entries, remaining.lookups
    if left_out and entries and (holder := _holder(remaining, published, whole=as_it_is)) is not None:
        return Comparison(
            remaining, unchanged=tuple(entries.values()), left_out=tuple(left_out.values()), held_by=(holder.bundle_id,)
        )
    new_lookups = sum(lookup_texts(lookup) not in standing.lookups for lookup in lookups)
    new: list[Entry] = []
    changed: list[Entry] = []
    unchanged: list[Entry] = []
    held_by: dict[str, None] = {}
    for text, entry in entries.items():
        theirs = standing.entries.get(text)
        if theirs is None:
            new.append(entry)
        elif entry_identity(theirs.entry) != entry_identity(entry):
            changed.append(entry)
        else:
            unchanged.append(entry)
            held_by[theirs.bundle_id] = None
    return Comparison(
        bundle=remaining,
        new=tuple(new),
        changed=tuple(changed),
        unchanged=tuple(unchanged),
        left_out=tuple(left_out.values()),
        new_lookups=new_lookups,
        held_by=tuple(sorted(held_by)),
        adds=as_it_is or bool(new or changed or new_lookups),
        verdict=next((verdict for verdict in resolution.verdicts if verdict.registry == _NEW), None),
    )


def _without(bundle: Bundle, left_out: Collection[str]) -> Bundle:
    entries = {text: entry for text, entry in bundle.entries.items() if text not in left_out}
    lookups = tuple(lookup for lookup in bundle.lookups if lookup.winning_key.text in entries)
    return msgspec.structs.replace(bundle, entries=entries, lookups=lookups)


def _resolve(ours: Bundle, published: Iterable[PublishedBundle], more: Bundle | None) -> Resolution:
    """What a client in the environment of ``ours`` chooses, if one more bundle is published."""
    candidates = [Candidate("", item.row, item.bundle) for item in published if item.row is not None]
    if more is not None and more.entries:
        candidates.append(Candidate(_NEW, describe_bundle(more, *write_bundle(more)), more))
    return choose(candidates, ours.environment, policy=ours.policy)


def _served(resolution: Resolution) -> set[Shape]:
    return {shape_of(item.entry) for item in resolution.chosen.values()}


def _holder(ours: Bundle, published: Iterable[PublishedBundle], *, whole: bool) -> PublishedBundle | None:
    """A published bundle that has all entries and lookups, or is the same as a whole."""
    if whole:
        return next((item for item in published if item.bundle == ours), None)
    entries = {*map(entry_identity, ours.entries.values())}
    lookups = {*map(lookup_texts, ours.lookups)}
    for item in published:
        theirs = item.bundle
        if entries <= {*map(entry_identity, theirs.entries.values())} and lookups <= {
            *map(lookup_texts, theirs.lookups)
        }:
            return item
    return None


def _left_out(ours: Bundle, standing: _Standing) -> dict[str, LeftOutEntry]:
    won: dict[str, list[tuple[str, ...]]] = {}
    for lookup in ours.lookups:
        won.setdefault(lookup.winning_key.text, []).append(lookup_texts(lookup))
    shapes: dict[Shape, list[Entry]] = {}
    for entry in ours.entries.values():
        shapes.setdefault(shape_of(entry), []).append(entry)
    recorded = {shape_of(lookup) for lookup in ours.lookups}
    left_out: dict[str, LeftOutEntry] = {}
    for shape, entries in shapes.items():
        if shape in recorded:
            winners = [entry for entry in entries if entry.key.text in won]
            answers = [[standing.lookups.get(texts) for texts in won[entry.key.text]] for entry in winners]
            found = _near_ties(winners, answers)
            if len(found) == len(winners):
                found += [LeftOutEntry(entry, Reason.NEAR_TIE) for entry in entries if entry.key.text not in won]
        else:
            found = [] if shape in standing.recorded else _outdone(entries, standing.by_shape.get(shape, ()))
            found = found or _near_ties(entries, [[standing.entries.get(entry.key.text)] for entry in entries])
        left_out.update((item.entry.key.text, item) for item in found)
    return left_out


def _near_ties(entries: Iterable[Entry], answers: Iterable[Sequence[_Answer | None]]) -> list[LeftOutEntry]:
    """The entries for which what is published is another answer, and as good, to everything that they answer."""
    found = []
    for entry, theirs in zip(entries, answers, strict=True):
        others = [item for item in theirs if item is None or entry_identity(item.entry) != entry_identity(entry)]
        if others and all(item is not None and _is_as_fast(item.entry, entry) for item in others):
            ids = {item.bundle_id for item in others if item is not None}
            found.append(LeftOutEntry(entry, Reason.NEAR_TIE, bundles=tuple(sorted(ids))))
    return found


def _is_as_fast(theirs: Entry, ours: Entry) -> bool:
    """Without both times, under one policy, nobody knows."""
    if theirs.time_ms is None or ours.time_ms is None or theirs.policy != ours.policy:
        return False
    return theirs.time_ms < ours.time_ms * (1 + NEAR_TIE)


def _outdone(entries: Sequence[Entry], theirs: Sequence[Entry]) -> list[LeftOutEntry]:
    """All entries of a shape, or none: those that a client could not prefer to published ones of other classes."""
    classes = sorted({entry.runner for entry in (*entries, *theirs)})
    if not theirs or len(classes) == 1 or {*map(entry_identity, entries)} <= {*map(entry_identity, theirs)}:
        return []
    ours_ms, theirs_ms = ([entry.time_ms for entry in side if entry.time_ms is not None] for side in (entries, theirs))
    if len(ours_ms) + len(theirs_ms) < len(entries) + len(theirs):
        cause: Cause = Rule.NO_TIMES
    elif min(theirs_ms) < min(ours_ms) * (1 + NEAR_TIE):
        cause = Reason.NEAR_TIE
    else:
        return []
    return [LeftOutEntry(entry, cause, tuple(name for name in classes if name != entry.runner)) for entry in entries]
