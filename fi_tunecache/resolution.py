"""Which entries are chosen for one environment, and why. Pure: no I/O, no clock.

How a config is chosen, top to bottom:

1. :func:`judge` looks at each manifest row: is the bundle yanked, of another policy, of another
   environment? At level compatible only FlashInfer's version and the GPU decide here.
2. The accepted bundles are put in order: fewest differing facts, registry precedence, those whose
   default raced, newest.
3. The bundles are cut into *groups*, one a lookup: all runners that raced, and the entry that won.
   Entries that no recorded lookup chose form groups by shape. A group is taken or dropped whole.
4. The first bundle that has a valid group for a lookup provides it.
5. The groups are made consistent. FlashInfer serves the first runner in the caller's list that has
   an entry, so every recorded lookup, replayed against the selection, must give its winner or miss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from .compatibility import FactDifference, differences, must_facts, perf_facts, rejection
from .entry import Entry, Lookup
from .environment import Environment
from .key import Key
from .match_level import MatchLevel
from .measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from .runner_families import is_never_taken
from .verdict import Candidate, Cause, Chosen, Dropped, Judgement, Resolution, Rule, Verdict

__all__ = ["choose", "judge"]

_MOST_RIVALS = 8
"""So many runner classes are named in a reason; more at one shape are nobody's real result."""


class _Group(Struct, frozen=True, gc=False):
    """All runners that raced for one lookup, and the entry that won."""

    lookup: Lookup
    entry: Entry
    bundle_id: str
    recorded: bool
    texts: tuple[str, ...]
    runners: tuple[str, ...]

    @classmethod
    def of(cls, lookup: Lookup, entry: Entry, bundle_id: str, *, recorded: bool) -> _Group:
        texts, runners = tuple([key.text for key in lookup.keys]), tuple([key.runner for key in lookup.keys])
        return cls(lookup, entry, bundle_id, recorded, texts, runners)

    @property
    def shape(self) -> tuple[str, object]:
        return self.entry.key.shape


class _Refused(Struct, frozen=True, gc=False):
    group: _Group
    cause: Cause
    rivals: tuple[str, ...] = ()


def judge(
    candidates: Iterable[Candidate], environment: Environment, level: MatchLevel, policy: MeasurementPolicy
) -> list[Judgement]:
    """Judge candidates by their rows, best first. Those not rejected are the ones whose bundle is needed."""
    judged = []
    for candidate in reversed(tuple(candidates)):  # of one day, what was published last is the newest
        differing = differences(candidate.row.tuned_in, environment)
        judged.append(Judgement(candidate, differing, rejection(candidate.row, differing, level, policy)))
    # Two sorts, since dates sort downwards: Python's sort keeps the order of equals.
    judged.sort(key=lambda judgement: judgement.candidate.row.created, reverse=True)
    judged.sort(
        key=lambda judgement: (
            len(judgement.differing),
            judgement.candidate.precedence,
            judgement.candidate.row.default_raced is not True,
        )
    )
    return judged


def choose(
    candidates: Sequence[Candidate],
    environment: Environment,
    level: MatchLevel = MatchLevel.EXACT,
    policy: MeasurementPolicy = DEFAULT_POLICY,
    skip_ops: Collection[str] = (),
) -> Resolution:
    """Choose the entries for one environment.

    Parameters
    ----------
    candidates
        Rows of the manifests in question. Those that :func:`judge` does not reject need their bundle.
    environment
        The facts of the machine in question; undetermined ones match nothing.
    level, policy
        How much must be equal, and which measurement policy is served.
    skip_ops
        Custom ops that are left out.

    Returns
    -------
    Resolution
        Deterministic: the same arguments give the same entries.
    """
    judged = judge(candidates, environment, level, policy)
    differing = {item.candidate.row.bundle_id: item.differing for item in judged}
    groups, refused = _groups(judged)
    facts = tuple(dict.fromkeys((*environment.names(), *(item.fact for items in differing.values() for item in items))))
    offered, invalid = _valid_groups(groups, differing, facts, frozenset(skip_ops))
    refused += invalid

    providers: dict[tuple[str, ...], _Group] = {}
    for group in offered:
        providers.setdefault(group.texts, group)
    served, conflicts = _consistent(
        list(providers.values()), [item.group for item in refused if item.group.texts not in providers]
    )
    chosen: dict[str, Chosen] = {}
    for group in served:
        chosen.setdefault(group.entry.key.text, Chosen(group.entry, group.bundle_id))
    others = [group for group in offered if group.entry.key.text not in chosen]
    served_texts = {group.texts for group in served} if others else set()
    answered = {(group.bundle_id, group.entry.key.text) for group in others if group.texts in served_texts}
    races = {(group.bundle_id, group.entry.key.custom_op, group.runners) for group in served}
    slower = {(race[0], fact) for race in races for fact in _speed_facts(*race[1:], differing[race[0]])}
    # What goes for the bundle that was to provide a lookup goes for the others that could have.
    lost = {item.group.texts: item for item in conflicts}
    for group in offered if lost else ():
        if group.texts in lost:
            refused.append(_Refused(group, lost[group.texts].cause, lost[group.texts].rivals))

    return Resolution(
        environment=environment,
        level=level,
        policy=policy,
        chosen=chosen,
        lookups=tuple(group.lookup for group in served if group.recorded),
        verdicts=tuple(_verdict(judgement, chosen, answered, slower) for judgement in judged),
        dropped=_summarise(refused, chosen, answered),
    )


