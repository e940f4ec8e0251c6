"""From what was seen of lookups to recorded lookups: where an answer came from, and the reason where there was none.

It reads what the recorder could not read under the autotuner's lock: entries' files of a managed store, the selections
that are in use, and what was dropped when they were made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from .entry import Tactic, read_tactic
from .errors import FiTuneCacheError, FormatError
from .json_document import decode_json
from .key import Key
from .managed_entry import MAX_ENTRY_BYTES
from .miss import KnownKeys, Miss, nearest_miss
from .recorded_lookup import RecordedLookup, Served
from .selection import Selection
from .user_cache import UserCache

if TYPE_CHECKING:
    from .autotuner.outcome import Known, Outcome, Place, Question
    from .autotuner.recording import Recorder
    from .autotuner.served_entry import ServedEntry
    from .hook import InUse

__all__ = ["explain"]

_MAX_RESOLUTION_BYTES = 64 * 1024 * 1024
_MAX_RESOLUTION_NESTING = 32
_MAX_CAUSE = 500


def explain(recorder: Recorder, in_use: Iterable[InUse], *, observe: bool) -> tuple[RecordedLookup, ...]:
    """The recorded lookups, in the order in which each was first seen.

    Parameters
    ----------
    in_use
        The selections that the program reads, or, in ``observe``, would read.
    """
    explainer = _Explainer(recorder, tuple(in_use), observe)
    counts: dict[tuple[Any, ...], RecordedLookup] = {}
    for outcome in recorder.outcomes():
        lookup = explainer.lookup(outcome)
        name = (lookup.keys, *(getattr(lookup, field) for field in _SAME))
        before = counts.get(name)
        counts[name] = lookup if before is None else msgspec.structs.replace(before, count=before.count + lookup.count)
    return tuple(counts.values())


_SAME = ("served", "runner", "tactic", "raced", "tuning", "policy", "reason")


class _Explainer:
    def __init__(self, recorder: Recorder, in_use: tuple[InUse, ...], observe: bool) -> None:
        self._recorder = recorder
        self._in_use = in_use
        self._observe = observe
        self._keys: dict[Question, tuple[Key, ...]] = {}
        self._indexes: dict[int, KnownKeys] = {}
        self._entries: dict[str, Mapping[str, ServedEntry]] = {}
        self._dropped: dict[str, Mapping[tuple[str, str], str]] = {}

    def lookup(self, outcome: Outcome) -> RecordedLookup:
        question = outcome.question
        if question not in self._keys:
            self._keys[question] = tuple(
                _key(question.custom_op, runner, text)
                for runner, text in zip(question.runners, question.keys, strict=True)
            )
        answered = outcome.served in (Served.TUNED, Served.DEFAULT, Served.SKIPPED)
        return RecordedLookup(
            keys=self._keys[question],
            served=self._served(outcome),
            runner=outcome.runner,
            tactic=outcome.tactic,
            raced=outcome.raced,
            tuning=outcome.tuning,
            policy=outcome.policy,
            reason=self._reason(outcome) if answered else "",
            count=outcome.count,
        )

    def _served(self, outcome: Outcome) -> Served:
        if outcome.served is Served.MEMORY and self._recorder.is_saved(outcome):
            return Served.FILE
        if outcome.entry is None:
            return outcome.served
        there = _stored(outcome.entry)
        if there is not None and there.answer == (outcome.runner, outcome.tactic):
            return Served.REGISTRY if there.is_marked else Served.STORE
        # It has been replaced since, or it never could be written.
        if self._was_seeded(outcome, outcome.entry):
            return Served.REGISTRY
        return Served.MEMORY if there is None else Served.STORE

    def _was_seeded(self, outcome: Outcome, file: Path) -> bool:
        """Whether it was an entry of ours that answered from the store."""
        question = outcome.question
        keys = [key for key, runner in zip(question.keys, question.runners, strict=True) if runner == outcome.runner]
        for entries in (self._entries_of(each) for each in self._in_use if each.store == file.parent.parent):
            for entry in (entries[key] for key in keys if key in entries):
                if (entry.runner, entry.tactic) == (outcome.runner, outcome.tactic):
                    return True
        return False

    def _reason(self, outcome: Outcome) -> str:
        known = outcome.known
        if known is None:
            return str(self._refined(outcome))
        in_use = self._at(known.place)
        if known.place is not None and not in_use and self._in_use:
            return str(Miss.OTHER_TABLES)
        miss = self._missed_although_there(outcome, known, in_use)
        if miss is not None:
            return str(miss)
        texts: list[Iterable[object]] = [known.own, known.kept, known.ours if known.place is None else ()]
        if known.place is not None or self._observe:
            texts += [self._entries_of(each) for each in in_use]
        dropped = {name: cause for each in in_use for name, cause in self._dropped_from(each.selection).items()}
        question = outcome.question
        return nearest_miss(
            question.custom_op, question.runners, question.keys, [self._index(each) for each in texts], dropped
        )

    def _refined(self, outcome: Outcome) -> Miss | None:
        """An entry of ours that has not raced the default has no policy in a store: FlashInfer sees a difference."""
        if outcome.miss is Miss.POLICY and outcome.raced and outcome.tuning:
            for each in self._in_use:
                entries = {} if each.store is None else self._entries_of(each)
                if any(key in entries and not entries[key].raced for key in outcome.question.keys):
                    return Miss.NOT_RACED
        return outcome.miss

    def _at(self, place: Place | None) -> list[InUse]:
        """The selections that answer there, or would."""
        if place is None:
            return [each for each in self._in_use if each.store is None and not each.selection.policy]
        if place.folder is None:
            return []  # a measurement policy alone: nothing is served there
        if self._observe:
            return [each for each in self._in_use if each.selection.policy == dict(place.policy)]
        return [each for each in self._in_use if each.store == place.folder]

    def _missed_although_there(self, outcome: Outcome, known: Known, in_use: list[InUse]) -> Miss | None:
        if not self._observe and known.place is None and not known.ours:
            return None  # it was not there yet
        for text, runner in zip(outcome.question.keys, outcome.question.runners, strict=True):
            for entry in (self._entries_of(each).get(text) for each in in_use):
                if entry is None:
                    continue
                if self._recorder.blocks(outcome.question.custom_op, runner, entry.tactic):
                    return Miss.BLOCKED
                if not self._observe and known.place is None:
                    return Miss.BLOCKED  # as another of its shape is
                if not self._observe:
                    return Miss.LATE if entry.raced or self._recorder.replaces_rivals else Miss.LEFT_OUT
                return self._would_be(outcome, known, text, entry)
        return None

    def _would_be(self, outcome: Outcome, known: Known, text: str, entry: ServedEntry) -> Miss:
        if known.place is None and self._index(known.own).has_shape(text):
            return Miss.OWN_COMES_FIRST
        if outcome.tuning and outcome.raced and not entry.raced:
            return Miss.NOT_RACED
        timed = outcome.usual if entry.policy is None else entry.policy == outcome.policy
        return Miss.POLICY if outcome.tuning and not timed else Miss.OBSERVED

    def _index(self, texts: Iterable[object]) -> KnownKeys:
        """Of keys or of their fields. What is given lives as long as what was recorded, so its id is its own."""
        if id(texts) not in self._indexes:
            self._indexes[id(texts)] = KnownKeys.of(map(str, texts))
        return self._indexes[id(texts)]

    def _entries_of(self, in_use: InUse) -> Mapping[str, ServedEntry]:
        from .autotuner.served_entry import served_entries

        digest = in_use.selection.digest
        if digest not in self._entries:
            self._entries[digest] = served_entries(in_use.selection, in_use.data)
        return self._entries[digest]

    def _dropped_from(self, selection: Selection) -> Mapping[tuple[str, str], str]:
        if selection.id not in self._dropped:
            self._dropped[selection.id] = {}
            with contextlib.suppress(FiTuneCacheError):
                self._dropped[selection.id] = _dropped(selection)
        return self._dropped[selection.id]


def _key(custom_op: str, runner: str, text: str) -> Key:
    try:
        return Key.parse(text)
    except FormatError:  # its extras are of a kind that no file can hold
        return Key(custom_op, runner, (), (), text)


class _Stored(Struct, frozen=True):
    answer: tuple[str, Tactic]
    is_marked: bool


class _EntryFile(Struct, frozen=True):
    runner: str
    tactic: Any
    fi_tunecache: Any = None


def _stored(path: Path) -> _Stored | None:
    """What a file of a managed store answers; None where it can't be read."""
    try:
        with path.open("rb") as stream:
            found = msgspec.json.decode(stream.read(MAX_ENTRY_BYTES), type=_EntryFile)
        return _Stored((found.runner, read_tactic(found.tactic)), found.fi_tunecache is not None)
    except (OSError, msgspec.DecodeError, RecursionError, FormatError):
        return None


class _Dropped(Struct, frozen=True):
    custom_op: str
    runner: str
    cause: str


class _Resolution(Struct, frozen=True):
    dropped: tuple[_Dropped, ...]


def _dropped(selection: Selection) -> Mapping[tuple[str, str], str]:
    """Why entries of an op and a runner were dropped, from the file beside the selection; nothing where it is gone."""
    cache = UserCache.locate()
    data = cache.read(cache.resolution_path(selection.id))
    if data is None:
        return {}
    document = decode_json(data, max_bytes=_MAX_RESOLUTION_BYTES, max_nesting=_MAX_RESOLUTION_NESTING)
    try:
        found = msgspec.convert(document, _Resolution)
    except msgspec.ValidationError as error:
        raise FormatError(f"not a resolution ({error})") from None
    return {
        (each.custom_op, each.runner): each.cause[:_MAX_CAUSE]
        for each in reversed(found.dropped)
        if each.cause.isprintable()
    }
