"""Where a publisher writes: a protocol of three methods, and what can go wrong in a way that is worth another try."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from fi_tunecache.errors import FiTuneCacheError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import Manifest
from fi_tunecache.registry_tree import RegistryTree

from .registry_edit import Snapshot

__all__ = ["StaleError", "Target", "UncertainError", "Written"]


class StaleError(Exception):
    """Somebody else has written meanwhile, or the target asks to wait; nothing was written.

    ``pause`` are seconds that the target asks for, None where it asks for none.
    """

    def __init__(self, error: FiTuneCacheError, pause: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.pause = pause


class UncertainError(Exception):
    """The target failed and may have written all the same: look before trying again."""

    def __init__(self, error: FiTuneCacheError) -> None:
        super().__init__(str(error))
        self.error = error


class Written(Struct, frozen=True):
    """The revision that holds what was written, and the pull request that was asked for."""

    revision: str
    pull_request: str | None = None


class Target(Protocol):
    """A registry that can be written."""

    @property
    def name(self) -> str:
        """As it was asked for, for messages."""

    @property
    def title(self) -> str:
        """What it is called in what is written."""

    @property
    def address(self) -> str:
        """How its users may name it, for the card; not where it lies on this machine."""

    @property
    def visibility(self) -> str:
        """For the question whether to write: that a repository will be made, and who can see it; else empty."""

    def snapshot(self) -> Snapshot:
        """The registry now. Raises FiTuneCacheError where it can't be read."""

    def manifests(self, revision: str, folders: Iterable[Folder]) -> Mapping[Folder, Manifest]:
        """The manifests of some folders at a revision, empty ones where there are none. Raises as :meth:`snapshot`."""

    def tree(self, snapshot: Snapshot) -> RegistryTree:
        """What a snapshot shows, to read from."""

    def write(self, files: Mapping[str, bytes], parent: Snapshot, message: str, *, create_pr: bool) -> Written:
        """Write all files or none, provided that the registry is still the parent.

        Raises StaleError where it is not, UncertainError, or FiTuneCacheError for what trying again won't mend.
        """

    def between(
        self, parent: Snapshot, revision: str, folders: Iterable[Folder]
    ) -> Sequence[Mapping[Folder, Manifest]]:
        """The manifests of some folders in every state that came between a parent and what was written on top of it.

        There is none unless the target let a stale write pass. Raises FiTuneCacheError where it can't tell.
        """
