"""A registry: a tree of manifests and bundles, read through one small protocol.

A :class:`RegistryTree` only hands out bytes at one pinned revision. :class:`Registry` parses and
checks them, so that hostile data is dealt with in one place whatever the tree is.
"""

from __future__ import annotations

import hashlib
import os
import re
from importlib import resources
from pathlib import Path
from typing import Protocol, runtime_checkable

from .bundle import Bundle, read_bundle
from .errors import FormatError, IntegrityError, RegistryError, UsageError
from .manifest import (
    MAX_MANIFEST_BYTES,
    BundleRow,
    Folder,
    Manifest,
    RegistryDescriptor,
    read_descriptor,
    read_manifest,
)

__all__ = ["EMBEDDED", "DirectoryTree", "Registry", "RegistryTree", "open_registry", "registry_names"]

EMBEDDED = "embedded"
_DESCRIPTOR = "registry.json"


@runtime_checkable
class RegistryTree(Protocol):
    """Bytes of a registry at one revision. Paths use ``/`` and were checked by the caller."""

    @property
    def name(self) -> str:
        """The registry as it was asked for, for messages."""

    def revision(self, folder: Folder) -> str | None:
        """What :meth:`read` serves for a folder, as short text; None if there is no such folder.

        Two equal revisions serve equal bytes.
        """

    def folders(self) -> tuple[Folder, ...]:
        """All folders, sorted by name; names that can't be a folder's are passed over."""

    def read(self, path: str, limit: int) -> bytes | None:
        """The bytes at a path, None if there are none.

        Raises RegistryError if they can't be read, and IntegrityError if they are more than
        ``limit`` bytes or lie outside the tree.
        """


class DirectoryTree:
    """A registry in a directory. Symbolic links are followed only while they stay inside it."""

    def __init__(self, root: Path, name: str | None = None) -> None:
        self._root = root
        self._name = name or str(root)

    @property
    def name(self) -> str:
        return self._name

    def revision(self, folder: Folder) -> str | None:
        data = self.read(f"{folder}/manifest.json", MAX_MANIFEST_BYTES)
        return None if data is None else hashlib.sha256(data).hexdigest()[:16]

    def folders(self) -> tuple[Folder, ...]:
        found = []
        try:
            for manifest in self._root.glob("*/*/manifest.json"):
                try:
                    found.append(Folder(manifest.parent.parent.name, manifest.parent.name))
                except UsageError:
                    continue  # not ours: a registry may lie in a folder with other things
        except OSError as error:
            raise RegistryError(f"{self._name}: can't be listed ({error.strerror})", "check its permissions") from error
        return tuple(sorted(found))

    def read(self, path: str, limit: int) -> bytes | None:
        try:
            root = self._root.resolve(strict=True)
            file = (root / path).resolve(strict=True)
            if not file.is_relative_to(root):
                raise IntegrityError(f"{path} leads out of the registry", "remove the link", source=self._name)
            with file.open("rb") as stream:
                data = stream.read(limit + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if isinstance(error, (IntegrityError, RegistryError)):
                raise
            raise RegistryError(f"{self._name}/{path} can't be read ({error.strerror})", "check it") from error
        if len(data) > limit:
            raise IntegrityError(f"{path} has more than {limit} bytes", "it can't be used", source=self._name)
        return data


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
        data = self._tree.read(_DESCRIPTOR, MAX_MANIFEST_BYTES)
        if data is None:
            raise RegistryError(f"{self.name} is not a registry: it has no {_DESCRIPTOR}", "check the name or path")
        return read_descriptor(data, source=f"{self.name}/{_DESCRIPTOR}")

    def manifest(self, folder: Folder) -> Manifest:
        """The manifest of a folder; empty if there is no such folder.

        Raises FormatError if it is malformed or of a newer format.
        """
        data = self._tree.read(f"{folder}/manifest.json", MAX_MANIFEST_BYTES)
        return Manifest() if data is None else read_manifest(data, folder, source=f"{self.name}/{folder}/manifest.json")

    def bundle_bytes(self, folder: Folder, row: BundleRow) -> bytes:
        """A bundle's bytes, which have the size and sha256 that the manifest names.

        Raises IntegrityError if they have not, or are missing.
        """
        source = f"{self.name}/{folder}/{row.file}"
        data = self._tree.read(f"{folder}/{row.file}", row.size)
        if data is None:
            raise IntegrityError("the manifest names it, but it is missing", "tell the publisher", source=source)
        check_bundle_bytes(data, row, source)
        return data

    def bundle(self, folder: Folder, row: BundleRow, data: bytes | None = None) -> Bundle:
        """The parsed bundle of a row; ``data`` are its verified bytes where they are at hand.

        Raises FormatError if it breaks a rule or was not tuned where its row says.
        """
        source = f"{self.name}/{folder}/{row.file}"
        bundle = read_bundle(self.bundle_bytes(folder, row) if data is None else data, source=source)
        if bundle.environment != row.tuned_in or bundle.policy != row.measured_under:
            raise FormatError("its environment or policy is not what the manifest says", source=source)
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


def registry_names(given: tuple[str, ...], environ: dict[str, str] | os._Environ[str]) -> tuple[str, ...]:
    """The registries in use, in order of precedence: given ones, else ``FI_TUNECACHE_REGISTRY``
    (separated by commas or spaces), else the embedded one."""
    named = given or tuple(filter(None, re.split(r"[,\s]+", environ.get("FI_TUNECACHE_REGISTRY", ""))))
    return tuple(dict.fromkeys(named)) or (EMBEDDED,)


def open_registry(name: str) -> Registry:
    """Open a registry by name: ``embedded``, or a path (``/…``, ``./…``, ``../…``, ``~/…``).

    Does not read anything but the descriptor.

    Raises
    ------
    UsageError
        For any other name, among them a bare word: it could be a folder here or a name on a hub.
    RegistryError
        If there is no registry at the path.
    """
    if name == EMBEDDED:
        with resources.as_file(resources.files("fi_tunecache.manifests")) as root:
            return Registry(DirectoryTree(root, EMBEDDED))
    if name.startswith(("/", "./", "../", "~/")) or name in (".", ".."):
        registry = Registry(DirectoryTree(Path(name).expanduser(), name))
        registry.descriptor()
        return registry
    raise UsageError(
        f"{name[:80]!r} is not the name of a registry", "use 'embedded' or a path that starts with / or ./"
    )
