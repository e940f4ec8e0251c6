"""The user cache: verified bundles, selections and recorded workloads on this machine.

Reading takes no lock, writes nothing and works on a read-only file system. Writers replace a file
in one step; a file lock saves them from doing the same work, but correctness never rests on it
(``flock`` is a no-op on some network file systems).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from .atomic_file import is_temporary, write_atomic
from .errors import CacheError, FormatError, UsageError

__all__ = ["LOCK_TIMEOUT", "CachedFile", "UserCache"]

LOCK_TIMEOUT = 10.0
"""Seconds to wait for another process's work before doing it ourselves."""

MAX_CACHED_BYTES = 512 * 1024 * 1024
"""More than any selection: 100,000 entries are 25 MB."""

_KINDS = {
    "bundles": re.compile(r"[0-9a-f]{64}\.json(\.corrupt)?"),
    "selections": re.compile(r"[0-9a-f]{32}(\.resolution)?\.json(\.corrupt)?"),
    "branches": re.compile(r"[0-9a-f]{32}\.json(\.corrupt)?"),
    "workloads": re.compile(r"[0-9a-f]{32}\.json(\.corrupt)?"),
}
"""The folders and what we name files in them: nothing else is ever listed or removed."""

_Parsed = TypeVar("_Parsed")

_REPOSITORY = re.compile(r"datasets--[\w.-]+")
_STALE_SECONDS = 3600.0
_ADVICE = "free space or fix its permissions, or set FI_TUNECACHE_DIR to a writable directory"


class CachedFile(Struct, frozen=True):
    """One file of the cache: its kind (the folder), path, size in bytes and time of its last change (Unix seconds).

    What huggingface_hub keeps of one repository counts as one file of the kind ``hub``.
    """

    kind: str
    path: Path
    size: int
    modified: float


