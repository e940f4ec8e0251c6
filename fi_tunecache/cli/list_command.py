"""``fi-tunecache list``."""

from __future__ import annotations

import os
from typing import Any

import click
import msgspec

from ..folder import Folder
from ..manifest import BundleRow
from ..registry import open_registry
from ..registry_tree import registry_names
from .options import as_json, registry_option
from .output import plural, print_json, print_table

__all__ = ["command"]


@click.command("list")
@click.argument("folder", required=False, metavar="[VERSION/DEVICE]")
@registry_option
@as_json
def command(folder: str | None, registries: tuple[str, ...], as_json: bool) -> None:
    """List the FlashInfer versions and devices that a registry has bundles for, and the bundles."""
    wanted = None if folder is None else Folder.parse(folder)
    found: list[tuple[str, Folder, BundleRow]] = []
    names = registry_names(registries, os.environ)
    for name in names:
        registry = open_registry(name)
        for place in registry.folders():
            if wanted in (None, place):
                found += [(name, place, row) for row in registry.manifest(place).bundles]
    if as_json:
        print_json({"registries": list(names), "bundles": [_builtins(*item) for item in found]})
        return
    if not found:
        click.echo(f"No bundles{'' if wanted is None else f' for {wanted}'} in {', '.join(names)}.")
        return
    print_table(
        f"{plural(len(found), 'bundle')} in {', '.join(names)}",
        ("flashinfer", "device", "bundle", "entries", "ops", "policy", "default raced", "ours/default", "created"),
        [_row(place, row) for _, place, row in found],
        numbers=("entries",),
    )


def _row(folder: Folder, row: BundleRow) -> tuple[object, ...]:
    benefit = ", ".join(f"{op} {ratio:.2f}" for op, ratio in sorted(row.benefit.items()))
    raced = {True: "yes", False: "no", None: "not known"}[row.default_raced]
    return (
        folder.version,
        row.environment["gpu"],
        row.bundle_id + (" (yanked)" if row.yanked else ""),
        row.entry_count,
        ", ".join(sorted(row.entries)),
        str(row.measured_under),
        raced,
        benefit or "not measured",
        row.created,
    )


def _builtins(registry: str, folder: Folder, row: BundleRow) -> dict[str, Any]:
    described: dict[str, Any] = msgspec.to_builtins(row)
    return {
        "registry": registry,
        "folder": str(folder),
        "bundle": row.bundle_id,
        "entry_count": row.entry_count,
        **described,
    }