def _groups(judged: Iterable[Judgement]) -> tuple[list[_Group], list[_Refused]]:
    """Cut the bundles that are not rejected into groups: recorded lookups, then what they leave."""
    recorded: list[_Group] = []
    left: list[tuple[Entry, str]] = []
    for judgement in judged:
        if judgement.rejected:
            continue
        bundle, bundle_id = judgement.candidate.bundle, judgement.candidate.row.bundle_id
        if bundle is None:
            raise ValueError(f"bundle {bundle_id} is not rejected and was not fetched")
        chosen = set()
        for lookup in bundle.lookups:
            text = lookup.winning_key.text
            chosen.add(text)
            recorded.append(_Group.of(lookup, bundle.entries[text], bundle_id, recorded=True))
        left += [(entry, bundle_id) for text, entry in bundle.entries.items() if text not in chosen]
    unordered, refused = _unordered_groups(left, {group.shape for group in recorded})
    return recorded + unordered, refused


def _unordered_groups(
    left: Iterable[tuple[Entry, str]], recorded: Collection[tuple[str, object]]
) -> tuple[list[_Group], list[_Refused]]:
    """Make groups of the entries of all bundles that no recorded lookup chose.

    Nobody knows which callers there were, nor their order, so of several runner classes at one
    shape only the fastest by recorded time is kept, and none at a shape that a recorded lookup has.
    """
    by_shape: dict[tuple[str, object], list[tuple[Entry, str]]] = {}
    for entry, bundle_id in left:
        by_shape.setdefault(entry.key.shape, []).append((entry, bundle_id))
    groups: list[_Group] = []
    refused: list[_Refused] = []
    for shape, items in by_shape.items():
        if len(items) == 1 and shape not in recorded:  # as nearly always
            entry, bundle_id = items[0]
            groups.append(_Group.of(Lookup((entry.key,), 0), entry, bundle_id, recorded=False))
            continue
        alone = [_Group.of(Lookup((entry.key,), 0), entry, bundle_id, recorded=False) for entry, bundle_id in items]
        classes = sorted({entry.runner for entry, _ in items})
        if shape in recorded:
            refused += [_Refused(group, Rule.NOT_RECORDED) for group in alone]
            continue
        if len(classes) == 1:
            groups += alone
            continue
        best: dict[Key, Entry] = {}  # of one key in several bundles the first counts
        for entry, _ in items:
            best.setdefault(entry.key, entry)
        known = all(entry.time_ms is not None for entry in best.values())
        # Slowest first: whatever stands before the winner must miss.
        race = Lookup(tuple(sorted(best, key=lambda key: -(best[key].time_ms or 0.0))), len(best) - 1)
        for group in alone:
            if known and group.entry.key == race.winning_key:
                groups.append(_Group.of(race, group.entry, group.bundle_id, recorded=False))
            else:
                rivals = tuple(runner for runner in classes[:_MOST_RIVALS] if runner != group.entry.runner)
                refused.append(_Refused(group, Rule.NOT_FASTEST if known else Rule.NO_TIMES, rivals))
    return groups, refused


def _valid_groups(
    groups: list[_Group],
    differing: Mapping[str, Collection[FactDifference]],
    facts: tuple[str, ...],
    skip_ops: frozenset[str],
) -> tuple[list[_Group], list[_Refused]]:
    """Split groups into those whose facts are equal here and those to drop, each with its first cause.

    ``differing`` are the facts in which each bundle differs from here.
    """
    valid: list[_Group] = []
    refused: list[_Refused] = []
    dropped_at: dict[tuple[str, object], list[str]] = {}
    for group in groups:
        alone = group.recorded and len(group.lookup.keys) == 1
        cause = _rule(group, skip_ops)
        if cause is None:
            cause = _first_difference(group, differing[group.bundle_id], facts, raced_alone=alone)
            if cause is not None:
                dropped_at.setdefault((group.bundle_id, group.shape), []).append(group.entry.runner)
        if cause is None:
            valid.append(group)
        else:
            winner = group.lookup.winner
            refused.append(_Refused(group, cause, group.runners[:winner] + group.runners[winner + 1 :]))
    if not dropped_at:
        return valid, refused
    # A runner that merely is one more choice must not be left over where its rivals were dropped:
    # kept alone, TinyGemm made backend="auto" 7.7 times slower at M = 128 (H200, flashinfer 0.7.4).
    kept = []
    for group in valid:
        rivals = tuple(dict.fromkeys(dropped_at.get((group.bundle_id, group.shape), ())))
        if rivals and _first_difference(group, differing[group.bundle_id], facts, raced_alone=False) is not None:
            refused.append(_Refused(group, Rule.LEFT_OVER, rivals))
        else:
            kept.append(group)
    return kept, refused


