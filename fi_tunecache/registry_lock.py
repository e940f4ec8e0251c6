"""A lock file: registries pinned to a commit, and the hashes of what may be read there.

Trust in a registry is trust in whoever can write to it. A fleet that has looked at what it pulls keeps
this file beside its other configuration; from then on anything else fails.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from msgspec import Struct

from .errors import FormatError, IntegrityError, UsageError
from .folder import Folder
from .hub_name import HubName
from .json_document import decode_json, naming
from .registry_tree import EMBEDDED, HUB_SCHEME, MAX_MANIFEST_BYTES, RegistryTree, absolute_path, is_path
from .selection import Selection

__all__ = ["LockedRegistry", "LockedTree", "RegistryLock", "lock_selection", "read_lock", "write_lock"]

_FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NEXT_STEP = "if that is meant, write a new lock with --lock"


class LockedRegistry(Struct, frozen=True):
    """``name`` holds the commit where it is on a Hub; ``manifests`` are sha256 by folder (None: it has none)."""

    name: str
    manifests: dict[str, str | None]


class RegistryLock(Struct, frozen=True):
    """Registries in order of precedence, and by folder the sha256 of the bundles that may be served."""

    registries: tuple[LockedRegistry, ...]
    bundles: dict[str, tuple[str, ...]]
    format: Annotated[int, msgspec.Meta(ge=1)] = _FORMAT

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(registry.name for registry in self.registries)

    def opener(self, opener: Callable[[str], RegistryTree]) -> Callable[[str], RegistryTree]:
        """Opens the registries of this lock, and of them hands out only what it holds."""
        locked = {registry.name: registry for registry in self.registries}
        return lambda name: LockedTree(opener(name), locked[name])

    def check(self, selection: Selection, folder: Folder) -> None:
        """Raises IntegrityError where a selection holds a bundle that is not in the lock."""
        allowed = self.bundles.get(str(folder), ())
        for bundle in selection.bundles:
            if bundle.sha256 not in allowed:
                raise IntegrityError(
                    f"the lock does not hold bundle {bundle.bundle_id} of {bundle.registry} for {folder}", _NEXT_STEP
                )

    def with_folder(self, other: RegistryLock) -> RegistryLock:
        """This lock with what another one holds too, if they pin the same registries; else the other one."""
        if self.names != other.names:
            return other
        bundles = dict(self.bundles)
        for folder, added in other.bundles.items():
            same = all(
                mine.manifests.get(folder) == its.manifests.get(folder)
                for mine, its in zip(self.registries, other.registries, strict=True)
            )
            bundles[folder] = tuple(sorted({*added, *(bundles.get(folder, ()) if same else ())}))
        return RegistryLock(
            registries=tuple(
                LockedRegistry(mine.name, {**mine.manifests, **its.manifests})
                for mine, its in zip(self.registries, other.registries, strict=True)
            ),
            bundles=bundles,
        )


def read_lock(data: bytes, *, source: str = "") -> RegistryLock:
    """Raises FormatError for anything but a lock of a format that we know."""
    document = decode_json(data, max_bytes=MAX_MANIFEST_BYTES, max_nesting=8, source=source)
    with naming(source):
        try:
            lock = msgspec.convert(document, RegistryLock)
        except msgspec.ValidationError as error:
            raise FormatError(f"not a lock ({error})", "write one with pull --lock") from None
        if lock.format > _FORMAT:
            raise FormatError(f"lock format {lock.format} is newer than {_FORMAT}", "upgrade fi-tunecache")
        pinned = [sha256 for registry in lock.registries for sha256 in registry.manifests.values() if sha256]
        pinned += [sha256 for bundles in lock.bundles.values() for sha256 in bundles]
        if not lock.registries or not all(map(_SHA256.fullmatch, pinned)):
            raise FormatError("names no registry, or holds what is no sha256", "write one with pull --lock")
        for name in lock.names:
            if not _is_pinned(name) or lock.names.count(name) > 1:
                raise FormatError(
                    f"{name[:120]!r} is no registry at a commit and no absolute path, or named twice",
                    "write one with pull --lock",
                )
    return lock


def _is_pinned(name: str) -> bool:
    try:
        if name.startswith(HUB_SCHEME):
            return HubName.parse(name).commit is not None
    except UsageError:
        return False
    return name == EMBEDDED or (is_path(name) and absolute_path(name) == name)


def write_lock(lock: RegistryLock) -> bytes:
    """The inverse of :func:`read_lock`; indented, so that a change shows line by line."""
    return msgspec.json.format(msgspec.json.encode(lock, order="sorted"), indent=1) + b"\n"


def lock_selection(selection: Selection, folder: Folder, opener: Callable[[str], RegistryTree]) -> RegistryLock:
    """Pin what a selection was made from. Reads the manifests again, at the revisions that it names.

    Raises
    ------
    UsageError
        A registry's manifest has changed since the selection was made.
    RegistryError, IntegrityError
        It can't be read.
    """
    registries = []
    for name, revision in selection.registries:
        pinned = str(HubName.parse(name).at(revision)) if name.startswith(HUB_SCHEME) and revision else name
        tree = opener(pinned)
        data = tree.read(f"{folder}/manifest.json", MAX_MANIFEST_BYTES)
        if tree.revision(folder) != revision:
            raise UsageError(f"{name} has changed meanwhile", "pull again")
        sha256 = None if data is None else hashlib.sha256(data).hexdigest()
        registries.append(LockedRegistry(pinned, {str(folder): sha256}))
    bundles = tuple(sorted(bundle.sha256 for bundle in selection.bundles))
    return RegistryLock(tuple(registries), {str(folder): bundles})


class LockedTree:
    """A tree that hands out only the manifests that a lock names. Bundles have their hashes in those."""

    def __init__(self, tree: RegistryTree, locked: LockedRegistry) -> None:
        self._tree = tree
        self._locked = locked

    @property
    def name(self) -> str:
        return self._tree.name

    @property
    def branch(self) -> str | None:
        return None

    def revision(self, folder: Folder) -> str | None:
        return self._tree.revision(folder)

    def folders(self) -> tuple[Folder, ...]:
        return tuple(folder for folder in self._tree.folders() if str(folder) in self._locked.manifests)

    def read(self, path: str, limit: int) -> bytes | None:
        folder, _, file = path.rpartition("/")
        is_manifest = file == "manifest.json"
        if is_manifest and folder not in self._locked.manifests:
            raise IntegrityError(f"the lock holds nothing for {folder}", _NEXT_STEP, source=self.name)
        data = self._tree.read(path, limit)
        if is_manifest:
            expected = self._locked.manifests[folder]
            actual = None if data is None else hashlib.sha256(data).hexdigest()
            if actual != expected:
                raise IntegrityError(
                    f"{path} is not the one in the lock",
                    _NEXT_STEP,
                    source=self.name,
                    expected=expected or "",
                    actual=actual or "",
                )
        return data

    def prefetch(self, paths: Iterable[str]) -> None:
        self._tree.prefetch(paths)

    def discard(self, path: str) -> bool:
        return self._tree.discard(path)

    def moved_on(self) -> bool:
        return False
