"""Write bundles into a registry that is a directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fi_tunecache.atomic_file import write_atomic
from fi_tunecache.bundle import Bundle, read_bundle, write_bundle
from fi_tunecache.errors import UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import (
    BundleRow,
    Manifest,
    RegistryDescriptor,
    describe_bundle,
    read_manifest,
    write_descriptor,
    write_manifest,
)
from fi_tunecache.registry import Registry
from fi_tunecache.registry_tree import DESCRIPTOR, DirectoryTree

__all__ = ["add_bundles"]

_ADVICE = "check that the registry's directory can be written"


def add_bundles(root: Path, name: str, bundles: Sequence[Bundle]) -> list[BundleRow]:
    """Add bundles to the registry below ``root``, which is made if there is none.

    Each bundle is read back from its bytes before anything is written, so what is added keeps
    the rules. Adding the same bundle again changes nothing. Bundles are written before the
    manifest that names them: a reader never sees a row without its file. Does not lock the
    registry: of two publishers at one time, one may lose its rows.

    Returns
    -------
    list
        The rows of the bundles, in their order.

    Raises
    ------
    FormatError
        A bundle breaks a rule, or ``root`` holds a registry that can't be read or is of a newer
        format. Nothing is written then.
    UsageError
        No folder can have a bundle's version or device; nothing is written.
    CacheError
        The registry can't be written.
    """
    registry = Registry(DirectoryTree(root))
    rows: list[BundleRow] = []
    added: dict[Folder, dict[str, tuple[BundleRow, bytes]]] = {}
    for bundle in bundles:
        data, sha256 = write_bundle(bundle)
        if read_bundle(data) != bundle:
            raise UsageError("a bundle does not survive being written and read", "report this with the bundle")
        row = describe_bundle(bundle, data, sha256)
        rows.append(row)
        added.setdefault(Folder.of(bundle.environment), {})[row.file] = (row, data)

    files: dict[str, bytes] = {}
    if (root / DESCRIPTOR).exists():
        registry.descriptor()
    else:
        files[DESCRIPTOR] = write_descriptor(RegistryDescriptor(name))
    for folder, items in added.items():
        manifest = registry.manifest(folder)
        new = {file: item for file, item in items.items() if file not in {row.file for row in manifest.bundles}}
        if new:
            files.update({f"{folder}/{file}": data for file, (_, data) in new.items()})
            now = Manifest((*manifest.bundles, *(row for row, _ in new.values())))
            files[f"{folder}/manifest.json"] = write_manifest(now)
            read_manifest(files[f"{folder}/manifest.json"], folder)
    for path, data in files.items():
        write_atomic(root / path, data, advice=_ADVICE)
    return rows
