"""A change to a registry, apart from where the registry lies: rows to add or to yank, and the files that makes."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from fi_tunecache.errors import FormatError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import (
    BundleRow,
    Manifest,
    RegistryDescriptor,
    read_manifest,
    write_descriptor,
    write_manifest,
)
from fi_tunecache.registry_tree import DESCRIPTOR, RegistryTree

from .card import dataset_card
from .coverage_image import coverage_svg

__all__ = ["CARD", "COVERAGE", "Edit", "Snapshot", "files_to_write", "read_card"]

CARD = "README.md"
COVERAGE = "coverage.svg"
_MAX_CARD_BYTES = 4 * 1024 * 1024


class Edit(Struct, frozen=True):
    """``rows`` are added, or mark as yanked what is there (see :meth:`Manifest.with_rows`); ``files`` are the
    bytes of new bundles by path. Applying it twice, or in another order with others, gives the same rows.
    ``serials`` are those that the manifests must not be behind."""

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
        return not self.applied_to(manifests)

    def applied_to(self, manifests: Mapping[Folder, Manifest]) -> dict[Folder, Manifest]:
        """The manifests that it changes, as it leaves them."""
        changed = {}
        for folder, rows in self.rows.items():
            before = manifests.get(folder, Manifest())
            now = before.with_rows(rows, after=self.serials.get(folder, 0))
            if now is not before:
                changed[folder] = now
        return changed


class Snapshot(Struct, frozen=True):
    """A registry at one revision; ``revision`` is None where there is none yet."""

    revision: str | None
    manifests: Mapping[Folder, Manifest] = {}
    descriptor: RegistryDescriptor | None = None
    card: str | None = None


def read_card(tree: RegistryTree) -> str | None:
    """The card that is there. Raises FormatError where it is no text: what others wrote in it could not be kept."""
    data = tree.read(CARD, _MAX_CARD_BYTES)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        raise FormatError("not UTF-8 text", "save it as UTF-8", source=f"{tree.name}/{CARD}") from None


def files_to_write(edit: Edit, snapshot: Snapshot, title: str, address: str) -> dict[str, bytes]:
    """Everything that one commit must write, bundles before manifests; nothing where the edit is done already.

    ``title`` is what a new registry is called, ``address`` how its users name it.
    """
    changed = edit.applied_to(snapshot.manifests)
    if not changed and snapshot.descriptor is not None:
        return {}
    files: dict[str, bytes] = {}
    descriptor = snapshot.descriptor or RegistryDescriptor(title)
    if snapshot.descriptor is None:
        files[DESCRIPTOR] = write_descriptor(descriptor)
    for folder, manifest in changed.items():
        there = {row.file for row in snapshot.manifests.get(folder, Manifest()).bundles}
        new = [f"{folder}/{row.file}" for row in manifest.bundles if row.file not in there]
        files.update({path: edit.files[path] for path in new if path in edit.files})
    manifests = {**snapshot.manifests, **changed}
    files[COVERAGE] = coverage_svg(manifests)
    files[CARD] = dataset_card(address, descriptor, manifests, snapshot.card).encode()
    for folder, manifest in changed.items():
        data = write_manifest(manifest)
        read_manifest(data, folder)
        files[f"{folder}/manifest.json"] = data
    return files
