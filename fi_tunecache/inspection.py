"""What is in a source, and in what two sources differ. Pure: sources come in, tables go out."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import Struct

from .bundle import MARK
from .entry import DEFAULT_TACTIC, Entry, LegacyEntry
from .environment import FACTS, Environment
from .errors import UsageError
from .measurement_policy import MeasurementPolicy
from .source import Section, Source

__all__ = [
    "Changed",
    "Comparison",
    "FactPair",
    "Group",
    "RunnerSummary",
    "compare",
    "group_entries",
    "pulled_from",
    "summarise",
]


class RunnerSummary(Struct, frozen=True):
    """The entries of one op and runner class.

    ``shapes`` counts different profiles, ``defaults`` the entries that name the runner's own
    choice (tactic -1); ``fastest_ms`` and ``slowest_ms`` are recorded times in milliseconds,
    where there are any. ``policies`` are the measurement policies of single entries.
    """

    custom_op: str
    runner: str
    entries: int
    shapes: int
    defaults: int
    fastest_ms: float | None = None
    slowest_ms: float | None = None
    policies: tuple[str, ...] = ()


class Group(Struct, frozen=True):
    """Entries that differ in their shapes alone, ordered by them. ``extras`` is text, as in a key."""

    custom_op: str
    runner: str
    extras: str
    entries: tuple[Entry, ...]


class FactPair(Struct, frozen=True):
    """A fact that FlashInfer takes for different. ``alike`` tells that it is the same as it is compared here."""

    fact: str
    first: str | None
    second: str | None
    alike: bool


class Changed(Struct, frozen=True):
    """A key that both sources have, with another runner or tactic."""

    first: Entry
    second: Entry


class Comparison(Struct, frozen=True):
    """In what two sources differ. Entries are compared by key.

    ``policies`` are the sources' measurement policies. Of the ``same`` answers ``remeasured`` were
    timed under another policy of the single entry.
    """

    facts: tuple[FactPair, ...]
    policies: tuple[MeasurementPolicy, MeasurementPolicy]
    only_first: tuple[Entry, ...]
    only_second: tuple[Entry, ...]
    changed: tuple[Changed, ...]
    same: int
    remeasured: int


def summarise(section: Section) -> tuple[RunnerSummary, ...]:
    """One row for each op and runner class, sorted by name, those without extras last."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in section.entries:
        groups.setdefault((entry.key.custom_op, entry.key.runner), []).append(entry)
    legacy: dict[tuple[str, str], list[LegacyEntry]] = {}
    for item in section.legacy:
        op, runner, _ = ast.literal_eval(item.text)  # a literal of short names and integers: it was checked when read
        legacy.setdefault((op, runner), []).append(item)
    return (
        *(_summary(op, runner, entries) for (op, runner), entries in sorted(groups.items())),
        *(
            RunnerSummary(op, runner, len(items), len({item.text for item in items}), sum(map(_is_default, items)))
            for (op, runner), items in sorted(legacy.items())
        ),
    )


def _summary(custom_op: str, runner: str, entries: list[Entry]) -> RunnerSummary:
    times = [entry.time_ms for entry in entries if entry.time_ms is not None]
    return RunnerSummary(
        custom_op=custom_op,
        runner=runner,
        entries=len(entries),
        shapes=len({entry.key.profile for entry in entries}),
        defaults=sum(map(_is_default, entries)),
        fastest_ms=min(times, default=None),
        slowest_ms=max(times, default=None),
        policies=tuple(sorted({_policy_text(entry) for entry in entries})),
    )


def _is_default(entry: Entry | LegacyEntry) -> bool:
    return type(entry.tactic) is int and entry.tactic == DEFAULT_TACTIC


def _policy_text(entry: Entry) -> str:
    if entry.policy is None:
        return "not recorded"
    names, values = entry.policy[::2], entry.policy[1::2]
    return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=False))


def group_entries(section: Section) -> tuple[Group, ...]:
    """All entries, by op, runner class and extras."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in section.entries:
        groups.setdefault((entry.key.custom_op, entry.key.runner, str(entry.key.extras)), []).append(entry)
    return tuple(
        Group(*names, tuple(sorted(entries, key=lambda entry: entry.key.profile)))
        for names, entries in sorted(groups.items())
    )


def pulled_from(section: Section) -> Mapping[str, int]:
    """How many entries bear our mark, by the bundle that it names."""
    marks = (
        str(entry.selection[MARK])[:80] for entry in section.entries if entry.selection and MARK in entry.selection
    )
    return dict(sorted(Counter(marks).items()))


def compare(first: Source, second: Source) -> Comparison:
    """Compare the entries of two sources that have one environment each.

    Raises
    ------
    UsageError
        A source has several environments: a managed store's root.
    """
    ours, theirs = _only_section(first), _only_section(second)
    ours_by_key = {entry.key.text: entry for entry in ours.entries}
    theirs_by_key = {entry.key.text: entry for entry in theirs.entries}
    common = [(entry, theirs_by_key[text]) for text, entry in ours_by_key.items() if text in theirs_by_key]
    changed = tuple(Changed(a, b) for a, b in common if (a.runner, a.tactic) != (b.runner, b.tactic))
    policies_differ = sum(a.policy != b.policy for a, b in common)
    return Comparison(
        facts=_fact_pairs(ours.environment or Environment(), theirs.environment or Environment()),
        policies=(ours.policy, theirs.policy),
        only_first=tuple(entry for text, entry in ours_by_key.items() if text not in theirs_by_key),
        only_second=tuple(entry for text, entry in theirs_by_key.items() if text not in ours_by_key),
        changed=changed,
        same=len(common) - len(changed),
        remeasured=policies_differ - sum(item.first.policy != item.second.policy for item in changed),
    )


def _only_section(source: Source) -> Section:
    if len(source.sections) != 1:
        names = ", ".join(section.name for section in source.sections) or "none"
        raise UsageError(
            f"{source.path} has {len(source.sections)} environments: {names}", "name the folder of one of them"
        )
    return source.sections[0]


def _fact_pairs(first: Environment, second: Environment) -> tuple[FactPair, ...]:
    names: Iterable[str] = (*FACTS, *dict.fromkeys(name for name, _ in (*first.other, *second.other)))
    return tuple(
        FactPair(name, first.raw(name), second.raw(name), first.fact(name) == second.fact(name))
        for name in names
        if first.raw(name) != second.raw(name)
    )
