"""Where a registry's bytes come from: one small protocol, and the trees that are on this machine.

A tree only hands out bytes at one pinned revision. :class:`~fi_tunecache.registry.Registry` parses
and checks them, so that hostile data is dealt with in one place whatever the tree is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .deadline import Deadline
from .errors import IntegrityError, RegistryError, UsageError
from .folder import Folder

if TYPE_CHECKING:
    from .user_cache import UserCache

__all__ = [
    "COMMAND_DEADLINE",
    "DESCRIPTOR",
    "EMBEDDED",
    "HUB_SCHEME",
    "MAX_BUNDLE_BYTES",
    "MAX_MANIFEST_BYTES",
    "DirectoryTree",
    "RegistryTree",
    "absolute_path",
    "is_path",
    "open_tree",
    "registry_names",
]

EMBEDDED = "embedded"
HUB_SCHEME = "hf://"
COMMAND_DEADLINE = 60.0
"""Seconds that a command may spend on a Hub unless told otherwise."""

DESCRIPTOR = "registry.json"
MAX_BUNDLE_BYTES = 64 * 1024 * 1024
MAX_MANIFEST_BYTES = 16 * 1024 * 1024


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

    @property
    def branch(self) -> str | None:
        """What the revision follows, where it moves on by itself; None where it can't, or is under the user's hands."""

    def prefetch(self, paths: Iterable[str]) -> None:
        """Make ready for reading these paths soon."""

    def discard(self, path: str) -> bool:
        """Take notice that what was read at a path is damaged. Whether reading it again may give other bytes."""

    def moved_on(self) -> bool:
        """Ask what the branch is at now; whether that is another revision, which is read from then on."""


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
        try:
            versions = list(self._root.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except OSError as error:
            raise RegistryError(f"{self._name} can't be listed ({error.strerror})", "check its permissions") from error
        return tuple(sorted(folder for version in versions for folder in self._folders_of(version)))

    def _folders_of(self, version: Path) -> Iterator[Folder]:
        try:
            devices = [path.name for path in version.iterdir()] if version.is_dir() else []
        except OSError as error:
            raise RegistryError(f"{version} can't be listed ({error.strerror})", "check its permissions") from error
        for device in devices:
            with contextlib.suppress(UsageError):  # not ours: a registry may lie in a folder with other things
                folder = Folder(version.name, device)
                if (version / device / "manifest.json").is_file():
                    yield folder

    def read(self, path: str, limit: int) -> bytes | None:
        try:
            root = os.path.realpath(self._root, strict=True)
            file = Path(os.path.realpath(f"{root}/{path}", strict=True))
            if not file.is_relative_to(root):
                raise IntegrityError(f"{path} leads out of the registry", "remove the link", source=self._name)
            if not file.is_file():  # opening a pipe would wait for its writer
                raise RegistryError(f"{self._name}/{path} is not a file", "tell the registry's owner")
            with file.open("rb") as stream:
                data = stream.read(limit + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except RegistryError:
            raise
        except OSError as error:
            raise RegistryError(
                f"{self._name}/{path} can't be read ({error.strerror})", "check its permissions"
            ) from error
        if len(data) > limit:
            raise IntegrityError(
                f"{path} has more than {limit} bytes", "fetch it again or tell the publisher", source=self._name
            )
        return data

    @property
    def branch(self) -> str | None:
        return None

    def prefetch(self, paths: Iterable[str]) -> None:
        """Nothing to do: the files are here."""

    def discard(self, path: str) -> bool:
        return False

    def moved_on(self) -> bool:
        return False


def registry_names(given: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, ...]:
    """The registries in use, in order of precedence: given ones, else ``FI_TUNECACHE_REGISTRY``
    (separated by commas or spaces), else the embedded one. Paths are made absolute."""
    named = given or tuple(filter(None, re.split(r"[,\s]+", environ.get("FI_TUNECACHE_REGISTRY", ""))))
    return tuple(dict.fromkeys(absolute_path(name) if is_path(name) else name for name in named)) or (EMBEDDED,)


def is_path(name: str) -> bool:
    """Whether a registry's name is a path: one that starts with ``/``, ``./``, ``../`` or ``~/``."""
    return name.startswith(("/", "./", "../", "~/")) or name in (".", "..")


def absolute_path(name: str) -> str:
    """A path that means the same in every directory, since a selection is kept under it."""
    with contextlib.suppress(RuntimeError):  # ~ of a user without a home
        name = str(Path(name).expanduser())
    return os.path.abspath(name)  # noqa: PTH100 - Path.absolute keeps ".."


def open_tree(
    name: str,
    *,
    cache: UserCache | None = None,
    deadline: Deadline | None = None,
    offline: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> RegistryTree:
    """Find a registry by name: ``embedded``, a path (``/…``, ``./…``, ``../…``, ``~/…``) or
    ``hf://datasets/organisation/name[@revision]``.

    Of a path it reads whether there is a descriptor; a Hub is asked nothing yet.

    Parameters
    ----------
    cache, deadline, offline, progress
        For a Hub: where downloads are kept (default: the user's cache), until when it may be used
        (default: 60 seconds), whether it may be asked at all (HF_HUB_OFFLINE forbids it too), and who is
        told what is being fetched.

    Raises
    ------
    UsageError
        For any other name, among them a bare word: it could be a folder here or a name on a hub.
    RegistryError
        There is no registry at the path.
    """
    if name == EMBEDDED:
        return DirectoryTree(Path(import_module("fi_tunecache.manifests").__path__[0]), EMBEDDED)
    if name.startswith(HUB_SCHEME):
        from .hub import HubAccess, HubTree, hub_is_offline
        from .user_cache import UserCache

        access = HubAccess(
            cache or UserCache.locate(), deadline or Deadline(COMMAND_DEADLINE), offline or hub_is_offline(), progress
        )
        return HubTree(name, access)
    if not is_path(name):
        raise UsageError(
            f"{name[:80]!r} is not the name of a registry",
            f"use {HUB_SCHEME}datasets/organisation/name, a path that starts with / or ./, or 'embedded'",
        )
    tree = DirectoryTree(Path(absolute_path(name)), name)
    if tree.read(DESCRIPTOR, MAX_MANIFEST_BYTES) is None:
        raise RegistryError(f"{name} is not a registry: it has no {DESCRIPTOR}", "check the path")
    return tree
