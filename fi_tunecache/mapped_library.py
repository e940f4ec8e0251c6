"""The libraries that this process has mapped, which need not be those that a loader would find first."""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["mapped_cublas"]

_MAPS = Path("/proc/self/maps")


def mapped_cublas(maps: Path = _MAPS) -> str | None:
    """The version of the cuBLASLt that this process has mapped, as ``cublasLtGetVersion`` tells it (``130100``).

    None where it has mapped none, or several, or that can't be found out. Loads nothing.
    """
    try:
        mapped = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "/libcublasLt.so" in line}
        if len(mapped) != 1:
            return None
        function = ctypes.CDLL(mapped.pop()).cublasLtGetVersion
    except (OSError, AttributeError, ValueError):
        return None
    function.restype = ctypes.c_size_t
    return str(function())
