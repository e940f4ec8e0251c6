"""A directory as a registry that can be written."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import filelock

from fi_tunecache.atomic_file import write_atomic
from fi_tunecache.bundle import Bundle, read_bundle, write_bundle
from fi_tunecache.deadline import Deadline
from fi_tunecache.errors import CacheError, FiTuneCacheError, RegistryError, UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import BundleRow, Manifest, describe_bundle, write_manifest
from fi_tunecache.registry import Registry
from fi_tunecache.registry_tree import DESCRIPTOR, DirectoryTree

from .commit import commit
from .registry_edit import Edit, Snapshot, read_card
from .target import StaleError, Written

__all__ = ["DirectoryTarget", "add_bundles"]

_ADVICE = "check that the registry's directory can be written"
_LOCK = ".fi-tunecache.lock"


class DirectoryTarget:
    """A registry below one directory, made if there is none.

    Publishers on machines that see the same file locks come one after the other. Readers take no lock: a bundle is
    written before the manifest that names it.
    """

    def __init__(
        self, root: Path, name: str | None = None, *, title: str | None = None, address: str | None = None
    ) -> None:
        self._root = root
        self._tree = DirectoryTree(root, name or str(root))
        last = root.resolve().name
        self.title = title or last
        self.address = address or f"./{last}"
        self.visibility = ""

    @property
    def name(self) -> str:
        return self._tree.name

    def snapshot(self) -> Snapshot:
        registry = Registry(self._tree)
        manifests = {folder: registry.manifest(folder) for folder in registry.folders()}
        descriptor = registry.descriptor() if (self._root / DESCRIPTOR).exists() else None
        digest = hashlib.sha256()
        for folder, manifest in manifests.items():
            digest.update(f"{folder}\n".encode() + write_manifest(manifest))
        return Snapshot(
            None if descriptor is None else digest.hexdigest()[:40],
            manifests,
            descriptor,
            read_card(self._tree),
        )

    def manifests(self, revision: str, folders: Iterable[Folder]) -> Mapping[Folder, Manifest]:
        registry = Registry(self._tree)
        return {folder: registry.manifest(folder) for folder in folders}

    def tree(self, snapshot: Snapshot) -> DirectoryTree:
        return self._tree

    def write(self, files: Mapping[str, bytes], parent: Snapshot, message: str, *, create_pr: bool) -> Written:
        if create_pr:
            raise UsageError(f"{self.name} is a directory: there are no pull requests", "leave out --create-pr")
        with self._lock():
            if self.snapshot() != parent:
                raise StaleError(RegistryError(f"{self.name}: somebody else has published meanwhile", "try again"))
            self._refuse_links_out(files)
            for path, data in files.items():
                write_atomic(self._root / path, data, advice=_ADVICE)
            return Written(self.snapshot().revision or "")

    def _refuse_links_out(self, files: Mapping[str, bytes]) -> None:
        root = self._root.resolve()
        for path in files:
            if not (root / path).resolve().is_relative_to(root):
                raise UsageError(f"{self.name}/{path} leads out of the registry", "remove the link")

    def between(
        self, parent: Snapshot, revision: str, folders: Iterable[Folder]
    ) -> Sequence[Mapping[Folder, Manifest]]:
        return ()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self._root / _LOCK, timeout=0.05):
                yield
        except filelock.Timeout:
            raise StaleError(RegistryError(f"{self.name} is being written by somebody else", "try again")) from None
        except FiTuneCacheError:  # some are OSErrors too
            raise
        except OSError as error:
            raise CacheError(f"{self._root} can't be written ({error.strerror})", _ADVICE) from error


def add_bundles(root: Path, title: str, bundles: Sequence[Bundle], *, address: str | None = None) -> list[BundleRow]:
    """Add bundles to the registry below ``root``, which is made under that title if there is none.

    ``address`` is how its users will name it, for its card.

    Each bundle is read back from its bytes before anything is written, so what is added keeps
    the rules. Adding the same bundle again changes nothing.

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
    ordered: list[BundleRow] = []
    rows: dict[Folder, tuple[BundleRow, ...]] = {}
    files: dict[str, bytes] = {}
    for bundle in bundles:
        data, sha256 = write_bundle(bundle)
        if read_bundle(data) != bundle:
            raise UsageError("a bundle does not survive being written and read", "report this with the bundle")
        row = describe_bundle(bundle, data, sha256)
        folder = Folder.of(bundle.environment)
        ordered.append(row)
        rows[folder] = (*rows.get(folder, ()), row)
        files[f"{folder}/{row.file}"] = data
    commit(DirectoryTarget(root, title=title, address=address), Edit(rows, files), "Add bundles", deadline=Deadline(60))
    return ordered