def _rule(group: _Group, skip_ops: frozenset[str]) -> Cause | None:
    entry = group.entry
    if entry.key.custom_op in skip_ops:
        return Rule.SKIPPED_OP
    if is_never_taken(entry.key.custom_op):
        return Rule.COLLECTIVE_OP
    return Rule.LEGACY_CUDNN if entry.is_cudnn_ordinal else None


def _first_difference(
    group: _Group, differing: Collection[FactDifference], facts: tuple[str, ...], raced_alone: bool
) -> FactDifference | None:
    if not differing:
        return None
    must = must_facts(group.entry.key.custom_op, group.runners, facts, raced_alone)
    return next((difference for difference in differing if difference.fact in must), None)


def _consistent(groups: list[_Group], unserved: list[_Group]) -> tuple[list[_Group], list[_Refused]]:
    """Keep the groups that can be served together.

    A group needs its winner's key present with its tactic, and the keys before it absent. Lookups
    with more runners come first. Then whatever would be served to a lookup that is not served is
    taken out, until nothing changes: a dropped lookup must miss.
    """
    present: dict[str, Entry] = {}
    absent: set[str] = set()
    served: dict[tuple[str, ...], _Group] = {}
    refused: list[_Refused] = []
    for group in sorted(groups, key=lambda group: -len(group.lookup.keys)):
        texts = group.texts
        *before, winner = texts[: group.lookup.winner + 1]
        held = present.get(winner)
        fits = held is None or (held.tactic, held.policy) == (group.entry.tactic, group.entry.policy)
        if not fits or winner in absent or not present.keys().isdisjoint(before):
            refused.append(_Refused(group, Rule.CONTRADICTED))
            continue
        absent.update(before)
        present.setdefault(winner, group.entry)
        served[texts] = group

    waiting = [group for group in (*unserved, *(item.group for item in refused)) if len(group.lookup.keys) > 1]
    if not waiting:
        return list(served.values()), refused
    by_winner: dict[str, list[_Group]] = {}
    for group in served.values():
        by_winner.setdefault(group.lookup.winning_key.text, []).append(group)
    while waiting:
        texts = waiting.pop().texts
        while (hit := next((text for text in texts if text in present), None)) is not None:
            del present[hit]
            for group in by_winner.pop(hit):
                del served[group.texts]
                refused.append(_Refused(group, Rule.WOULD_MISLEAD))
                if len(group.lookup.keys) > 1:
                    waiting.append(group)
    return list(served.values()), refused


def _speed_facts(custom_op: str, runners: tuple[str, ...], differing: Collection[FactDifference]) -> Iterable[str]:
    """The facts that differ and on which the speed of a race's entry depends, though not its validity."""
    facts = perf_facts(custom_op, runners, tuple(difference.fact for difference in differing))
    return (difference.fact for difference in differing if difference.fact in facts)


def _verdict(
    judgement: Judgement,
    chosen: Mapping[str, Chosen],
    answered: Collection[tuple[str, str]],
    slower: Collection[tuple[str, str]],
) -> Verdict:
    row, bundle = judgement.candidate.row, judgement.candidate.bundle
    bundle_id = row.bundle_id
    taken = elsewhere = 0
    for text in bundle.entries if bundle is not None and not judgement.rejected else ():
        provider = chosen.get(text)
        if provider is not None and provider.bundle_id == bundle_id:
            taken += 1
        elif provider is not None or (bundle_id, text) in answered:
            elsewhere += 1
    return Verdict(
        registry=judgement.candidate.registry,
        bundle_id=bundle_id,
        tuned_in=row.tuned_in,
        entries=row.entry_count,
        taken=taken,
        elsewhere=elsewhere,
        differing=judgement.differing,
        rejected=judgement.rejected,
        may_cost_speed=tuple(item.fact for item in judgement.differing if (row.bundle_id, item.fact) in slower),
    )


def _summarise(
    refused: Iterable[_Refused], chosen: Mapping[str, Chosen], answered: Collection[tuple[str, str]]
) -> tuple[Dropped, ...]:
    """Entries dropped for one cause become one line, in the order in which they were met.

    An entry counts once, with its first cause, and not where another bundle answers for it.
    """
    causes: dict[tuple[str, str], _Refused] = {}
    for item in refused:
        entry = (item.group.bundle_id, item.group.entry.key.text)
        if entry[1] not in chosen and entry not in answered:
            causes.setdefault(entry, item)
    counts: dict[tuple[str, Cause, str, str, tuple[str, ...]], int] = {}
    for item in causes.values():
        key: Key = item.group.entry.key
        line = (item.group.bundle_id, item.cause, key.custom_op, key.runner, item.rivals)
        counts[line] = counts.get(line, 0) + 1
    return tuple(Dropped(*line, entries=count) for line, count in counts.items())
