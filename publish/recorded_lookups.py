"""Recorded lookups: what a program asked the autotuner, as JSON, matched with the entries that answer.

A record is an object with ``custom_op``, ``runners`` ((class, extras) in the caller's order) and
either ``profile`` (bucketed, as in a key) or ``shapes`` (of the inputs, as at the call). dtypes
are strings such as ``"torch.bfloat16"``. ``winner`` (runner and tactic) may be given: it is then
checked, not trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from fi_tunecache.entry import Entry, Lookup, Tactic, read_tactic
from fi_tunecache.errors import FormatError, UsageError
from fi_tunecache.json_document import decode_json, naming
from fi_tunecache.key import MAX_NESTING, Dtype, Extra, Key, Profile
from fi_tunecache.source import SourceKind, read_source

__all__ = ["Question", "answer", "questions_at", "questions_of", "read_questions"]


MAX_FILE_BYTES = 64 * 1024 * 1024
_MAX_FILE_NESTING = MAX_NESTING + 4  # a record's runners are pairs of a class and its extras


class Question(Struct, frozen=True):
    """A lookup without its answer. ``shapes`` are bucketed if ``bucketed``; ``winner`` is the recorded answer."""

    custom_op: str
    runners: tuple[tuple[str, tuple[Extra, ...]], ...]
    shapes: Profile
    bucketed: bool
    winner: tuple[str, Tactic] | None = None


class _Record(Struct, frozen=True):
    custom_op: str
    runners: list[tuple[str, list[Any]]]
    profile: tuple[tuple[int, ...], ...] | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None
    winner: tuple[str, Any] | None = None


def read_questions(data: bytes, *, source: str = "") -> tuple[Question, ...]:
    """Raises FormatError for anything but a list of records."""
    document = decode_json(data, max_bytes=MAX_FILE_BYTES, max_nesting=_MAX_FILE_NESTING, source=source)
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
    """Read a file of recorded lookups, or take those of a bundle.

    Raises
    ------
    UsageError
        There is no such file, it can't be read, or it is a v1 file or a store, which hold no lookups.
    FormatError
        It is malformed.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror})", "name a file of recorded lookups") from error
    if data.lstrip()[:1] != b"{":
        return read_questions(data, source=str(path))
    source = read_source(path)
    if source.kind is not SourceKind.BUNDLE:
        raise UsageError(f"{path} is a {source.kind.value} and holds no lookups", "name recorded lookups, or a bundle")
    return questions_of(source.sections[0].lookups)


def _question(record: _Record) -> Question:
    shapes = record.shapes if record.profile is None else record.profile
    if shapes is None or not record.runners:
        raise FormatError(f"a lookup of {record.custom_op[:80]} names no shapes or no runners", "record it again")
    return Question(
        custom_op=record.custom_op,
        runners=tuple((runner, tuple(map(_extra, extras))) for runner, extras in record.runners),
        shapes=shapes,
        bucketed=record.profile is not None,
        winner=None if record.winner is None else (record.winner[0], read_tactic(record.winner[1])),
    )


def _extra(value: Any) -> Extra:
    if isinstance(value, list):
        return tuple(map(_extra, value))
    if isinstance(value, str) and value.startswith("torch."):
        return Dtype(value.removeprefix("torch."))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise FormatError(f"a lookup's extras hold a {type(value).__name__}", "record it again")


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
