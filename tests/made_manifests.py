"""Manifest rows made by what they say, without the bundles behind them; and the registries that they make up."""

from __future__ import annotations

import hashlib
from typing import Any

import made

from fi_tunecache.device import Device
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import BundleRow, Manifest, Yank


def row(
    number: int = 0,
    version: str = "0.7.4",
    gpu: str = "NVIDIA H200",
    entries: int | dict[str, dict[str, int]] = 1,
    **fields: Any,
) -> BundleRow:
    """A row whose bundle is named by ``number``; a number of ``entries`` is of one op and runner."""
    sha256 = hashlib.sha256(f"{version} {gpu!r} {number}".encode()).hexdigest()
    said: dict[str, Any] = {
        "created": "2026-12-01",
        "environment": {**made.H200.metadata(), "flashinfer_version": version, "gpu": gpu},
        "entries": {"bf16_gemm": {made.CUDNN: entries}} if isinstance(entries, int) else entries,
        **fields,
    }
    return BundleRow(file=f"{sha256[:16]}.json", sha256=sha256, size=1, **said)


def yanked(number: int = 0, reason: str = "slow", date: str = "2026-12-02", **fields: Any) -> BundleRow:
    return row(number, yanked=Yank(reason, date), **fields)


def registry(*rows: BundleRow, slug: str | None = None) -> dict[Folder, Manifest]:
    """The manifests with these rows, each in its folder; ``slug`` names the folders where a GPU's name can't."""
    found: dict[Folder, Manifest] = {}
    for item in rows:
        folder = Folder(item.environment["flashinfer_version"], slug or Device(item.environment["gpu"]).slug)
        found[folder] = found.get(folder, Manifest()).with_rows([item])
    return found
