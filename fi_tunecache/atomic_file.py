"""Write a file in one step."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from .errors import CacheError

__all__ = ["is_temporary", "write_atomic"]

_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")


def write_atomic(path: Path, data: bytes, *, advice: str, mode: int = 0o644) -> None:
    """Replace a file by new bytes, making its folder if need be.

    Readers see the old bytes or the new ones, also after a crash: the bytes go into a unique
    temporary file in the same directory and reach the disk before the target is replaced.

    Parameters
    ----------
    advice
        The next step for whoever reads that it did not work.
    mode
        The file's permissions, less the umask.

    Raises
    ------
    CacheError
        The file can't be written; no part of it is left behind.
    """
    temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        where = "" if error.filename in (None, str(path), str(temporary)) else f": {error.filename}"
        raise CacheError(f"{path} can't be written ({error.strerror}{where})", advice) from error


def is_temporary(name: str) -> bool:
    """Whether a file's name is one that :func:`write_atomic` makes and a killed writer leaves."""
    return _TEMPORARY.fullmatch(name) is not None
