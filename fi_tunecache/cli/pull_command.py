"""``fi-tunecache pull``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from ..atomic_file import write_atomic
from ..errors import CacheError, UsageError
from ..retrieval import Pulled, pull
from ..target import Target
from ..user_cache import UserCache
from .options import as_json, environment_options, match_options, note, registry_option, request_from, target_from
from .output import other_level_line, plural, print_json

__all__ = ["command"]


@click.command("pull")
@click.option(
    "--to",
    "destination",
    default="cache",
    metavar="cache|FILE",
    help="cache: the user cache alone (default); FILE: also a v1 file that FlashInfer in this environment loads.",
)
@click.option("--offline", is_flag=True, help="Use what is cached without asking a registry whether it is current.")
@environment_options
@match_options
@registry_option
@as_json
def command(destination: str, offline: bool, as_json: bool, **arguments: Any) -> int:
    """Get the tuned entries that are valid for an environment.

    They are taken from the embedded registry unless --registry or FI_TUNECACHE_REGISTRY names
    others. Exit code 3 if nothing fits, 4 if a registry can't be read, 5 if its data is damaged.
    """
    started = time.perf_counter()
    target = target_from(arguments)
    request = request_from(target, arguments)
    file = None if destination == "cache" else _output_file(destination, target)
    cache = UserCache.locate()
    try:
        pulled = pull(request, cache=cache, offline=offline)
    finally:
        for notice in cache.notices:
            note(notice)
    if file is None and pulled.not_stored is not None:
        raise CacheError(pulled.not_stored, "or write a file with --to FILE")
    if pulled.not_stored is not None:
        note(f"not kept in the cache: {pulled.not_stored}")
    if file is not None:
        from ..materialisation import stamped

        write_atomic(
            file, stamped(pulled.selection, pulled.data, target.environment), advice="choose another file with --to"
        )
    stored = None if pulled.not_stored else cache.selection_path(pulled.selection.id)
    milliseconds = (time.perf_counter() - started) * 1000
    if as_json:
        print_json(_builtins(pulled, target, stored, file))
    else:
        _print(pulled, target, stored, file, milliseconds)
    return 0


def _output_file(destination: str, target: Target) -> Path:
    if destination == "flashinfer":
        raise UsageError("--to flashinfer is not there yet", "use --to FILE, or ./flashinfer for a file of that name")
    if missing := target.environment.undetermined():
        reasons = dict(target.undetermined)
        detail = "; ".join(f"{fact}: {reasons.get(fact, 'not given')}" for fact in missing)
        raise UsageError(
            f"can't write a file for FlashInfer, which ignores one that lacks a fact ({detail})",
            f"give it with --fact {missing[0]}=VALUE, or all with --environment FILE or --like",
        )
    file = Path(destination)
    if file.is_dir():
        raise UsageError(f"{destination} is a directory", "name a file, such as tuned.json")
    return file


def _print(pulled: Pulled, target: Target, stored: Path | None, file: Path | None, milliseconds: float) -> None:
    selection, environment = pulled.selection, target.environment
    names = ", ".join(name if revision is None else f"{name}@{revision[:7]}" for name, revision in selection.registries)
    click.echo(
        f"{plural(selection.entries, 'entry', 'entries')} for {environment.gpu}, flashinfer "
        f"{environment.flashinfer_version} ({selection.level}) from {names} in {milliseconds:.0f} ms"
        f"{' (cached)' if pulled.hit else ''}"
    )
    for bundle in selection.bundles:
        raced = {
            True: "the default raced",
            False: "the default did not race",
            None: "not known whether the default raced",
        }
        click.echo(
            f"  bundle {bundle.bundle_id}: {plural(bundle.entries, 'entry', 'entries')} ({raced[bundle.default_raced]})"
        )
    for dropped in pulled.resolution.dropped if pulled.resolution else ():
        click.echo(f"    {dropped}")
    other = selection.other_level
    click.echo(other_level_line(selection.entries, other.level.value, other.entries, other.bundles))
    if stored is not None:
        click.echo(f"Selection: {stored}")
    if file is not None:
        click.echo(f'Wrote {file}; load it with flashinfer.autotune(False, cache="{file}")')
        if target.described:
            click.echo(f"It loads only where FlashInfer computes the same facts ({target.origin}).")


def _builtins(pulled: Pulled, target: Target, stored: Path | None, file: Path | None) -> dict[str, Any]:
    selection = pulled.selection
    return {
        "selection": selection.id,
        "path": None if stored is None else str(stored),
        "file": None if file is None else str(file),
        "hit": pulled.hit,
        "match": selection.level.value,
        "policy": selection.policy,
        "entries": selection.entries,
        "environment": target.environment.metadata(),
        "origin": target.origin,
        "registries": [{"name": name, "revision": revision} for name, revision in selection.registries],
        "bundles": [msgspec.to_builtins(bundle) for bundle in selection.bundles],
        "other_match": {
            "match": selection.other_level.level.value,
            "entries": selection.other_level.entries,
            "bundles": selection.other_level.bundles,
        },
    }
