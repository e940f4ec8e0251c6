"""What commands print: lines and JSON by click, tables by rich, imported only when a table is drawn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..environment import Environment
from ..errors import UsageError
from ..wording import count_entries, plural

if TYPE_CHECKING:
    from rich.status import Status

__all__ = [
    "environment_builtins",
    "help_without_command",
    "other_level_line",
    "print_json",
    "print_line",
    "print_table",
    "progress",
]

_NARROWEST = 80


def help_without_command(context: click.Context) -> None:
    """Print a group's help where no command was named, which is wrong usage."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
        context.exit(UsageError.exit_code)


def print_json(value: Any) -> None:
    """One JSON document, indented, ending in a newline."""
    import json  # not msgspec: a path may hold bytes that are not UTF-8, for which it has no replacement

    click.echo(json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "replace"))


def print_line(text: object = "") -> None:
    """A line. What can't be printed is replaced: names come from outside and could drive the terminal."""
    click.echo(_printable(text))


def _printable(text: object) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def environment_builtins(environment: Environment) -> dict[str, str | None]:
    """The JSON form of an environment in every document: all facts, undetermined ones null."""
    return {name: environment.raw(name) for name in environment.names()}


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Iterable[str] = (), wrap: Iterable[str]
) -> None:
    """A table that adapts to the terminal, and is not folded in a file or a pipe.

    Parameters
    ----------
    numbers
        The columns to align right.
    wrap
        The columns that may be folded; the others must fit into 80 characters.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: Any = "right" if column in numbers else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column not in wrap)
    for row in rows:
        table.add_row(*(Text(_printable(cell)) for cell in row))
    console = Console(highlight=False)
    console.width = max(console.width, _NARROWEST) if console.is_terminal else 1_000_000
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip(), color=True)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows the last line it was told while work goes on, if the standard error is a terminal."""
    with contextlib.ExitStack() as stack:
        shown: list[Status] = []

        def say(line: str) -> None:
            if sys.stderr is None or not sys.stderr.isatty():  # it is None where it was closed
                return
            if not shown:
                from rich.console import Console

                shown.append(stack.enter_context(Console(stderr=True, highlight=False).status("", speed=0.5)))
            from rich.text import Text

            shown[0].update(Text(_printable(line)))

        yield say


def other_level_line(here: int, level: str, entries: int, bundles: int) -> str:
    """What the other match level would have given."""
    if here == entries == 0:
        return f"--match {level} would give nothing either."
    if entries == here:
        return f"--match {level} would give the same number of entries."
    if not entries:
        return f"--match {level} would give nothing."
    return f"--match {level} would give {count_entries(entries)} of {plural(bundles, 'bundle')}."
