"""``fi-tunecache inspect``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from ..entry import Entry, tactic_json
from ..inspection import Comparison, RunnerSummary, compare, group_entries, pulled_from, summarise
from ..source import Section, Source, SourceKind, read_source
from ..wording import count_entries, plural
from .options import as_json
from .output import environment_builtins, print_json, print_line, print_table

__all__ = ["command"]

_FIRST = 10


@click.command("inspect")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path), required=False)
@click.option("--all", "show_all", is_flag=True, help="Every entry with its shapes, tactic and time.")
@as_json
def command(source: Path, second: Path | None, show_all: bool, as_json: bool) -> None:
    """Show what is in SOURCE: a v1 file, a managed store, a bundle, or a module bundled with FlashInfer.

    Given two, show what differs: facts, entries that only one has, entries with another answer. Of
    a managed store with several environments name one's folder then.
    """
    first = read_source(source)
    if second is None:
        if as_json:
            print_json(_source_builtins(first, show_all))
        else:
            _print_source(first, show_all)
        return
    comparison = compare(first, read_source(second))
    if as_json:
        print_json(_comparison_builtins(comparison, source, second))
    else:
        _print_comparison(comparison, source, second, None if show_all else _FIRST)


def _print_source(source: Source, show_all: bool) -> None:
    print_line(f"{source.path}: {source.kind.value}")
    for section in source.sections:
        print_line()
        if source.kind is SourceKind.STORE:
            print_line(f"Environment {section.name}")
        _print_section(section, show_all, has_policy=_has_policy(source))
    for problem in source.problems:
        print_line(f"problem: {problem}")


def _has_policy(source: Source) -> bool:
    """Whether this kind of source says under which measurement policy it was tuned."""
    return source.kind in (SourceKind.STORE, SourceKind.BUNDLE)


def _print_section(section: Section, show_all: bool, *, has_policy: bool) -> None:
    environment = section.environment
    for name in environment.names() if environment else ():
        print_line(f"  {name}: {environment.fact(name) or environment.raw(name) or 'unknown'}" if environment else "")
    if has_policy:
        print_line(f"  measurement policy: {section.policy}")
    for name, value in _provenance(section).items():
        print_line(f"  {name}: {value}")
    counts = [plural(len(section.entries) + len(section.legacy), "entry", "entries")]
    if section.lookups:
        counts.append(plural(len(section.lookups), "recorded lookup"))
    if section.records:
        counts.append(plural(section.records, "record") + " of operations that tune themselves")
    print_line(f"  {', '.join(counts)}")
    summaries = summarise(section)
    if summaries:
        print_table(
            ("op", "runner", "entries", "shapes", "tactic -1", "time"),
            [_summary_row(summary) for summary in summaries],
            numbers=("entries", "shapes", "tactic -1", "time"),
            wrap=("op", "runner"),
        )
    measured: dict[str, dict[str, None]] = {}
    for summary in summaries:
        for policy in summary.policies:
            measured.setdefault(policy, {})[summary.custom_op] = None
    for policy, ops in measured.items():
        print_line(f"  measured with {policy}: {', '.join(ops)}")
    for bundle, count in pulled_from(section).items():
        print_line(f"  {count_entries(count)} pulled from bundle {bundle}")
    if show_all:
        _print_entries(section)
    for problem in section.problems:
        print_line(f"  problem: {problem}")


def _provenance(section: Section) -> dict[str, Any]:
    if section.provenance is None:
        return {}
    known: dict[str, Any] = msgspec.to_builtins(section.provenance)
    workload = {f"workload {name}": value for name, value in known.pop("workload", {}).items()}
    raced = {True: "yes", False: "no", None: "not known"}[section.default_raced]
    return {**known, **workload, "default raced": raced}


def _summary_row(summary: RunnerSummary) -> tuple[object, ...]:
    times = "not recorded"
    if summary.fastest_ms is not None and summary.slowest_ms is not None:
        times = f"{summary.fastest_ms * 1000:.1f} to {summary.slowest_ms * 1000:.1f} µs"
    return (summary.custom_op, summary.runner, summary.entries, summary.shapes, summary.defaults, times)


def _print_entries(section: Section) -> None:
    for group in group_entries(section):
        print_line()
        print_line(f"{group.custom_op} {group.runner} {group.extras}")
        print_table(
            ("shapes", "tactic", "time"),
            [(entry.key.profile, entry.tactic, _time(entry)) for entry in group.entries],
            numbers=("time",),
            wrap=("shapes", "tactic"),
        )


def _print_comparison(comparison: Comparison, first: Path, second: Path, most: int | None) -> None:
    print_line(
        f"{count_entries(comparison.same)} with the same answer, {len(comparison.changed)} with another, "
        f"{len(comparison.only_first)} only in {first}, {len(comparison.only_second)} only in {second}"
    )
    if comparison.remeasured:
        print_line(f"  {comparison.remeasured} of the same answers were measured under another policy")
    for pair in comparison.facts:
        differs = f"{pair.first or 'unknown'} in {first}, {pair.second or 'unknown'} in {second}"
        if pair.alike:
            differs = "FlashInfer takes them for different; the versions in them are the same"
        print_line(f"  {pair.fact}: {differs}")
    if comparison.policies[0] != comparison.policies[1]:
        print_line(f"  measurement policy: {comparison.policies[0]} in {first}, {comparison.policies[1]} in {second}")
    changed = [f"{item.first.key}: {_answer(item.first)} -> {_answer(item.second)}" for item in comparison.changed]
    _print_lines(f"With another answer ({first} -> {second})", changed, most)
    for path, entries in ((first, comparison.only_first), (second, comparison.only_second)):
        _print_lines(f"Only in {path}", [f"{entry.key}: {_answer(entry)}" for entry in entries], most)


def _print_lines(title: str, lines: Sequence[str], most: int | None) -> None:
    if lines:
        print_line()
        print_line(title)
    for line in lines[:most]:
        print_line(f"  {line}")
    if most is not None and len(lines) > most:
        print_line(f"  and {len(lines) - most} more; --all shows them")


def _answer(entry: Entry) -> str:
    runner = "" if entry.runner == entry.key.runner else f"{entry.runner} "
    return f"{runner}{entry.tactic}" if entry.time_ms is None else f"{runner}{entry.tactic} at {_time(entry)}"


def _time(entry: Entry) -> str:
    return "not recorded" if entry.time_ms is None else f"{entry.time_ms * 1000:.1f} µs"


def _source_builtins(source: Source, show_all: bool) -> dict[str, Any]:
    return {
        "source": str(source.path),
        "kind": source.kind.name.lower(),
        "sections": [_section_builtins(section, show_all, _has_policy(source)) for section in source.sections],
        "problems": list(source.problems),
    }


def _section_builtins(section: Section, show_all: bool, has_policy: bool) -> dict[str, Any]:
    environment = section.environment
    return {
        "name": section.name,
        "environment": None if environment is None else environment_builtins(environment),
        "policy": section.policy.manifest_fields() if has_policy else None,
        "provenance": msgspec.to_builtins(section.provenance),
        "default_raced": section.default_raced,
        "entries": len(section.entries),
        "entries_without_extras": len(section.legacy),
        "lookups": len(section.lookups),
        "records": section.records,
        "runners": [msgspec.to_builtins(summary) for summary in summarise(section)],
        "pulled_from": dict(pulled_from(section)),
        "all": [_entry_builtins(entry) for entry in section.entries] if show_all else None,
        "problems": list(section.problems),
    }


def _entry_builtins(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key.text,
        "custom_op": entry.key.custom_op,
        "runner": entry.runner,
        "shapes": entry.key.profile,
        "tactic": tactic_json(entry.tactic),
        "policy": entry.policy,
        "time_ms": entry.time_ms,
    }


def _comparison_builtins(comparison: Comparison, first: Path, second: Path) -> dict[str, Any]:
    return {
        "first": str(first),
        "second": str(second),
        "facts": [msgspec.to_builtins(pair) for pair in comparison.facts],
        "policies": [policy.manifest_fields() for policy in comparison.policies],
        "same": comparison.same,
        "remeasured": comparison.remeasured,
        "changed": [
            {"first": _entry_builtins(item.first), "second": _entry_builtins(item.second)}
            for item in comparison.changed
        ],
        "only_first": [_entry_builtins(entry) for entry in comparison.only_first],
        "only_second": [_entry_builtins(entry) for entry in comparison.only_second],
    }
