"""Recorded lookups: what a program asked the autotuner, as JSON, matched with the entries that answer.

A record is an object with ``custom_op``, ``runners`` ((class, extras) in the caller's order) and
either ``profile`` (bucketed, as in a key) or ``shapes`` (of the inputs, as at the call). dtypes
are strings such as ``"torch.bfloat16"``. ``winner`` (runner and tactic) may be given: it is then
checked, not trusted. Of a lookup that was tuned while it was recorded (``served``), ``raced`` tells whether the default
took part. The record of a workload holds such records too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from fi_tunecache.entry import Entry, Lookup, Tactic, read_tactic
from fi_tunecache.errors import FormatError, UsageError
from fi_tunecache.json_document import decode_json, naming
from fi_tunecache.key import Extra, Key, Profile
from fi_tunecache.recorded_lookup import (
    MAX_LOOKUPS_BYTES,
    MAX_LOOKUPS_NESTING,
    RecordedLookup,
    Served,
    read_extra,
)
from fi_tunecache.source import SourceKind, read_source
from fi_tunecache.workload_record import is_record, read_record

__all__ = ["Question", "answer", "default_raced", "questions_at", "questions_of", "read_questions"]


class Question(Struct, frozen=True):
    """A lookup without its answer. ``shapes`` are bucketed if ``bucketed``; ``winner`` is the recorded answer.

    ``raced`` tells whether the default took part in the race that the winner has won; None: not known.
    """

    custom_op: str
    runners: tuple[tuple[str, tuple[Extra, ...]], ...]
    shapes: Profile
    bucketed: bool
    winner: tuple[str, Tactic] | None = None
    raced: bool | None = None


class _Record(Struct, frozen=True):
    custom_op: str
    runners: list[tuple[str, list[Any]]]
    profile: tuple[tuple[int, ...], ...] | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None
    winner: tuple[str, Any] | None = None
    served: str | None = None
    raced: bool | None = None


def read_questions(data: bytes, *, source: str = "") -> tuple[Question, ...]:
    """Raises FormatError for anything but a list of records."""
    document = decode_json(data, max_bytes=MAX_LOOKUPS_BYTES, max_nesting=MAX_LOOKUPS_NESTING, source=source)
    with naming(source):
        try:
            records = msgspec.convert(document, list[_Record])
        except msgspec.ValidationError as error:
            raise FormatError(f"not recorded lookups ({error})", "record them again") from None
        return tuple(map(_question, records))


def questions_of(lookups: Iterable[Lookup]) -> tuple[Question, ...]:
    """The questions of a bundle's lookups, without the answers: the same calls, tuned again."""
    return tuple(
        Question(
            custom_op=lookup.custom_op,
            runners=tuple((key.runner, key.extras) for key in lookup.keys),
            shapes=lookup.profile,
            bucketed=True,
        )
        for lookup in lookups
    )


