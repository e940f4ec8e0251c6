"""``fi-tunecache list``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from ..errors import NoMatchError
from ..folder import Folder
from ..manifest import BundleRow
from ..registry import Registry
from ..registry_tree import registry_names
from ..wording import plural
from .options import as_json, note, opening, registry_options
from .output import print_json, print_line, print_table

__all__ = ["command"]


@click.command("list")
@click.argument("folder", required=False, metavar="[VERSION/DEVICE]")
@registry_options
@as_json
def command(folder: str | None, registries: tuple[str, ...], timeout: float, offline: bool, as_json: bool) -> int:
    """List the FlashInfer versions and devices that a registry has bundles for, and the bundles.

    Exit code 3 if it has none for VERSION/DEVICE, 4 if it can't be read, 5 if its data is damaged.
    """
    wanted = None if folder is None else Folder.parse(folder)
    names = registry_names(registries, os.environ)
    found: list[tuple[str, Folder, tuple[BundleRow, ...]]] = []
    with opening(None, timeout=timeout, offline=offline) as opener:
        for name in names:
            registry = Registry(opener(name))
            notices = list(registry.descriptor().notices)
            for place in registry.folders():
                if wanted in (None, place):
                    manifest = registry.manifest(place)
                    notices += manifest.notices
                    found.append((name, place, manifest.bundles))
            for notice in dict.fromkeys(notices):
                note(f"{name}: {notice}")
    if as_json:
        rows = [_builtins(name, place, row) for name, place, bundles in found for row in bundles]
        print_json({"registries": list(names), "bundles": rows})
        return 0 if found or wanted is None else NoMatchError.exit_code
    if wanted is not None and not found:
        raise NoMatchError(f"no bundles for {wanted} in {', '.join(names)}", "see all with `fi-tunecache list`")
    total = sum(len(bundles) for _, _, bundles in found)
    print_line(f"{plural(total, 'bundle')} in {', '.join(names)}")
    for name, place, bundles in found:
        print_line()
        _print_folder(place if len(names) == 1 else f"{name}: {place}", bundles)
    return 0


def _print_folder(title: object, bundles: Sequence[BundleRow]) -> None:
    gpus = ", ".join(dict.fromkeys(row.environment["gpu"] for row in bundles))
    print_line(f"{title} ({gpus or 'no bundles'})")
    print_table(
        ("bundle", "entries", "policy", "default raced", "created", "ops"),
        [
            (
                row.bundle_id,
                row.entry_count,
                row.measured_under,
                {True: "yes", False: "no", None: "not known"}[row.default_raced],
                row.created,
                ", ".join(sorted(row.entries)),
            )
            for row in bundles
        ],
        numbers=("entries",),
        wrap=("policy", "ops"),
    )
    for row in bundles:
        for op, ratio in sorted(row.benefit.items()):
            print_line(f"{row.bundle_id}: {op} takes {ratio:.2f} times the default's time")
        if row.yanked is not None:
            print_line(f"{row.bundle_id}: yanked on {row.yanked.date}, never used: {row.yanked.reason}")


def _builtins(registry: str, folder: Folder, row: BundleRow) -> dict[str, Any]:
    return {
        "registry": registry,
        "folder": str(folder),
        "bundle": row.bundle_id,
        "entry_count": row.entry_count,
        **{name: msgspec.to_builtins(getattr(row, name)) for name in row.__struct_fields__},
    }
