"""What is kept of a lookup while it is recorded: cheap to make under the autotuner's lock, and read later."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..entry import DEFAULT_TACTIC, ProfilingPolicy, Tactic
from ..miss import Miss
from ..recorded_lookup import Served
from .served_entry import ServedEntry

__all__ = ["MAX_OUTCOMES", "Known", "Outcome", "Outcomes", "Place", "Question"]

MAX_OUTCOMES = 100_000
"""Different outcomes that are told apart; of more, only the number is known."""


@dataclass(slots=True, eq=False)
class Question:
    """The keys that are looked for, one a runner, in the caller's order, as FlashInfer prints them."""

    custom_op: str
    runners: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class Place:
    """What a lookup reads that does not read entries of files alone: the folder of a managed store, None where there is
    none, and the fields of the measurement policy."""

    folder: Path | None
    policy: tuple[tuple[str, str], ...]


@dataclass(slots=True, eq=False)
class Known:
    """What there were entries for when nothing answered.

    ``own`` are the keys of the program's entries of files; ``kept`` the fields of the keys of those that it has in
    memory, from tuning or a store. ``ours`` are entries of a registry: they answer only where there is no ``place``.
    """

    own: tuple[str, ...]
    kept: tuple[tuple[Any, ...], ...]
    ours: Mapping[str, ServedEntry]
    place: Place | None


@dataclass(slots=True, eq=False)
class Outcome:
    """A question and what became of it, ``count`` times. The fields are those of a recorded lookup, but that

    * ``served`` is ``STORE`` also for what we have put there: the file ``entry`` tells;
    * ``miss`` is None as well where no entry had one of the keys: then ``known`` is what there was;
    * ``usual`` tells whether an entry that names no policy counts as timed under this one;
    * ``key`` is FlashInfer's own for an answer from memory;
    * ``order`` is smaller for what was seen earlier.
    """

    question: Question
    served: Served
    runner: str
    tactic: Tactic
    raced: bool
    tuning: bool
    policy: ProfilingPolicy
    usual: bool
    entry: Path | None = None
    key: Any = None
    miss: Miss | None = None
    known: Known | None = None
    order: int = 0
    count: int = 0

    @property
    def identity(self) -> tuple[Any, ...]:
        return (
            self.question,
            self.served,
            self.runner,
            self.tactic,
            self.raced,
            self.tuning,
            self.policy,
            self.entry,
            self.miss,
            self.known,
        )


class Outcomes:
    """Different outcomes. Several threads may use it, where each single step on a dict is one (CPython)."""

    def __init__(self) -> None:
        self._sequence = itertools.count()
        self._questions: dict[tuple[str, ...], Question] = {}
        self._outcomes: dict[tuple[Any, ...], Outcome] = {}
        self._rest = self.nothing()

    @staticmethod
    def nothing() -> Outcome:
        """One that is none of them, of a question without runners."""
        return Outcome(Question("", (), ()), Served.DEFAULT, "", DEFAULT_TACTIC, False, False, (), False)

    @property
    def untold(self) -> int:
        """The count of all for which there was no room."""
        return self._rest.count

    def next(self) -> int:
        """A number for ``order``."""
        return next(self._sequence)

    def seen(self) -> list[Outcome]:
        """Those that have occurred, in order."""
        return sorted((each for each in list(self._outcomes.values()) if each.count), key=lambda each: each.order)

    def one(self, outcome: Outcome, order: int | None = None) -> Outcome:
        """The one that equals this, which it becomes if there is none. Where there is no room, the rest."""
        outcome.order = self.next() if order is None else order
        full = len(self._outcomes) >= MAX_OUTCOMES
        question = self._questions.get(outcome.question.keys)
        if question is None:
            if full:
                return self._rest
            question = self._questions.setdefault(outcome.question.keys, outcome.question)
        outcome.question = question
        if full:
            return self._outcomes.get(outcome.identity, self._rest)
        return self._outcomes.setdefault(outcome.identity, outcome)
