"""What is in a source, and in what two sources differ. Pure: sources come in, tables go out."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from .compatibility import FactDifference, differences
from .entry import Entry
from .environment import Environment
from .source import Section, Source

__all__ = ["Changed", "Comparison", "RunnerSummary", "compare", "summarise"]


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
    fastest_ms: float | None
    slowest_ms: float | None
    policies: tuple[str, ...]


class Changed(Struct, frozen=True):
    """A key that both sources have, with another answer."""

    first: Entry
    second: Entry


class Comparison(Struct, frozen=True):
    """In what two sources differ. Entries are compared by key, with their tactic and policy."""

    facts: tuple[FactDifference, ...]
    only_first: tuple[Entry, ...]
    only_second: tuple[Entry, ...]
    changed: tuple[Changed, ...]
    same: int


def summarise(section: Section) -> tuple[RunnerSummary, ...]:
    """One row for each op and runner class, sorted by name."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in section.entries:
        groups.setdefault((entry.key.custom_op, entry.key.runner), []).append(entry)
    return tuple(_summary(op, runner, entries) for (op, runner), entries in sorted(groups.items()))


def _summary(custom_op: str, runner: str, entries: list[Entry]) -> RunnerSummary:
    times = [entry.time_ms for entry in entries if entry.time_ms is not None]
    return RunnerSummary(
        custom_op=custom_op,
        runner=runner,
        entries=len(entries),
        shapes=len({entry.key.profile for entry in entries}),
        defaults=sum(type(entry.tactic) is int and entry.tactic == -1 for entry in entries),
        fastest_ms=min(times, default=None),
        slowest_ms=max(times, default=None),
        policies=tuple(sorted({_policy_text(entry) for entry in entries})),
    )


def _policy_text(entry: Entry) -> str:
    if entry.policy is None:
        return "not recorded"
    names, values = entry.policy[::2], entry.policy[1::2]
    return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=False))


def compare(first: Source, second: Source) -> Comparison:
    """Compare all entries of two sources. Where a source holds a key several times, the last one counts."""
    ours, theirs = _by_key(first.sections), _by_key(second.sections)
    common = [key for key in ours if key in theirs]
    changed = tuple(
        Changed(ours[key], theirs[key])
        for key in common
        if (ours[key].tactic, ours[key].policy, ours[key].runner)
        != (theirs[key].tactic, theirs[key].policy, theirs[key].runner)
    )
    return Comparison(
        facts=_fact_differences(first.sections, second.sections),
        only_first=tuple(entry for key, entry in ours.items() if key not in theirs),
        only_second=tuple(entry for key, entry in theirs.items() if key not in ours),
        changed=changed,
        same=len(common) - len(changed),
    )


def _by_key(sections: Iterable[Section]) -> dict[str, Entry]:
    return {entry.key.text: entry for section in sections for entry in section.entries}


def _fact_differences(first: tuple[Section, ...], second: tuple[Section, ...]) -> tuple[FactDifference, ...]:
    """Facts that differ between the sources' first environments."""
    ours, theirs = (
        next((section.environment for section in sections if section.environment is not None), Environment())
        for sections in (first, second)
    )
    return tuple(item for item in differences(ours, theirs) if (item.registry, item.here) != (None, None))
