"""A registry: a tree of manifests and bundles, whose data is checked before anyone sees it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeVar

from .bundle import Bundle, read_bundle
from .errors import FormatError, IntegrityError, RegistryError
from .folder import Folder
from .manifest import BundleRow, Manifest, RegistryDescriptor, entry_counts, read_descriptor, read_manifest
from .registry_tree import DESCRIPTOR, MAX_MANIFEST_BYTES, RegistryTree, open_tree

__all__ = ["Registry", "check_bundle_bytes", "open_registry"]

_Read = TypeVar("_Read")


class Registry:
    """A registry whose manifests and bundles are checked before anyone sees them."""

    def __init__(self, tree: RegistryTree) -> None:
        self._tree = tree

    @property
    def name(self) -> str:
        return self._tree.name

    def revision(self, folder: Folder) -> str | None:
        """See :meth:`RegistryTree.revision`."""
        return self._tree.revision(folder)

    def folders(self) -> tuple[Folder, ...]:
        """See :meth:`RegistryTree.folders`."""
        return self._tree.folders()

    def descriptor(self) -> RegistryDescriptor:
        """``registry.json``. Raises RegistryError where there is none: this is not a registry."""
        data = self._tree.read(DESCRIPTOR, MAX_MANIFEST_BYTES)
        if data is None:
            raise RegistryError(f"{self.name} is not a registry: it has no {DESCRIPTOR}", "check the name or path")
        return read_descriptor(data, source=f"{self.name}/{DESCRIPTOR}")

    def manifest(self, folder: Folder) -> Manifest:
        """The manifest of a folder; empty if there is no such folder.

        Raises FormatError if it is malformed or of a newer format.
        """
        path = f"{folder}/manifest.json"

        def read() -> Manifest:
            data = self._tree.read(path, MAX_MANIFEST_BYTES)
            return Manifest() if data is None else read_manifest(data, folder, source=f"{self.name}/{path}")

        return self._sound(path, read)

    def prefetch(self, folder: Folder, rows: Iterable[BundleRow]) -> None:
        """Make ready for reading the bundles of these rows; a Hub gets them several at a time."""
        self._tree.prefetch(f"{folder}/{row.file}" for row in rows)

    def bundle_bytes(self, folder: Folder, row: BundleRow) -> bytes:
        """A bundle's bytes, which have the size and sha256 that the manifest names.

        Raises IntegrityError if they have not, or are missing.
        """
        source = f"{self.name}/{folder}/{row.file}"

        def read() -> bytes:
            data = self._tree.read(f"{folder}/{row.file}", row.size)
            if data is None:
                raise IntegrityError("the manifest names it, but it is missing", "tell the publisher", source=source)
            check_bundle_bytes(data, row, source)
            return data

        return self._sound(f"{folder}/{row.file}", read)

    def _sound(self, path: str, read: Callable[[], _Read]) -> _Read:
        """Read once more where what was read is damaged and it may have been a cache's fault."""
        try:
            return read()
        except FormatError:
            if not self._tree.discard(path):
                raise
        return read()

    def bundle(self, folder: Folder, row: BundleRow, data: bytes | None = None) -> Bundle:
        """The parsed bundle of a row; ``data`` are its verified bytes where they are at hand.

        Raises FormatError if it breaks a rule or was not tuned where its row says.
        """
        source = f"{self.name}/{folder}/{row.file}"
        bundle = read_bundle(self.bundle_bytes(folder, row) if data is None else data, source=source)
        decisive = {
            "environment": (bundle.environment, row.tuned_in),
            "policy": (bundle.policy, row.measured_under),
            "default_raced": (bundle.default_raced, row.default_raced),
            "created": (bundle.provenance.created, row.created),
            "entries": (entry_counts(bundle), row.entries),
        }
        if wrong := [name for name, (actual, said) in decisive.items() if actual != said]:
            raise FormatError(
                f"the manifest is wrong about its {', '.join(wrong)}", "tell the publisher", source=source
            )
        return bundle


def check_bundle_bytes(data: bytes, row: BundleRow, source: str) -> None:
    """Raises IntegrityError unless the bytes have the row's size and sha256."""
    if len(data) != row.size:
        raise IntegrityError(
            f"size is {len(data)} bytes, the manifest says {row.size}",
            "the file was changed; fetch it again or tell the publisher",
            source=source,
            expected=str(row.size),
            actual=str(len(data)),
        )
    actual = hashlib.sha256(data).hexdigest()
    if actual != row.sha256:
        raise IntegrityError(
            f"sha256 is {actual[:16]}…, the manifest says {row.sha256[:16]}…",
            "the file was changed; fetch it again or tell the publisher",
            source=source,
            expected=row.sha256,
            actual=actual,
        )


def open_registry(name: str) -> Registry:
    """The registry of that name; see :func:`~fi_tunecache.registry_tree.open_tree`."""
    return Registry(open_tree(name))
