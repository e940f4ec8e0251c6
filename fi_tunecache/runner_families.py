"""Runner families: runner classes whose tactics mean the same kind of thing.

What a tactic denotes decides which environment facts it depends on. Which class belongs to which
family, what that family depends on, and how anybody knows, is data: ``runner_families.json`` beside
this module (``docs/runner-families.md`` explains it). It is read on first use.
"""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias, Union

import msgspec
from msgspec import Struct

from .environment import FACTS

__all__ = [
    "ALWAYS",
    "RunnerFamily",
    "checked_versions",
    "families",
    "family_of",
    "is_never_taken",
    "rules_version",
]

ALWAYS = ("flashinfer_version", "gpu")
"""Facts that must match for every family: each denotation is one of a FlashInfer version's own
tables, kernels or pinned artifacts, and what was timed is a GPU."""

_Facts: TypeAlias = Union[Literal["all"], tuple[str, ...]]


class RunnerFamily(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a tactic of some runner classes denotes, and what follows from that.

    ``must`` facts decide whether a tactic means the same thing elsewhere, ``perf`` facts only
    whether it is still the fastest; each is a tuple of names or ``"all"``. ``must_when_raced``
    comes on top where several runners raced. ``evidence`` says how that is known.
    """

    name: str
    title: str
    tactic: str
    must: _Facts
    perf: _Facts
    must_when_raced: _Facts = ()
    evidence: str

    def must_facts(self, raced_alone: bool, all_facts: tuple[str, ...]) -> frozenset[str]:
        """The facts that have to be equal for a tactic to be taken over.

        Parameters
        ----------
        raced_alone
            The lookup had a single runner. False where that is not known.
        all_facts
            The names of both environments' facts. One that is not among
            :data:`~fi_tunecache.environment.FACTS` has to be equal for every family: nobody knows
            yet what depends on it.
        """
        unread = (fact for fact in all_facts if fact not in FACTS)
        raced = () if raced_alone else self.must_when_raced
        return frozenset((*ALWAYS, *unread, *_named(self.must, all_facts), *_named(raced, all_facts)))

    def perf_facts(self, raced_alone: bool, all_facts: tuple[str, ...]) -> frozenset[str]:
        """The facts that may differ, which is then said; parameters as in :meth:`must_facts`."""
        return frozenset(_named(self.perf, all_facts)) - self.must_facts(raced_alone, all_facts)


def _named(facts: _Facts, all_facts: tuple[str, ...]) -> tuple[str, ...]:
    return all_facts if facts == "all" else facts


class _Rule(Struct, frozen=True, forbid_unknown_fields=True):
    """Classes of one family; with ``custom_ops``, only under ops that match one of the patterns."""

    family: str
    classes: tuple[str, ...]
    custom_ops: tuple[str, ...] = ("*",)


class _Never(Struct, frozen=True, forbid_unknown_fields=True):
    custom_op: str
    reason: str


class _Data(Struct, frozen=True, forbid_unknown_fields=True):
    checked_versions: tuple[str, ...]
    families: tuple[RunnerFamily, ...]
    runners: tuple[_Rule, ...]
    never: tuple[_Never, ...]


@lru_cache(maxsize=1)
def _bytes() -> bytes:
    # importlib.resources would cost 5 ms of every start, and a registry needs real files anyway.
    return Path(__file__).with_name("runner_families.json").read_bytes()


@lru_cache(maxsize=1)
def _data() -> _Data:
    return msgspec.json.decode(_bytes(), type=_Data)


@lru_cache(maxsize=1)
def _families() -> dict[str, RunnerFamily]:
    return {family.name: family for family in _data().families}


@lru_cache(maxsize=1)
def _rules() -> dict[str, list[_Rule]]:
    """The rules by class, in the order of the data."""
    rules: dict[str, list[_Rule]] = {}
    for rule in _data().runners:
        for runner in rule.classes:
            rules.setdefault(runner, []).append(rule)
    return rules


def families() -> tuple[RunnerFamily, ...]:
    """All families, ``unknown`` last."""
    return _data().families


@lru_cache(maxsize=4096)
def family_of(custom_op: str, runner: str) -> RunnerFamily:
    """The family of a runner class under a custom op: the first rule that fits.

    Class names are not unique (0.7.4 has three ``MoERunner``), hence the op. A class that no
    rule names is ``unknown`` and depends on every fact. Does not say whether the op may be taken
    over at all: see :func:`is_never_taken`.
    """
    for rule in _rules().get(runner, ()):
        if any(fnmatchcase(custom_op, pattern) for pattern in rule.custom_ops):
            return _families()[rule.family]
    return _families()["unknown"]


@lru_cache(maxsize=4096)
def is_never_taken(custom_op: str) -> str | None:
    """Why entries of this op are never taken over, or None."""
    return next((never.reason for never in _data().never if never.custom_op == custom_op), None)


def checked_versions() -> tuple[str, ...]:
    """FlashInfer versions all of whose runner classes were read for these rules."""
    return _data().checked_versions


def rules_version() -> str:
    """A digest of the rules: first 16 hex digits of the sha256 of the data file's bytes."""
    return hashlib.sha256(_bytes()).hexdigest()[:16]
