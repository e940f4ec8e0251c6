"""``fi-tunecache pull``."""

from __future__ import annotations

import os
import shlex
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import Struct

from ..atomic_file import write_atomic
from ..errors import CacheError, NoMatchError, UsageError
from ..folder import Folder
from ..retrieval import Pulled, pull
from ..target import Target
from ..user_cache import UserCache
from ..wording import at_revision, count_entries, plural
from .destination import ANOTHER_FILE, find_destination
from .options import (
    as_json,
    environment_options,
    match_options,
    note,
    opening,
    registry_options,
    request_from,
    target_from,
    user_cache,
)
from .output import environment_builtins, other_level_line, print_json, print_line

if TYPE_CHECKING:
    from ..registry_lock import RegistryLock
    from ..seeding import Seeded

__all__ = ["command"]


class _Verdict(Struct, frozen=True):
    bundle: str
    taken: int


class _Dropped(Struct, frozen=True):
    bundle: str
    line: str


class _Reasons(Struct, frozen=True):
    """What is printed of a resolution, which on a hit is the file beside the selection."""

    bundles: tuple[_Verdict, ...] = ()
    dropped: tuple[_Dropped, ...] = ()

    @property
    def unused(self) -> int:
        return sum(not verdict.taken for verdict in self.bundles)


@click.command("pull")
@click.option(
    "--to",
    "destination",
    default="cache",
    metavar="cache|FILE|flashinfer|vllm",
    help="cache: the user cache alone (default). FILE: also a v1 file that FlashInfer in this environment loads. "
    "flashinfer: also what is missing in its managed store; flashinfer:DIR: in the one with that root. "
    "vllm: in the one that vLLM uses on one GPU (with several ranks it reads a v1 file for each, as SGLang always "
    "does; such files must not be placed by hand).",
)
@click.option("--force", is_flag=True, help="Replace FILE even if pull did not make it.")
@click.option(
    "--lock",
    "lock_to",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also pin what was pulled from: registries, commits, hashes. What FILE pins of the same commits stays.",
)
@click.option(
    "--locked",
    "lock_from",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Pull what FILE pins and nothing else; its registries are used. Exit code 5 for anything else.",
)
@click.option("--allow-rollback", is_flag=True, help="Take a manifest that is older than one seen before.")
@environment_options
@match_options
@registry_options
@as_json
def command(
    destination: str,
    force: bool,
    lock_to: Path | None,
    lock_from: Path | None,
    allow_rollback: bool,
    timeout: float,
    offline: bool,
    as_json: bool,
    **arguments: Any,
) -> int:
    """Get the tuned entries that are valid for an environment.

    They are taken from the embedded registry unless --registry or FI_TUNECACHE_REGISTRY names
    others. Exit code 3 if nothing fits, 4 if a registry can't be read, 5 if its data is damaged.
    """
    started = time.perf_counter()
    with user_cache() as cache, opening(cache, timeout=timeout, offline=offline) as opener:
        lock, digest = _locked(lock_from, lock_to, arguments["registries"])
        if lock is not None:
            arguments["registries"] = lock.names
            opener = lock.opener(opener)
        target = target_from(arguments, opener)
        request = request_from(target, arguments, digest)
        root, file = find_destination(destination, target, request.policy, force=force)
        if lock_to is not None:
            from .lock_file import find_lock_file

            find_lock_file(lock_to)  # to refuse before anything is fetched
        accept = (lambda _: None) if lock is None else partial(lock.check, folder=Folder.of(request.environment))
        try:
            pulled = pull(
                request,
                cache=cache,
                opener=opener,
                offline=offline,
                deadline=timeout,
                allow_rollback=allow_rollback,
                accept=accept,
            )
        except NoMatchError:  # as after a yank: what an earlier pull has put elsewhere must not go on unnoticed
            if file is not None and file.exists():
                note(f"{file} stays as an earlier pull wrote it: remove it, or FlashInfer goes on loading it")
            if root is not None and root.exists():
                note(f"what was seeded before stays: `fi-tunecache cache clear --to {destination}` removes it")
            raise
        if lock_to is not None:
            from ..registry_lock import lock_selection
            from .lock_file import write_lock_file

            lock = lock_selection(pulled.selection, Folder.of(request.environment), opener)
            if lost := write_lock_file(lock_to, lock):
                note(f"{lock_to} pinned other commits; what it held for {', '.join(lost)} is no longer in it")
    if pulled.not_stored is not None:
        if root is None and file is None:
            raise CacheError(pulled.not_stored, "or write a file with --to FILE")
        note(f"not kept in the cache: {pulled.not_stored}")
    if file is not None:
        from ..materialisation import stamped

        data = stamped(pulled.selection, pulled.data, target.environment)
        write_atomic(Path(os.path.realpath(file)), data, advice=ANOTHER_FILE)
    seeded, left_out = None, 0
    if root is not None:
        from ..materialisation import store_entries
        from ..seeding import replaces_rivals, seed_store

        only_raced = not replaces_rivals(pulled.selection.flashinfer_version)
        entries = store_entries(pulled.selection, pulled.data, only_raced=only_raced)
        left_out = pulled.selection.entries - len(entries)
        seeded = seed_store(root, target.environment, request.policy, entries)
    stored = None if pulled.not_stored else cache.selection_path(pulled.selection.id)
    milliseconds = (time.perf_counter() - started) * 1000
    reasons = _reasons(pulled, cache)
    if as_json:
        print_json(_builtins(pulled, target, reasons, stored, file, seeded, left_out))
    else:
        _print(pulled, target, reasons, stored, file, milliseconds)
        if seeded is not None:
            _print_seeded(seeded, left_out, destination, target)
    return 0


