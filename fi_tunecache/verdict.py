"""What a resolution says: what was chosen, and a reason, as an object and as one line, for all that was not."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeAlias, Union

from msgspec import Struct

from .bundle import Bundle
from .compatibility import FactDifference, PolicyDifference, Yanked
from .entry import Entry, Lookup
from .environment import Environment
from .manifest import BundleRow
from .match_level import MatchLevel
from .measurement_policy import MeasurementPolicy
from .wording import count_entries

__all__ = ["Candidate", "Cause", "Chosen", "Dropped", "Judgement", "Resolution", "Rule", "Verdict"]


class Rule(enum.Enum):
    """Why a group was dropped although no fact forbids it."""

    NOT_FASTEST = "no recorded lookup tells the caller's order, so only the fastest runner of a shape is kept"
    NO_TIMES = "no recorded lookup tells the caller's order and times are missing"
    NOT_RECORDED = "recorded lookups of the same shape did not choose it"
    CONTRADICTED = "a lookup with more runners, or a better bundle, wants another entry"
    LEFT_OVER = "one more choice is not left over at a shape where its rivals are dropped"
    WOULD_MISLEAD = "a lookup that is not served would end on this runner instead of its winner"
    SKIPPED_OP = "the op is in the skip list"
    COLLECTIVE_OP = "the op is collective: ranks must tune it together"
    LEGACY_CUDNN = "a cuDNN tactic that is a plan's position, which FlashInfer drops"

    def __str__(self) -> str:
        return self.value


Cause: TypeAlias = Union[FactDifference, Rule]


class Dropped(Struct, frozen=True):
    """Groups of entries that were dropped for one cause: one line of the explanation.

    ``rivals`` are the other runners of the lookup or shape, which made the cause apply.
    """

    bundle_id: str
    cause: Cause
    custom_op: str
    runner: str
    rivals: tuple[str, ...]
    entries: int

    def __str__(self) -> str:
        rivals = f" (rivals: {', '.join(self.rivals)})" if self.rivals else ""
        return f"{self.cause}: {count_entries(self.entries)} of {self.runner} dropped{rivals}"


class Candidate(Struct, frozen=True):
    """A manifest row, and the bundle behind it where it was fetched.

    ``registry`` is the registry's name, ``precedence`` its place in the order asked for.
    """

    registry: str
    row: BundleRow
    bundle: Bundle | None = None
    precedence: int = 0


class Judgement(Struct, frozen=True):
    """What a manifest row alone says: the differing facts, and why the bundle is rejected, if it is."""

    candidate: Candidate
    differing: tuple[FactDifference, ...]
    rejected: tuple[Yanked | PolicyDifference | FactDifference, ...]


class Verdict(Struct, frozen=True):
    """The outcome for one candidate bundle, one line.

    ``taken`` is the number of entries it provides, ``elsewhere`` of those whose lookup or
    key another bundle answers; the others are dropped, each in one :class:`Dropped` line. ``differing``
    facts of a bundle that is used do not concern the entries that are taken, or only their speed:
    those are named in ``may_cost_speed``.
    """

    registry: str
    bundle_id: str
    tuned_in: Environment
    entries: int
    taken: int
    elsewhere: int
    differing: tuple[FactDifference, ...]
    rejected: tuple[Yanked | PolicyDifference | FactDifference, ...]
    may_cost_speed: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.rejected:
            reasons = "; ".join(map(str, self.rejected))
            return f"bundle {self.bundle_id}: rejected: {reasons}: {count_entries(self.entries)} lost"
        line = f"bundle {self.bundle_id}: {self.taken} of {self.entries} entries"
        if self.elsewhere:
            line += f", {self.elsewhere} answered by another bundle"
        if self.differing:
            line += f" (differs in {'; '.join(map(str, self.differing))}"
            line += f"; {', '.join(self.may_cost_speed)} may cost speed)" if self.may_cost_speed else ")"
        return line


class Chosen(Struct, frozen=True, gc=False):
    """An entry of the selection and the bundle that provides it."""

    entry: Entry
    bundle_id: str


class Resolution(Struct, frozen=True):
    """The decision for one environment, with a reason for each candidate.

    ``chosen`` maps a key's text to its entry. ``lookups`` are the recorded lookups that are served.
    """

    environment: Environment
    level: MatchLevel
    policy: MeasurementPolicy
    chosen: Mapping[str, Chosen]
    lookups: tuple[Lookup, ...]
    verdicts: tuple[Verdict, ...]
    dropped: tuple[Dropped, ...]

    @property
    def used(self) -> tuple[Verdict, ...]:
        """The bundles that provide entries, best first."""
        return tuple(verdict for verdict in self.verdicts if verdict.taken)

    @property
    def nearest(self) -> Verdict | None:
        """The bundle that is not used with the fewest differing facts, before those of another policy or yanked."""
        unused = [verdict for verdict in self.verdicts if not verdict.taken and not verdict.elsewhere]
        return min(unused, key=_distance, default=None)


def _distance(verdict: Verdict) -> tuple[bool, int, int]:
    out_of_question = any(not isinstance(reason, FactDifference) for reason in verdict.rejected)
    return out_of_question, len(verdict.differing), -verdict.entries
