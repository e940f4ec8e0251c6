"""The file behind ``pull --lock`` and ``--locked``."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..atomic_file import write_atomic
from ..errors import FormatError, UsageError
from ..registry_lock import RegistryLock, read_lock, write_lock
from ..registry_tree import MAX_MANIFEST_BYTES

__all__ = ["read_lock_file", "write_lock_file"]


def read_lock_file(path: Path) -> tuple[RegistryLock, str]:
    """A lock, and the sha256 of its file. Raises UsageError where there is none, FormatError where it is none."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror})", "make it with pull --lock") from error
    return read_lock(data, source=str(path)), hashlib.sha256(data).hexdigest()


def write_lock_file(path: Path, lock: RegistryLock) -> None:
    """Write a lock, together with what the file holds of the same commits for other versions and devices.

    Raises UsageError where the file is there and no lock, CacheError where it can't be written.
    """
    if path.exists():
        try:
            lock = read_lock_file(path)[0].with_folder(lock)
        except FormatError:
            raise UsageError(f"{path} is there and not a lock", "name another file") from None
    write_atomic(path, write_lock(lock), advice="choose another file with --lock")
