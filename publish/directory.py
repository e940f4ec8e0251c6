"""Write bundles into a registry that is a directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from fi_tunecache.atomic_file import write_atomic
from fi_tunecache.bundle import Bundle, read_bundle, write_bundle
from fi_tunecache.errors import UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import (
    BundleRow,
    Manifest,
    RegistryDescriptor,
    describe_bundle,
    write_descriptor,
    write_manifest,
)
from fi_tunecache.registry import Registry
from fi_tunecache.registry_tree import DirectoryTree

__all__ = ["add_bundles"]

_ADVICE = "check that the registry's directory can be written"


def add_bundles(root: Path, name: str, bundles: Sequence[Bundle]) -> list[BundleRow]:
    """Add bundles to the registry below ``root``, which is made if there is none.

    Each bundle is read back from its bytes before anything is written, so what is added keeps
    the rules. Adding the same bundle again changes nothing. Bundles are written before the
    manifest that names them: a reader never sees a row without its file.

    Returns
    -------
    list
        The rows of the bundles, in their order.
    """
    registry = Registry(DirectoryTree(root))
    rows: list[BundleRow] = []
    added: dict[Folder, list[tuple[BundleRow, bytes]]] = {}
    for bundle in bundles:
        data, sha256 = write_bundle(bundle)
        if read_bundle(data) != bundle:
            raise UsageError("a bundle does not survive being written and read", "report this with the bundle")
        row = describe_bundle(bundle, data, sha256)
        rows.append(row)
        added.setdefault(Folder.of(bundle.environment), []).append((row, data))

    descriptor = root / "registry.json"
    if not descriptor.exists():
        write_atomic(descriptor, write_descriptor(RegistryDescriptor(name)), advice=_ADVICE)
    for folder, items in added.items():
        manifest = registry.manifest(folder)
        known = {row.file for row in manifest.bundles}
        new = [(row, data) for row, data in items if row.file not in known]
        for row, data in new:
            write_atomic(root / str(folder) / row.file, data, advice=_ADVICE)
        if new:
            bundles_now = (*manifest.bundles, *(row for row, _ in new))
            changed: Manifest = msgspec.structs.replace(manifest, bundles=bundles_now)
            write_atomic(root / str(folder) / "manifest.json", write_manifest(changed), advice=_ADVICE)
    return rows
