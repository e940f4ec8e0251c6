"""The user cache: verified bundles and selections on this machine.

Reading takes no lock, writes nothing and works on a read-only file system. Writers replace
a file in one step; a file lock saves them from doing the same work, but correctness never rests on it (``flock`` is a no-op
on some network file systems).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from .atomic_file import is_temporary, write_atomic
from .errors import CacheError, UsageError

__all__ = ["CachedFile", "UserCache"]

LOCK_TIMEOUT = 60.0
"""Seconds to wait for another process's work before doing it ourselves."""

_KINDS = ("bundles", "selections", "workloads", "hub", "locks")
_STALE_SECONDS = 3600.0
_ADVICE = "free space or fix its permissions, or set FI_TUNECACHE_DIR to a writable directory"


class CachedFile(Struct, frozen=True):
    """One file of the cache: its kind (the folder), path, size in bytes and time of its last change (Unix seconds)."""

    kind: str
    path: Path
    size: int
    modified: float


class UserCache:
    """The cache below one directory. Nothing is created until something is stored."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def locate(cls, environ: Mapping[str, str] = os.environ) -> UserCache:
        """``FI_TUNECACHE_DIR``, else ``fi-tunecache`` in the platform's cache directory.

        Raises UsageError if the variable is set to something that is no absolute path.
        """
        directory = environ.get("FI_TUNECACHE_DIR")
        if directory:
            root = Path(directory).expanduser()
            if not root.is_absolute():
                raise UsageError(f"FI_TUNECACHE_DIR={directory} is not an absolute path", "set it to one")
            return cls(root)
        import platformdirs  # costs a few milliseconds that a process with the variable set needs not pay

        return cls(platformdirs.user_cache_path("fi-tunecache"))

    def selection_path(self, selection_id: str) -> Path:
        return self.root / "selections" / f"{selection_id}.json"

    def resolution_path(self, selection_id: str) -> Path:
        return self.root / "selections" / f"{selection_id}.resolution.json"

    def bundle_path(self, sha256: str) -> Path:
        return self.root / "bundles" / f"{sha256}.json"

    def read(self, path: Path) -> bytes | None:
        """The bytes of a cached file; None if it is not there. Raises CacheError if it can't be read."""
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise CacheError(f"{path} can't be read ({error.strerror})", "fix it or set FI_TUNECACHE_DIR") from error

    def read_bundle(self, sha256: str) -> bytes | None:
        """A bundle's bytes, verified; None if it is not there. A damaged file is set aside, and is as if not there."""
        path = self.bundle_path(sha256)
        data = self.read(path)
        if data is None or hashlib.sha256(data).hexdigest() == sha256:
            return data
        self.set_aside(path)
        return None

    def store(self, path: Path, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file in one step; see :func:`~fi_tunecache.atomic_file.write_atomic`."""
        write_atomic(path, data, mode=mode, advice=_ADVICE)

    def store_bundle(self, sha256: str, data: bytes) -> None:
        """Keep a verified bundle, read-only; does nothing where it is kept already."""
        path = self.bundle_path(sha256)
        if not path.exists():
            self.store(path, data, mode=0o444)

    def set_aside(self, path: Path) -> Path | None:
        """Rename a damaged file so that it is never read again; None where that is not possible."""
        aside = path.with_name(f"{path.name}.corrupt")
        try:
            path.replace(aside)
        except OSError:
            return None
        return aside

    @contextlib.contextmanager
    def lock(self, name: str, timeout: float = LOCK_TIMEOUT) -> Iterator[bool]:
        """Hold the lock of that name; gives False, and goes on, where it can't be had in ``timeout`` seconds."""
        import filelock

        path = self.root / "locks" / f"{name}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(path, timeout=timeout)
            lock.acquire()
        except (OSError, filelock.Timeout):  # the work is done unlocked; storing will tell what is wrong
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def files(self) -> list[CachedFile]:
        """All files of the cache, sorted by kind and name. Locks and temporary files are not listed."""
        found = []
        for kind in _KINDS[:-1]:
            for path in sorted((self.root / kind).rglob("*")):
                if path.is_file() and not path.is_symlink() and not is_temporary(path.name):
                    status = path.stat()
                    found.append(CachedFile(kind, path, status.st_size, status.st_mtime))
        return found

    def prune(self, *, older_than: float, now: float | None = None) -> list[CachedFile]:
        """Remove files that were not changed for ``older_than`` seconds, and what a killed writer left.

        Returns what was removed. Locks are never deleted: a process may hold one.
        """
        now = time.time() if now is None else now
        removed = [file for file in self.files() if now - file.modified >= older_than]
        for file in removed:
            self._remove(file.path)
        for kind in _KINDS[:-1]:
            for path in (self.root / kind).rglob(".*.tmp"):
                if is_temporary(path.name) and now - path.stat().st_mtime >= _STALE_SECONDS:
                    self._remove(path)
        return removed

    def clear(self) -> list[CachedFile]:
        """Remove every file of the cache but its locks; returns what was removed."""
        return self.prune(older_than=float("-inf"))

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CacheError(f"{path} can't be removed ({error.strerror})", "fix its permissions") from error
