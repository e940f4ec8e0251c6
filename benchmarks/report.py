"""The report of one run: the machine and the sections, as text and as Markdown."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from measurement import Row, Section
from msgspec import Struct

__all__ = ["Machine", "Report", "as_markdown", "as_text", "describe_machine"]

_PACKAGES = ("fi-tunecache", "msgspec", "click", "huggingface_hub", "torch")
_COLUMNS = ("", "median", "80 % of rounds", "ratio", "rounds", "target", "")


class Machine(Struct, frozen=True):
    """Where and when it was measured; ``load`` are the averages of a minute at the start and the end."""

    date: str
    processor: str
    cores: int
    system: str
    python: str
    versions: Mapping[str, str]
    load: tuple[float, float]


class Report(Struct, frozen=True, kw_only=True):
    """Everything that one run measured."""

    machine: Machine
    quick: bool
    sections: tuple[Section, ...]


def describe_machine(load_at_start: float) -> Machine:
    """This machine, at the end of the run."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    date = subprocess.run(["date", "-u", "+%Y-%m-%d %H:%M UTC"], stdout=subprocess.PIPE, text=True, check=True)
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return Machine(
        date=date.stdout.strip(),
        processor=models[0].partition(":")[2].strip() if models else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        versions=versions,
        load=(round(load_at_start, 2), round(os.getloadavg()[0], 2)),
    )


def as_text(report: Report) -> str:
    """Aligned columns."""
    lines = [_machine(report.machine)]
    for section in report.sections:
        table = [_COLUMNS, *map(_cells, section.rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(_COLUMNS))]
        lines += ["", section.title]
        for line in table:
            cells = [
                line[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:-1], strict=True)),
            ]
            lines.append("  ".join([*cells, line[-1]]).rstrip())
    return "\n".join(lines)


def as_markdown(report: Report) -> str:
    """A page with a table a section, the command at its top."""
    lines = [
        "# Benchmarks",
        "",
        "```\npython benchmarks/run.py --write\n```",
        "",
        f"{_machine(report.machine)} The machine was shared: other work ran on it meanwhile. What is compared took "
        "turns in one run, so ratios are worth more than times.",
    ]
    for section in report.sections:
        lines += ["", f"## {section.title}", "", section.about, ""]
        lines += [_markdown(_COLUMNS), _markdown(["---", *["---:"] * (len(_COLUMNS) - 2), "---"])]
        lines += [_markdown(_cells(row)) for row in section.rows]
    return "\n".join(lines) + "\n"


def _machine(machine: Machine) -> str:
    packages = ", ".join(f"{name} {release}" for name, release in machine.versions.items())
    return (
        f"{machine.date}; {machine.cores} cores of {machine.processor}, {machine.system}, load average "
        f"{machine.load[0]} at the start and {machine.load[1]} at the end; Python {machine.python}, {packages}."
    )


def _markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row) -> tuple[str, ...]:
    if row.value is None:
        return (row.what, *[""] * (len(_COLUMNS) - 2), row.note or "")
    target = ""
    if row.target is not None:
        target = f"≤ {row.target:g} {row.unit}: {'met' if row.met else 'missed'}"
    spread = "" if row.low is None or row.high is None else f"{_number(row.low)} to {_number(row.high)}"
    ratio = "" if row.ratio is None else f"{_number(row.ratio)}x"
    return (row.what, f"{_number(row.value)} {row.unit}", spread, ratio, str(row.rounds), target, row.note or "")


def _number(value: float) -> str:
    """Three significant digits, no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
