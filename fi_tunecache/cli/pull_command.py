"""``fi-tunecache pull``."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct

from ..atomic_file import write_atomic
from ..environment import Environment
from ..errors import CacheError, HardwareError, UsageError
from ..retrieval import Pulled, pull
from ..target import Target
from ..user_cache import UserCache
from ..wording import count_entries, plural
from .options import (
    as_json,
    environment_options,
    match_options,
    note,
    registry_option,
    request_from,
    target_from,
    user_cache,
)
from .output import environment_builtins, other_level_line, print_json, print_line

__all__ = ["command"]

_ANOTHER_FILE = "choose another file with --to"


class _StampedMetadata(Struct, frozen=True):
    fi_tunecache: dict[str, Any]


class _Stamped(Struct, frozen=True):
    metadata: _StampedMetadata = msgspec.field(name="_metadata")
    generation: str | None = msgspec.field(name="_generation", default=None)


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
    metavar="cache|FILE",
    help="cache: the user cache alone (default); FILE: also a v1 file that FlashInfer in this environment loads.",
)
@click.option("--force", is_flag=True, help="Replace FILE even if pull did not make it.")
@click.option("--offline", is_flag=True, help="Use what is cached without asking a registry whether it is current.")
@environment_options
@match_options
@registry_option
@as_json
def command(destination: str, force: bool, offline: bool, as_json: bool, **arguments: Any) -> int:
    """Get the tuned entries that are valid for an environment.

    They are taken from the embedded registry unless --registry or FI_TUNECACHE_REGISTRY names
    others. Exit code 3 if nothing fits, 4 if a registry can't be read, 5 if its data is damaged.
    """
    started = time.perf_counter()
    target = target_from(arguments)
    request = request_from(target, arguments)
    file = None if destination == "cache" else _output_file(destination, target, force=force)
    with user_cache() as cache:
        pulled = pull(request, cache=cache, offline=offline)
    if pulled.not_stored is not None:
        if file is None:
            raise CacheError(pulled.not_stored, "or write a file with --to FILE")
        note(f"not kept in the cache: {pulled.not_stored}")
    if file is not None:
        from ..materialisation import stamped

        data = stamped(pulled.selection, pulled.data, target.environment)
        write_atomic(Path(os.path.realpath(file)), data, advice=_ANOTHER_FILE)
    stored = None if pulled.not_stored else cache.selection_path(pulled.selection.id)
    milliseconds = (time.perf_counter() - started) * 1000
    reasons = _reasons(pulled, cache)
    if as_json:
        print_json(_builtins(pulled, target, reasons, stored, file))
    else:
        _print(pulled, target, reasons, stored, file, milliseconds)
    return 0


def _output_file(destination: str, target: Target, *, force: bool) -> Path:
    if destination in ("", "flashinfer"):
        problem = "is not there yet" if destination else "names no file"
        raise UsageError(f"--to {destination!r} {problem}", "use --to FILE, such as --to tuned.json")
    if missing := target.environment.undetermined():
        reasons = "; ".join(f"{fact}: {target.reason(fact).partition('; ')[0]}" for fact in missing)
        raise HardwareError(
            f"FlashInfer would ignore a file that lacks a fact ({reasons})",
            f"give it with --fact {missing[0]}=VALUE, or all with --environment FILE or --like",
        )
    file = Path(destination)
    _require_full_fingerprint(target.environment)
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        return file
    except OSError as error:
        raise CacheError(f"{destination} can't be written ({error.strerror})", _ANOTHER_FILE) from error
    if not stat.S_ISREG(mode):  # such as a directory, /dev/null or a pipe: it would be replaced
        raise UsageError(f"{destination} is there and not a file", "name a new file, such as tuned.json")
    if not force and not _is_stamped(file):
        raise UsageError(
            f"{destination} is there and holds something else than an unchanged file of ours",
            "name another file, or replace it with --force",
        )
    return file


def _is_stamped(file: Path) -> bool:
    """Whether a file is one that pull made and nobody has added to (FlashInfer adds ``_generation``)."""
    try:
        header = msgspec.json.decode(file.read_bytes(), type=_Stamped)
    except (OSError, msgspec.DecodeError, RecursionError):
        return False
    return "selection" in header.metadata.fi_tunecache and header.generation is None


def _require_full_fingerprint(environment: Environment) -> None:
    """Raises UsageError for a fingerprint in the short form that is compared, where FlashInfer stamps a longer one."""
    from ..wheel_facts import is_whole_fingerprint

    if not is_whole_fingerprint(environment.raw("flashinfer_version"), environment.raw("cutlass_dsl_version") or ""):
        raise UsageError(
            f"cutlass_dsl_version is not what FlashInfer {environment.flashinfer_version} stamps, which has hashes",
            "take it from `fi-tunecache env --json` on the machine that serves",
        )


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
    names = ", ".join(name if revision is None else f"{name}@{revision[:7]}" for name, revision in selection.registries)
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
        if target.described:
            print_line(f"It loads only where FlashInfer computes the same facts ({target.origin}).")
            if environment.cutlass_dsl_version != environment.fact("cutlass_dsl_version"):
                print_line(
                    f"For flashinfer {environment.flashinfer_version} they contain that machine's torch and virtual "
                    "environment path: to serve elsewhere, pull there."
                )


def _builtins(
    pulled: Pulled, target: Target, reasons: _Reasons | None, stored: Path | None, file: Path | None
) -> dict[str, Any]:
    selection = pulled.selection
    return {
        "selection": selection.id,
        "path": None if stored is None else str(stored),
        "file": None if file is None else str(file),
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
