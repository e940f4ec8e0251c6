"""May a result tuned there be used here? Pure: every fact is a parameter; no I/O, no clock.

Two levels. *exact*: all facts equal. *compatible*: by runner family, since a tactic depends on
few facts (``runner_families.json``). FlashInfer's version and the GPU's name must be equal at
both, and a fact that is undetermined equals nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from msgspec import Struct

from .environment import FACTS, Environment
from .manifest import BundleRow
from .match_level import MatchLevel
from .measurement_policy import MeasurementPolicy
from .runner_families import ALWAYS, family_of

__all__ = ["FactDifference", "PolicyDifference", "Yanked", "differences", "must_facts", "perf_facts", "rejection"]


class FactDifference(Struct, frozen=True, tag="fact"):
    """A fact that differs, as it is compared; ``here`` is None where it is undetermined."""

    fact: str
    registry: str | None
    here: str | None

    def __str__(self) -> str:
        return f"{self.fact}: registry {self.registry or 'unknown'}, here {self.here or 'unknown'}"


class PolicyDifference(Struct, frozen=True, tag="policy"):
    """A bundle that was measured under another policy than the one asked for."""

    registry: str
    asked: str

    def __str__(self) -> str:
        return f"measurement policy: registry {self.registry}, asked for {self.asked}"


class Yanked(Struct, frozen=True, tag="yanked"):
    """A bundle that its publisher has withdrawn."""

    reason: str
    date: str

    def __str__(self) -> str:
        return f"yanked on {self.date}: {self.reason}"


def differences(there: Environment, here: Environment) -> tuple[FactDifference, ...]:
    """Every fact that is not known to be equal, in FlashInfer's order."""
    names = (*FACTS, *dict.fromkeys(name for name, _ in (*there.other, *here.other)))
    return tuple(
        FactDifference(name, there.fact(name), here.fact(name))
        for name in names
        if there.fact(name) is None or there.fact(name) != here.fact(name)
    )


def rejection(
    row: BundleRow, differing: Iterable[FactDifference], level: MatchLevel, policy: MeasurementPolicy
) -> tuple[Yanked | PolicyDifference | FactDifference, ...]:
    """Why a bundle can't be used at all, judged by its manifest row; empty where it can.

    At level compatible a bundle whose ``must`` facts differ only for some runners is not rejected:
    its groups of entries are judged one by one.
    """
    if row.yanked is not None:
        return (Yanked(row.yanked.reason, row.yanked.date),)
    if row.measured_under != policy:
        return (PolicyDifference(str(row.measured_under), str(policy)),)
    if level is MatchLevel.EXACT:
        return tuple(differing)
    return tuple(difference for difference in differing if difference.fact in ALWAYS)


@lru_cache(maxsize=4096)
def must_facts(custom_op: str, runners: tuple[str, ...], facts: tuple[str, ...], raced_alone: bool) -> frozenset[str]:
    """The facts that must be equal for a lookup's answer to be valid: those of every runner that raced.

    Parameters
    ----------
    custom_op, runners
        The lookup: the classes that raced.
    facts
        The names of all facts there are.
    raced_alone
        Whether the lookup's runner had no rival, neither here nor in another lookup of the same shape.
    """
    families = {family_of(custom_op, runner) for runner in runners}
    return frozenset().union(*(family.must_facts(raced_alone, facts) for family in families))


@lru_cache(maxsize=4096)
def perf_facts(custom_op: str, runners: tuple[str, ...], facts: tuple[str, ...]) -> frozenset[str]:
    """The facts on which only the speed of a lookup's answer depends; parameters as in :func:`must_facts`."""
    families = {family_of(custom_op, runner) for runner in runners}
    return frozenset().union(*(family.perf_facts(len(runners) == 1, facts) for family in families))