def questions_at(path: Path) -> tuple[Question, ...]:
    """Read a file of recorded lookups, or take those of a workload's record or of a bundle.

    Raises
    ------
    UsageError
        There is no such file, it can't be read, or it is a v1 file or a store, which hold no lookups.
    FormatError
        It is malformed.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_LOOKUPS_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror})", "name a file of recorded lookups") from error
    if data.lstrip()[:1] != b"{":
        return read_questions(data, source=str(path))
    if is_record(decode_json(data, max_bytes=MAX_LOOKUPS_BYTES, max_nesting=MAX_LOOKUPS_NESTING, source=str(path))):
        return tuple(map(_recorded, read_record(data, source=str(path)).lookups))
    source = read_source(path)
    if source.kind is not SourceKind.BUNDLE:
        raise UsageError(f"{path} is a {source.kind.value} and holds no lookups", "name recorded lookups, or a bundle")
    return questions_of(source.sections[0].lookups)


def _recorded(lookup: RecordedLookup) -> Question:
    return Question(
        custom_op=lookup.custom_op,
        runners=tuple((key.runner, key.extras) for key in lookup.keys),
        shapes=lookup.profile,
        bucketed=True,
        winner=(lookup.runner, lookup.tactic) if lookup.served.answers else None,
        raced=lookup.raced if lookup.served is Served.TUNED else None,
    )


def _question(record: _Record) -> Question:
    shapes = record.shapes if record.profile is None else record.profile
    if shapes is None or not record.runners:
        raise FormatError(f"a lookup of {record.custom_op[:80]} names no shapes or no runners", "record it again")
    return Question(
        custom_op=record.custom_op,
        runners=tuple((runner, tuple(map(read_extra, extras))) for runner, extras in record.runners),
        shapes=shapes,
        bucketed=record.profile is not None,
        winner=None if record.winner is None else (record.winner[0], read_tactic(record.winner[1])),
        raced=record.raced if record.served == Served.TUNED.value else None,
    )


def answer(questions: Iterable[Question], entries: Iterable[Entry], *, trust_winners: bool) -> tuple[Lookup, ...]:
    """Answer questions as FlashInfer does: the first runner in the caller's order that has an entry wins.

    Questions without an answer are left out, equal lookups are one.

    Parameters
    ----------
    trust_winners
        Whether recorded winners were given by these very entries; then another answer is an error.
        Otherwise they are passed over (the same calls, tuned again).

    Raises
    ------
    FormatError
        A recorded winner is not what the entries give.
    """
    by_text = {entry.key.text: entry for entry in entries}
    profiles: dict[tuple[str, str, str], list[Profile]] = {}
    for entry in by_text.values():
        profiles.setdefault((entry.key.custom_op, entry.key.runner, str(entry.key.extras)), []).append(
            entry.key.profile
        )

    lookups: dict[tuple[str, ...], Lookup] = {}
    for question in questions:
        profile = question.shapes if question.bucketed else _bucket(question, profiles)
        if profile is None:
            continue
        keys = tuple(Key(question.custom_op, runner, profile, extras) for runner, extras in question.runners)
        index = next((index for index, key in enumerate(keys) if key.text in by_text), None)
        if index is None:
            continue
        given = by_text[keys[index].text]
        if trust_winners and question.winner is not None and question.winner != (given.runner, given.tactic):
            raise FormatError(
                f"a lookup of {question.custom_op} recorded {question.winner[0]} {question.winner[1]} as its winner, "
                f"the entries give {given.runner} {given.tactic}",
                "name the lookups of the run that gave these entries",
            )
        lookups[tuple(key.text for key in keys)] = Lookup(keys, index)
    return tuple(lookups.values())


def default_raced(
    questions: Iterable[Question], lookups: Sequence[Lookup], entries: Mapping[str, Entry]
) -> bool | None:
    """Whether FlashInfer's default took part in the race for every entry; None where that was not recorded of each.

    An entry's race was recorded where a lookup of it was tuned, with that winner. ``lookups`` are the answered
    ones, ``entries`` map a key's text to its entry.
    """
    tuned: dict[tuple[str, ...], set[tuple[str, Tactic, bool]]] = {}
    for question in questions:
        if question.raced is not None and question.winner is not None:
            texts = tuple(
                Key(question.custom_op, runner, question.shapes, extras).text for runner, extras in question.runners
            )
            tuned.setdefault(texts, set()).add((*question.winner, question.raced))
    raced: dict[str, set[bool]] = {text: set() for text in entries}
    for lookup in lookups:
        won = entries[lookup.winning_key.text]
        for runner, tactic, with_default in tuned.get(tuple(key.text for key in lookup.keys), ()):
            if (runner, tactic) == (won.runner, won.tactic):
                raced[won.key.text].add(with_default)
    found = set().union(*raced.values())
    return found.pop() if len(found) == 1 and all(raced.values()) else None


def _bucket(question: Question, profiles: Mapping[tuple[str, str, str], list[Profile]]) -> Profile | None:
    """The profile that a call's shapes fall into: equal but for the dimensions that a profile leaves open (-1)."""
    for runner, extras in question.runners:
        for profile in profiles.get((question.custom_op, runner, str(extras)), ()):
            if len(profile) == len(question.shapes) and all(
                len(wanted) == len(shape) and all(w in (-1, s) for w, s in zip(wanted, shape, strict=True))
                for wanted, shape in zip(profile, question.shapes, strict=True)
            ):
                return profile
    return None
