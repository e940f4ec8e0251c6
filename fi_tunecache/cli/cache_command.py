"""``fi-tunecache cache``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

import click

from ..errors import FormatError
from ..selection import read_selection
from ..user_cache import CachedFile, UserCache
from .options import as_json
from .output import plural, print_json, print_table

__all__ = ["command"]


@click.group("cache")
def command() -> None:
    """Show where the user cache is and what it holds, or empty it. FI_TUNECACHE_DIR moves it."""


@command.command("dir")
def show_directory() -> None:
    """Print the cache's directory. It need not exist yet."""
    click.echo(UserCache.locate().root)


@command.command("list")
@as_json
def list_files(as_json: bool) -> None:
    """List bundles, selections and recorded workloads."""
    cache = UserCache.locate()
    files = cache.files()
    if as_json:
        print_json({"directory": str(cache.root), "files": [_builtins(file) for file in files]})
        return
    if not files:
        click.echo(f"{cache.root} is empty")
        return
    print_table(
        f"{plural(len(files), 'file')} in {cache.root}",
        ("kind", "name", "bytes", "changed (UTC)", "what"),
        [
            (file.kind, file.path.name, f"{file.size:,}", f"{_time(file):%Y-%m-%d %H:%M}", _what(cache, file))
            for file in files
        ],
        numbers=("bytes",),
    )


@command.command("prune")
@click.option(
    "--older-than",
    "days",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="DAYS",
    help="Remove what was not changed for so many days.",
)
@as_json
def prune(days: float, as_json: bool) -> None:
    """Remove old files, and what a killed process left. A running process keeps what it has read."""
    _report(UserCache.locate().prune(older_than=days * 86_400), as_json)


@command.command("clear")
@as_json
def clear(as_json: bool) -> None:
    """Remove every file of the cache. The next pull fetches again."""
    _report(UserCache.locate().clear(), as_json)


def _report(removed: Sequence[CachedFile], as_json: bool) -> None:
    if as_json:
        print_json({"removed": [_builtins(file) for file in removed]})
    else:
        click.echo(f"{plural(len(removed), 'file')} removed, {sum(file.size for file in removed):,} bytes")


def _builtins(file: CachedFile) -> dict[str, object]:
    return {"kind": file.kind, "path": str(file.path), "bytes": file.size, "changed": _time(file).isoformat()}


def _time(file: CachedFile) -> datetime:
    return datetime.fromtimestamp(file.modified, timezone.utc)


def _what(cache: UserCache, file: CachedFile) -> str:
    if file.kind != "selections" or file.path.name.endswith(".resolution.json"):
        return ""
    try:
        selection = read_selection(cache.read(file.path) or b"")
    except FormatError:
        return "damaged"
    names = ", ".join(name for name, _ in selection.registries)
    return f"{plural(selection.entries, 'entry', 'entries')}, {selection.level}, {names}"
