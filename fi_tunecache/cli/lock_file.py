"""The file behind ``pull --lock`` and ``--locked``."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ..atomic_file import write_atomic
from ..errors import FormatError, UsageError
from ..registry_lock import RegistryLock, read_lock, write_lock
from ..registry_tree import MAX_MANIFEST_BYTES

__all__ = ["find_lock_file", "read_lock_file", "write_lock_file"]


def read_lock_file(path: Path) -> tuple[RegistryLock, str]:
    """A lock, and the sha256 of its file. Raises UsageError where there is none, FormatError where it is none."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror})", "make it with pull --lock") from error
    return read_lock(data, source=str(path)), hashlib.sha256(data).hexdigest()


def find_lock_file(path: Path) -> RegistryLock | None:
    """The lock that is there, to be added to. Raises UsageError where something else is, which must not be replaced."""
    if not path.exists():
        return None
    if not path.is_file():
        raise UsageError(f"{path} is there and not a file", "name a new file, such as fleet.lock")
    try:
        return read_lock_file(path)[0]
    except FormatError as error:
        problem = error.problem.removeprefix(f"{path}: ")
        raise UsageError(
            f"{path} is there and not a lock that can be added to ({problem})", "name another file"
        ) from None


def write_lock_file(path: Path, lock: RegistryLock) -> tuple[str, ...]:
    """Write a lock, together with what the file holds of the same commits for other versions and devices.

    Returns
    -------
    tuple
        The folders that it held before, of other commits, and holds no longer.

    Raises
    ------
    UsageError
        As :func:`find_lock_file`.
    CacheError
        It can't be written.
    """
    before = find_lock_file(path)
    now = lock if before is None else before.with_folder(lock)
    write_atomic(Path(os.path.realpath(path)), write_lock(now), advice="choose another file with --lock")
    return () if before is None else tuple(sorted(before.bundles.keys() - now.bundles.keys()))
