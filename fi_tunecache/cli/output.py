"""What commands print: lines and JSON by click, tables by rich, imported only when a table is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click
import msgspec

__all__ = ["plural", "print_json", "print_table"]


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
    Console(soft_wrap=False, highlight=False).print(table)


def plural(count: int, singular: str, many: str | None = None) -> str:
    """``1 entry``, ``2 entries``."""
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"