def _locked(
    lock_from: Path | None, lock_to: Path | None, registries: tuple[str, ...]
) -> tuple[RegistryLock | None, str | None]:
    if lock_from is None:
        return None, None
    if lock_to is not None or registries:
        raise UsageError("--locked names the registries, and pins them already", "leave out --lock and --registry")
    from .lock_file import read_lock_file

    return read_lock_file(lock_from)


def _reasons(pulled: Pulled, cache: UserCache) -> _Reasons | None:
    if pulled.resolution is not None:
        from ..materialisation import resolution_builtins

        return msgspec.convert(resolution_builtins(pulled.resolution), _Reasons)
    try:
        return msgspec.json.decode(cache.read(cache.resolution_path(pulled.selection.id)) or b"", type=_Reasons)
    except (CacheError, msgspec.DecodeError):
        return None


def _print(
    pulled: Pulled,
    target: Target,
    reasons: _Reasons | None,
    stored: Path | None,
    file: Path | None,
    milliseconds: float,
) -> None:
    selection, environment = pulled.selection, target.environment
    names = ", ".join(at_revision(name, revision) for name, revision in selection.registries)
    print_line(
        f"{count_entries(selection.entries)} for {environment.gpu}, flashinfer "
        f"{environment.flashinfer_version} ({selection.level}) from {names} in {milliseconds:.0f} ms"
        f"{' (cached)' if pulled.hit else ''}"
    )
    raced = {
        True: "FlashInfer's default raced",
        False: "FlashInfer's default did not race",
        None: "not known whether FlashInfer's default raced",
    }
    for bundle in selection.bundles:
        entries = plural(bundle.entries, "entry", "entries")
        print_line(f"  bundle {bundle.bundle_id}: {entries} ({raced[bundle.default_raced]})")
        for dropped in reasons.dropped if reasons else ():
            if dropped.bundle == bundle.bundle_id:
                print_line(f"    {dropped.line}")
    if reasons is None:
        print_line("  What was dropped is not in the cache: `fi-tunecache resolve` tells it.")
    elif reasons.unused:
        print_line(f"  {plural(reasons.unused, 'other bundle')} not used: `fi-tunecache resolve` tells why.")
    other = selection.other_level
    print_line(other_level_line(selection.entries, other.level.value, other.entries, other.bundles))
    if stored is not None:
        print_line(f"Selection: {stored}")
    if file is not None:
        print_line(f'Wrote {file}; load it with flashinfer.autotune(False, cache="{file}")')
        _print_where(target, "It loads")


def _print_seeded(seeded: Seeded, left_out: int, destination: str, target: Target) -> None:
    print_line(f"Seeded {count_entries(seeded.seeded)} into {seeded.path}, where flashinfer.autotune_v2 looks")
    if left_out:
        print_line(
            f"  {left_out:,} left out: FlashInfer's default did not race for them, so it would tune them again, and "
            f"{target.environment.flashinfer_version} could go on serving them in the place of what it finds"
        )
    if seeded.kept:
        print_line(f"  {seeded.kept:,} kept: what FlashInfer has tuned itself for their op and shape stays")
    if seeded.skipped:
        print_line(f"  {seeded.skipped:,} skipped: seeded before")
    if seeded.outdated:
        print_line(
            f"  {count_entries(seeded.outdated)} seeded before and not in this selection: "
            f"`fi-tunecache cache clear --to {shlex.quote(destination)}` removes all that was seeded, then pull again"
        )
    if seeded.problems:
        print_line(f"  {plural(len(seeded.problems), 'problem')} in that folder, e.g. {seeded.problems[0]}")
    _print_where(target, "They are found")


def _print_where(target: Target, what: str) -> None:
    environment = target.environment
    if target.described:
        print_line(f"{what} only where FlashInfer computes the same facts ({target.origin}).")
        if environment.cutlass_dsl_version != environment.fact("cutlass_dsl_version"):
            print_line(
                f"For flashinfer {environment.flashinfer_version} they contain that machine's torch and virtual "
                "environment path: to serve elsewhere, pull there."
            )


def _builtins(
    pulled: Pulled,
    target: Target,
    reasons: _Reasons | None,
    stored: Path | None,
    file: Path | None,
    seeded: Seeded | None,
    left_out: int,
) -> dict[str, Any]:
    selection = pulled.selection
    return {
        "selection": selection.id,
        "path": None if stored is None else str(stored),
        "file": None if file is None else str(file),
        "store": None
        if seeded is None
        else {
            "path": str(seeded.path),
            "seeded": seeded.seeded,
            "kept": seeded.kept,
            "skipped": seeded.skipped,
            "outdated": seeded.outdated,
            "left_out": left_out,
            "problems": list(seeded.problems),
        },
        "hit": pulled.hit,
        "match": selection.level.value,
        "policy": selection.policy,
        "entries": selection.entries,
        "environment": environment_builtins(target.environment),
        "origin": target.origin,
        "registries": [{"name": name, "revision": revision} for name, revision in selection.registries],
        "bundles": [
            {
                "bundle": bundle.bundle_id,
                "sha256": bundle.sha256,
                "registry": bundle.registry,
                "entries": bundle.entries,
                "default_raced": bundle.default_raced,
            }
            for bundle in selection.bundles
        ],
        "unused_bundles": None if reasons is None else reasons.unused,
        "dropped": None if reasons is None else msgspec.to_builtins(reasons.dropped),
        "other_match": {
            "match": selection.other_level.level.value,
            "entries": selection.other_level.entries,
            "bundles": selection.other_level.bundles,
        },
    }
