"""``fi-tunecache cache``."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import click

from ..errors import CacheError, FormatError, UsageError
from ..selection import read_selection
from ..store_root import find_store_root
from ..user_cache import CachedFile, UserCache
from ..wording import count_entries, plural
from ..workload_record import read_record
from .options import as_json
from .output import help_without_command, print_json, print_line, print_table

__all__ = ["command"]


@click.group("cache", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Show where the user cache is and what it holds, or empty it. FI_TUNECACHE_DIR moves it."""
    help_without_command(context)


@command.command("dir")
def show_directory() -> None:
    """Print the cache's directory. It need not exist yet."""
    click.echo(os.fsencode(UserCache.locate().root))


@command.command("list")
@as_json
def list_files(as_json: bool) -> None:
    """List bundles, selections and recorded workloads."""
    cache = _cache()
    files = cache.files()
    if as_json:
        print_json({"directory": str(cache.root), "files": [_builtins(file) for file in files]})
        return
    print_line(f"{plural(len(files), 'file')}, {sum(file.size for file in files):,} bytes in {cache.root}")
    if files:
        print_table(
            ("kind", "name", "bytes", "changed (UTC)", "what"),
            [
                (
                    file.kind,
                    file.path.name if file.kind == "hub" else file.path.name.partition(".")[0][:16],
                    f"{file.size:,}",
                    f"{_time(file):%Y-%m-%d %H:%M}",
                    _what(cache, file),
                )
                for file in files
            ],
            numbers=("bytes",),
            wrap=("what",),
        )


def _number(context: click.Context, option: click.Parameter, value: float) -> float:
    if math.isnan(value):  # which click's range lets through
        raise click.BadParameter("nan is not a number of days")
    return value


@command.command("prune")
@click.option(
    "--older-than",
    "days",
    type=click.FloatRange(min=0),
    callback=_number,
    default=30.0,
    show_default=True,
    metavar="DAYS",
    help="Remove what was not changed for so many days.",
)
@as_json
def prune(days: float, as_json: bool) -> None:
    """Remove old files, and what a killed process left. A running process keeps what it has read."""
    _report(_cache().prune(older_than=days * 86_400), as_json)


@command.command("clear")
@click.option(
    "--to",
    "destination",
    default="cache",
    metavar="cache|flashinfer|vllm",
    help="cache: the user cache (default). flashinfer, flashinfer:DIR, vllm: what `pull --to` has put into that "
    "managed store of FlashInfer, and nothing else of it.",
)
@as_json
def clear(destination: str, as_json: bool) -> None:
    """Remove every file of the cache, so that the next pull fetches again; or what was seeded elsewhere."""
    if destination == "cache":
        _report(_cache().clear(), as_json)
        return
    root = find_store_root(destination)
    if root is None:
        raise UsageError(f"--to {destination!r} names no managed store", "a file is yours to remove; see --help")
    _clear_store(root, as_json)


def _clear_store(root: Path, as_json: bool) -> None:
    from ..seeding import clear_store

    cleared = clear_store(root)
    entries = sum(count for _, count in cleared.removed)
    if as_json:
        environments = [{"path": str(path), "removed": count} for path, count in cleared.removed]
        print_json(
            {
                "root": str(cleared.root),
                "entries": entries,
                "environments": environments,
                "problems": list(cleared.problems),
            }
        )
        return
    if cleared.found:
        where = plural(len(cleared.removed), "environment")
        print_line(f"{count_entries(entries)} removed from {where} of {cleared.root}")
    else:
        print_line(f"0 entries removed: there is no managed store in {cleared.root}")
    for problem in cleared.problems:
        print_line(f"  {problem}")


def _cache() -> UserCache:
    cache = UserCache.locate()
    if cache.root.exists() and not cache.root.is_dir():
        raise CacheError(f"{cache.root} is not a directory", "set FI_TUNECACHE_DIR to one")
    return cache


def _report(removed: Sequence[CachedFile], as_json: bool) -> None:
    if as_json:
        print_json({"removed": [_builtins(file) for file in removed]})
    else:
        print_line(f"{plural(len(removed), 'file')} removed, {sum(file.size for file in removed):,} bytes")


def _builtins(file: CachedFile) -> dict[str, object]:
    return {"kind": file.kind, "path": str(file.path), "bytes": file.size, "changed": _time(file).isoformat()}


def _time(file: CachedFile) -> datetime:
    return datetime.fromtimestamp(file.modified, timezone.utc)


def _what(cache: UserCache, file: CachedFile) -> str:
    if file.path.suffix == ".corrupt":
        return "damaged, set aside"
    if file.path.name.endswith(".resolution.json"):
        return "its reasons"
    try:
        if file.kind == "workloads":
            record = read_record(cache.read(file.path) or b"")
            return f"{record.workload}, {plural(len(record.lookups), 'lookup')}"
        if file.kind != "selections":
            return ""
        selection = read_selection(cache.read(file.path) or b"")
    except FormatError:
        return "damaged"
    names = ", ".join(name for name, _ in selection.registries)
    return (
        f"{count_entries(selection.entries)} for {selection.gpu}, flashinfer {selection.flashinfer_version} "
        f"({selection.level}) from {names}"
    )
