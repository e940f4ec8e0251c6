"""A change to a registry, apart from where the registry lies: rows to add or to yank, and the files that makes."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from fi_tunecache.folder import Folder
from fi_tunecache.manifest import (
    BundleRow,
    Manifest,
    RegistryDescriptor,
    read_manifest,
    write_descriptor,
    write_manifest,
)
from fi_tunecache.registry_tree import DESCRIPTOR

from .card import dataset_card
from .coverage_image import coverage_svg

__all__ = ["CARD", "COVERAGE", "MAX_CARD_BYTES", "Edit", "Snapshot", "files_to_write"]

CARD = "README.md"
COVERAGE = "coverage.svg"
MAX_CARD_BYTES = 4 * 1024 * 1024


class Edit(Struct, frozen=True):
    """``rows`` are added, or mark as yanked what is there (see :meth:`Manifest.with_rows`); ``files`` are the
    bytes of new bundles by path. Applying it twice, or in another order with others, gives the same.
    ``serials`` are those that the changed manifests must be beyond."""

    rows: Mapping[Folder, tuple[BundleRow, ...]]
    files: Mapping[str, bytes] = {}
    serials: Mapping[Folder, int] = {}

    def with_manifests(self, manifests: Mapping[Folder, Manifest]) -> Edit:
        """This edit and all rows of manifests whose files are in the registry already."""
        rows, serials = dict(self.rows), dict(self.serials)
        for folder, manifest in manifests.items():
            rows[folder] = (*rows.get(folder, ()), *manifest.bundles)
            serials[folder] = max(serials.get(folder, 0), manifest.serial)
        return Edit(rows, self.files, serials)

    def done_in(self, manifests: Mapping[Folder, Manifest]) -> bool:
        """Whether manifests hold all of it."""
        return all(
            manifest.with_rows(rows) is manifest
            for folder, rows in self.rows.items()
            for manifest in (manifests.get(folder, Manifest()),)
        )


class Snapshot(Struct, frozen=True):
    """A registry at one revision; ``revision`` is None where there is none yet."""

    revision: str | None
    manifests: Mapping[Folder, Manifest] = {}
    descriptor: RegistryDescriptor | None = None
    card: str | None = None


def files_to_write(edit: Edit, snapshot: Snapshot, title: str) -> dict[str, bytes]:
    """Everything that one commit must write, bundles first, manifests last; nothing where the edit is done already.

    ``title`` names the registry in what is written.
    """
    files: dict[str, bytes] = {}
    manifests = dict(snapshot.manifests)
    for folder, rows in edit.rows.items():
        before = manifests.get(folder, Manifest())
        now = before.with_rows(rows, after=edit.serials.get(folder, 0))
        if now is not before:
            there = {row.file for row in before.bundles}
            new = [f"{folder}/{row.file}" for row in now.bundles if row.file not in there]
            files.update({path: edit.files[path] for path in new if path in edit.files})
            manifests[folder] = now
    if manifests == snapshot.manifests:
        return {}
    descriptor = snapshot.descriptor or RegistryDescriptor(title)
    if snapshot.descriptor is None:
        files[DESCRIPTOR] = write_descriptor(descriptor)
    files[COVERAGE] = coverage_svg(manifests)
    files[CARD] = dataset_card(title, descriptor, manifests, snapshot.card).encode()
    for folder in edit.rows:
        if manifests[folder] is not snapshot.manifests.get(folder):
            data = write_manifest(manifests[folder])
            read_manifest(data, folder)
            files[f"{folder}/manifest.json"] = data
    return files
