"""``fi-tunecache inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from ..entry import Entry
from ..inspection import Comparison, RunnerSummary, compare, summarise
from ..source import Section, Source, read_source
from .options import as_json
from .output import plural, print_json, print_table

__all__ = ["command"]


@click.command("inspect")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path), required=False)
@click.option("--all", "show_all", is_flag=True, help="Every entry, not only the ten first of each list.")
@as_json
def command(source: Path, second: Path | None, show_all: bool, as_json: bool) -> None:
    """Show what is in SOURCE: a v1 file, a managed store, a bundle, or a module bundled with FlashInfer.

    Given two, show what differs: facts, entries that only one has, entries with another answer.
    """
    first = read_source(source)
    if second is None:
        if as_json:
            print_json(_source_builtins(first))
        else:
            _print_source(first)
        return
    other = read_source(second)
    comparison = compare(first, other)
    if as_json:
        print_json(_comparison_builtins(comparison, source, second))
    else:
        _print_comparison(comparison, source, second, None if show_all else 10)


def _print_source(source: Source) -> None:
    click.echo(f"{source.path}: {source.kind.value}")
    for section in source.sections:
        click.echo()
        if len(source.sections) > 1:
            click.echo(f"Environment {section.name}")
        environment = section.environment
        for name in environment.names() if environment else ():
            click.echo(f"  {name}: {environment.raw(name) if environment else None}")
        click.echo(f"  measurement policy: {section.policy}")
        print_table(
            f"{plural(len(section.entries) + len(section.legacy), 'entry', 'entries')}, "
            f"{plural(len(section.lookups), 'recorded lookup')}",
            ("op", "runner", "entries", "shapes", "tactic -1", "time", "measured"),
            [_summary_row(summary) for summary in summarise(section)],
            numbers=("entries", "shapes", "tactic -1", "time"),
        )
        for problem in section.problems:
            click.echo(f"  problem: {problem}")
    for problem in source.problems:
        click.echo(f"problem: {problem}")


def _summary_row(summary: RunnerSummary) -> tuple[object, ...]:
    times = (
        ""
        if summary.fastest_ms is None
        else f"{summary.fastest_ms * 1000:.1f} to {(summary.slowest_ms or 0) * 1000:.1f} µs"
    )
    return (
        summary.custom_op,
        summary.runner,
        summary.entries,
        summary.shapes,
        summary.defaults,
        times,
        "; ".join(summary.policies),
    )


def _print_comparison(comparison: Comparison, first: Path, second: Path, most: int | None) -> None:
    click.echo(
        f"{plural(comparison.same, 'entry', 'entries')} in both, {len(comparison.changed)} with another answer, "
        f"{len(comparison.only_first)} only in {first}, {len(comparison.only_second)} only in {second}"
    )
    for fact in comparison.facts:
        click.echo(f"  {fact.fact}: {fact.registry or 'unknown'} in {first}, {fact.here or 'unknown'} in {second}")
    if comparison.changed:
        print_table(
            "With another answer",
            ("key", "first", "second", "times"),
            [
                (item.first.key, item.first.tactic, item.second.tactic, f"{_time(item.first)} / {_time(item.second)}")
                for item in comparison.changed[:most]
            ],
        )
    for title, entries in ((f"Only in {first}", comparison.only_first), (f"Only in {second}", comparison.only_second)):
        if entries:
            print_table(title, ("key", "tactic", "time"), [(e.key, e.tactic, _time(e)) for e in entries[:most]])
            if most is not None and len(entries) > most:
                click.echo(f"  and {len(entries) - most} more; --all shows them")


def _time(entry: Entry) -> str:
    return "not recorded" if entry.time_ms is None else f"{entry.time_ms * 1000:.1f} µs"


def _source_builtins(source: Source) -> dict[str, Any]:
    return {
        "source": str(source.path),
        "kind": source.kind.name.lower(),
        "sections": [_section_builtins(section) for section in source.sections],
        "problems": list(source.problems),
    }


def _section_builtins(section: Section) -> dict[str, Any]:
    environment = section.environment
    return {
        "name": section.name,
        "environment": None if environment is None else environment.metadata(),
        "policy": section.policy.manifest_fields(),
        "entries": len(section.entries),
        "entries_without_extras": len(section.legacy),
        "lookups": len(section.lookups),
        "records": section.records,
        "runners": [msgspec.to_builtins(summary) for summary in summarise(section)],
        "problems": list(section.problems),
    }


def _comparison_builtins(comparison: Comparison, first: Path, second: Path) -> dict[str, Any]:
    return {
        "first": str(first),
        "second": str(second),
        "facts": [{"fact": fact.fact, "first": fact.registry, "second": fact.here} for fact in comparison.facts],
        "same": comparison.same,
        "changed": [
            {
                "key": item.first.key.text,
                "first": {"tactic": item.first.tactic, "time_ms": item.first.time_ms},
                "second": {"tactic": item.second.tactic, "time_ms": item.second.time_ms},
            }
            for item in comparison.changed
        ],
        "only_first": [entry.key.text for entry in comparison.only_first],
        "only_second": [entry.key.text for entry in comparison.only_second],
    }
