"""What commands print: lines and JSON by click, tables by rich, imported only when a table is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click
import msgspec

__all__ = ["other_level_line", "plural", "print_json", "print_table"]


def print_json(value: Any) -> None:
    """One JSON document, indented, ending in a newline."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Iterable[str] = ()
) -> None:
    """A table that adapts to the terminal; ``numbers`` names the columns to align right."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    right = set(numbers)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # for a file or a pipe, don't fold as if it were a small terminal
    console.print(table)


def plural(count: int, singular: str, many: str | None = None) -> str:
    """``1 entry``, ``2 entries``."""
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"


def other_level_line(here: int, level: str, entries: int, bundles: int) -> str:
    """What the other match level would have given."""
    if entries == here:
        return f"--match {level} would give the same number of entries."
    return f"--match {level} would give {plural(entries, 'entry', 'entries')} of {plural(bundles, 'bundle')}."
