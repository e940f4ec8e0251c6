"""Files of a managed store: put there and taken away while FlashInfer does the same.

FlashInfer publishes an entry by renaming a file over its name, at any moment and without a lock
(``_atomic_write_json``, ``flashinfer/autotune_cache.py``, 0.7.0 to 0.7.4). So a new file is put only
where the name is free, in one step; and before one is removed it is taken aside and looked at once
more, since what is under a name may have changed since it was read.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from .atomic_file import is_temporary
from .managed_entry import MAX_ENTRY_BYTES

__all__ = ["create_files", "finish_what_was_left", "is_marked", "remove_file"]

_ASIDE = re.compile(r"\.(.+\.json)\.[0-9a-f]{16}\.aside")
"""What a file is called while it is looked at: FlashInfer reads only ``*.json``."""

_STALE_SECONDS = 3600.0


class _Marked(Struct):
    fi_tunecache: Any = None


def is_marked(data: bytes) -> bool:
    """Whether an entry's file has a mark of ours. What can't be read has none."""
    try:
        return msgspec.json.decode(data, type=_Marked).fi_tunecache is not None
    except (msgspec.DecodeError, RecursionError):
        return False


def create_files(files: Mapping[Path, bytes]) -> bool:
    """Publish new files, each as a whole, and all of them or none.

    Does nothing where one of the names is taken, be it by another process in this moment: what is there
    stays (only a process that publishes the same in this moment is no obstacle). On a file system
    without hard links a reader may, for a moment, see a part of a file. A process that is killed
    leaves at most temporary files, which nobody reads, and some of the new ones.

    Returns
    -------
    bool
        Whether they are published.

    Raises
    ------
    OSError
        The disk refuses; none is published.
    """
    if any(map(os.path.lexists, files)):
        return False
    temporaries = {path: path.with_name(f".{secrets.token_hex(8)}.tmp") for path in files}
    created: list[Path] = []
    try:
        for path, data in files.items():
            temporaries[path].write_bytes(data)
        for path, data in files.items():
            if _create(path, temporaries[path], data):
                created.append(path)
            elif not _holds(path, data):
                _take_back(created, files)
                return False
        return True
    except BaseException:
        _take_back(created, files)
        raise
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def _take_back(created: list[Path], files: Mapping[Path, bytes]) -> None:
    for path in created:
        remove_file(path, files[path].__eq__)


def _holds(path: Path, data: bytes) -> bool:
    with contextlib.suppress(FileNotFoundError):  # FlashInfer has discarded it already
        return _is_ours(path, data.__eq__)
    return False


def _create(path: Path, temporary: Path, data: bytes) -> bool:
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        return False
    except OSError:  # some file systems have no hard links
        return _create_in_place(path, data)
    return True


def _create_in_place(path: Path, data: bytes) -> bool:
    try:
        file = path.open("xb")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(data)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return True


def remove_file(path: Path, is_ours: Callable[[bytes], bool]) -> bool:
    """Remove a file if it is ours. Whatever else is under that name, also from this moment on, stays.

    A link, which is not followed, and what can't be read are not ours. If the process is killed,
    :func:`finish_what_was_left` puts back what was aside and is not ours.

    Returns
    -------
    bool
        Whether this call has removed it.

    Raises
    ------
    OSError
        It can't be removed.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.aside")
    try:
        if not _is_ours(path, is_ours):
            return False
        path.rename(aside)
    except FileNotFoundError:
        return False
    return _settle(aside, path, is_ours)


def finish_what_was_left(folder: Path) -> int:
    """Do what killed processes could not, in one folder: see what lies aside, remove old temporary files.

    Safe while such a process is still alive: both do the same, and it does no harm to do it twice.

    Returns
    -------
    int
        How many files with our mark were removed.

    Raises
    ------
    OSError
        The folder can't be read or changed.
    """
    removed = 0
    for path in list(folder.iterdir()):
        if (match := _ASIDE.fullmatch(path.name)) is not None:
            removed += _settle(path, folder / match[1], is_marked)
        elif is_temporary(path.name):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime > _STALE_SECONDS:
                    path.unlink()
    return removed


def _settle(aside: Path, path: Path, is_ours: Callable[[bytes], bool]) -> bool:
    """Remove what lies aside if it is ours, else put it back."""
    with contextlib.suppress(FileNotFoundError):  # another process has done it
        if _is_ours(aside, is_ours):
            aside.unlink()
            return True
        _put_back(aside, path, is_ours)
    return False


def _put_back(aside: Path, path: Path, is_ours: Callable[[bytes], bool]) -> None:
    """Give a file its name again, unless there is a newer one that is not ours."""
    try:
        path.hardlink_to(aside)
    except OSError:
        if not os.path.lexists(path):
            aside.rename(path)  # no hard links: then look and rename are two steps
            return
        if remove_file(path, is_ours):  # seeded in this moment
            _put_back(aside, path, is_ours)
            return
    aside.unlink(missing_ok=True)


def _is_ours(path: Path, is_ours: Callable[[bytes], bool]) -> bool:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_ENTRY_BYTES:
        return False
    try:
        return is_ours(path.read_bytes())
    except PermissionError:  # FlashInfer's own files are readable to their owner alone
        return False