class UserCache:
    """The cache below one directory. Nothing is created until something is stored.

    ``notices`` collects what went wrong and was dealt with, a line each, for whoever reports it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.notices: list[str] = []

    def notice(self, line: str) -> None:
        """Take notice of something, once."""
        if line not in self.notices:
            self.notices.append(line)

    @classmethod
    def locate(cls, environ: Mapping[str, str] = os.environ) -> UserCache:
        """``FI_TUNECACHE_DIR``, else ``fi-tunecache`` in the platform's cache directory.

        Raises UsageError if the variable is set to something that is no absolute path, or is not
        set and this user has no home.
        """
        directory = environ.get("FI_TUNECACHE_DIR")
        said = f"FI_TUNECACHE_DIR={directory}" if directory else "the platform's cache directory"
        try:
            if directory:
                root = Path(directory).expanduser()
            else:
                import platformdirs  # costs a few milliseconds that a process with the variable set needs not pay

                root = platformdirs.user_cache_path("fi-tunecache")
        except RuntimeError:  # as is usual for a container's user
            raise UsageError(f"{said} needs a home, and there is none", "set FI_TUNECACHE_DIR to a path") from None
        if not root.is_absolute():
            raise UsageError(f"{said} is not an absolute path: {root}", "set FI_TUNECACHE_DIR to one")
        return cls(root)

    def selection_path(self, selection_id: str) -> Path:
        return self.root / "selections" / f"{selection_id}.json"

    def resolution_path(self, selection_id: str) -> Path:
        return self.root / "selections" / f"{selection_id}.resolution.json"

    def bundle_path(self, sha256: str) -> Path:
        return self.root / "bundles" / f"{sha256}.json"

    def branch_path(self, name: str) -> Path:
        return self.root / "branches" / f"{name}.json"

    def workload_path(self, workload_id: str) -> Path:
        return self.root / "workloads" / f"{workload_id}.json"

    @property
    def hub_path(self) -> Path:
        """The folder of huggingface_hub's own cache, private to us."""
        return self.root / "hub-cache"

    def read(self, path: Path) -> bytes | None:
        """The bytes of a cached file; None if it is not there.

        Raises CacheError if it can't be read, is larger than anything that is cached, or no regular file (a pipe
        would make whoever reads it wait).
        """
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
                status = os.fstat(stream.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_CACHED_BYTES:
                    raise CacheError(f"{path} is no file of ours", "remove it, or set FI_TUNECACHE_DIR")
                return stream.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except CacheError:
            raise
        except OSError as error:
            raise CacheError(f"{path} can't be read ({error.strerror})", "fix it or set FI_TUNECACHE_DIR") from error

    def read_parsed(self, path: Path, parse: Callable[[bytes], _Parsed]) -> _Parsed | None:
        """What a cached file holds; one that is damaged (then it is set aside) or can't be read is as if not there.

        ``parse`` raises FormatError for what is damaged; the notices tell it.
        """
        try:
            data = self.read(path)
            return None if data is None else parse(data)
        except CacheError as error:
            self.notice(str(error))
        except FormatError as error:
            self.set_aside(path, error.problem)
        return None

    def read_bundle(self, sha256: str) -> bytes | None:
        """A bundle's bytes, verified; None if it is not there, can't be read, or was damaged (and is set aside)."""
        path = self.bundle_path(sha256)
        try:
            data = self.read(path)
        except CacheError as error:
            self.notice(str(error))
            return None
        if data is None or hashlib.sha256(data).hexdigest() == sha256:
            return data
        self.set_aside(path, "its sha256 is not its name")
        return None

    def store(self, path: Path, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file in one step; see :func:`~fi_tunecache.atomic_file.write_atomic`."""
        write_atomic(path, data, mode=mode, advice=_ADVICE)

    def store_bundle(self, sha256: str, data: bytes) -> None:
        """Keep a verified bundle, read-only; does nothing where it is kept already."""
        path = self.bundle_path(sha256)
        with contextlib.suppress(OSError):  # storing will tell what is wrong
            if path.exists():
                return
        self.store(path, data, mode=0o444)

    def remove_bundle(self, sha256: str) -> None:
        """Remove a bundle, if it is there. Raises CacheError where it can't be removed."""
        self._remove(self.bundle_path(sha256))

    def remove_workload(self, workload_id: str) -> None:
        """Remove the record of a workload, if it is there. Raises CacheError where it can't be removed."""
        self._remove(self.workload_path(workload_id))

    def remove_selection(self, selection_id: str) -> bool:
        """Remove a selection and its reasons; whether there was one. Raises CacheError where it can't be removed."""
        path = self.selection_path(selection_id)
        there = path.exists()
        self._remove(path)
        self._remove(self.resolution_path(selection_id))
        return there

    def set_aside(self, path: Path, problem: str) -> None:
        """Rename a damaged file so that it is never read again, and take notice of it."""
        try:
            path.replace(path.with_name(f"{path.name}.corrupt"))
        except OSError as error:
            self.notice(f"{path} is damaged ({problem}) and can't be set aside ({error.strerror})")
        else:
            self.notice(f"{path} was damaged ({problem}); it is set aside as {path.name}.corrupt")

    @contextlib.contextmanager
    def lock(self, name: str, timeout: float = LOCK_TIMEOUT) -> Iterator[bool]:
        """Hold the lock of that name; gives False, and goes on, where it can't be had in ``timeout`` seconds."""
        import filelock

        path = self.root / "locks" / f"{name}.lock"
        with contextlib.ExitStack() as stack:
            held = False  # then the work is done unlocked; storing will tell what is wrong
            with contextlib.suppress(OSError, NotImplementedError):
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    stack.enter_context(filelock.FileLock(path, timeout=timeout))
                    held = True
                except filelock.Timeout:
                    self.notice(f"the lock {path} can't be had; going on without it")
            yield held

    def files(self) -> list[CachedFile]:
        """All files of the cache, sorted by kind and name. Locks and temporary files are not listed."""
        found = [file for file in self._walk() if not is_temporary(file.path.name)]
        return sorted(found, key=lambda file: (file.kind, file.path.name))

    def _walk(self) -> Iterator[CachedFile]:
        for kind, names in _KINDS.items():
            for path in self._children(self.root / kind):
                if names.fullmatch(path.name) or is_temporary(path.name):
                    with contextlib.suppress(FileNotFoundError):  # another process may remove it meanwhile
                        status = path.lstat()
                        if stat.S_ISREG(status.st_mode):
                            yield CachedFile(kind, path, status.st_size, status.st_mtime)
        for path in self._children(self.hub_path):
            if _REPOSITORY.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                yield _repository(path)

    def _children(self, folder: Path) -> list[Path]:
        """What is in a folder, sorted; a link to one is not followed."""
        try:
            return [] if folder.is_symlink() else sorted(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CacheError(f"{folder} can't be listed ({error.strerror})", "fix its permissions") from error

    def prune(self, *, older_than: float, now: float | None = None) -> list[CachedFile]:
        """Remove files that were not changed for ``older_than`` seconds, and what a killed writer left.

        Returns what was removed. Locks are never deleted: a process may hold one.
        """
        now = time.time() if now is None else now
        removed = []
        everything = older_than < 0
        for file in list(self._walk()):
            temporary = is_temporary(file.path.name)
            if file.kind == "branches" and not (temporary or everything):
                continue  # what was seen of a branch does not age: by it a rollback is noticed
            if now - file.modified >= (_STALE_SECONDS if temporary else older_than):
                self._remove(file.path)
                if not temporary:
                    removed.append(file)
        return removed

    def clear(self) -> list[CachedFile]:
        """Remove every file of the cache but its locks; returns what was removed."""
        return self.prune(older_than=float("-inf"))

    def _remove(self, path: Path) -> None:
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise CacheError(f"{path} can't be removed ({error.strerror})", "fix its permissions") from error


def _repository(path: Path) -> CachedFile:
    found = []
    for folder, _, names in os.walk(path):  # passes over what another process removes meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found.append(Path(folder, name).lstat())
    size = sum(status.st_size for status in found if stat.S_ISREG(status.st_mode))
    return CachedFile("hub", path, size, max((status.st_mtime for status in found), default=0.0))
