"""The dynamic loader: where it would find a shared library, told without loading it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from .errors import HardwareError

__all__ = ["Loader", "file_version", "parse_cache", "read_cache", "read_loader"]

_ABI = {"x86_64": "libc6,x86-64", "ppc64": "libc6,64bit", "s390x": "libc6,64bit"}
"""How ``ldconfig -p`` marks libraries of this machine's 64-bit ABI; elsewhere ``libc6`` (CPython's ctypes/util.py)."""

_FULL_VERSION = re.compile(r"\.so\.(\d+)\.(\d+)\.(\d+)(\.\d+)*$")


class Loader(Struct, frozen=True):
    """Where ``dlopen`` looks for a plain file name: first ``directories``, then ``cache``.

    ``cache`` holds (file name, path) in the loader's order, or the reason why it could not be
    listed. The built-in default directories are not looked into: what is there is in the cache.
    """

    directories: tuple[str, ...] = ()
    cache: tuple[tuple[str, str], ...] | str = ()

    def find_in_directories(self, file_name: str) -> str | None:
        paths = (str(Path(directory, file_name)) for directory in self.directories)
        return next((path for path in paths if os.access(path, os.R_OK)), None)

    def find(self, file_name: str) -> str | None:
        """The path that ``dlopen(file_name)`` opens, or None. Raises HardwareError if the cache is unreadable."""
        found = self.find_in_directories(file_name)
        return found or next((path for name, path in self._entries() if name == file_name), None)

    def find_library(self, stem: str) -> str | None:
        """The file name that ``ctypes.util.find_library(stem)`` takes from the cache, or None.

        Does not ask gcc and ld next, as it would: they can only name what dlopen does not find
        either, or what torch has loaded already.
        """
        return next((name for name, _ in self._entries() if name.startswith(f"lib{stem}.")), None)

    def _entries(self) -> tuple[tuple[str, str], ...]:
        if isinstance(self.cache, str):
            raise HardwareError(f"the loader's cache can't be listed: {self.cache}", "use --probe full")
        return self.cache


def file_version(path: str) -> tuple[int, int, int] | None:
    """Major, minor and patch from the name of the real file behind ``path`` (``libcublas.so.13.1.0.3``)."""
    match = _FULL_VERSION.search(os.path.realpath(path))
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def parse_cache(listing: str, machine: str) -> tuple[tuple[str, str], ...]:
    """Read ``ldconfig -p``: the libraries of this machine's ABI, in the loader's order."""
    abi = re.escape(_ABI.get(machine, "libc6"))
    return tuple(re.findall(rf"^\s+(\S+)\s+\({abi}[^)]*\) => (\S.*)$", listing, re.MULTILINE))


def read_loader(environ: Mapping[str, str], prefix: str = sys.base_prefix) -> Loader:
    """The loader as a process with ``environ`` meets it. Starts one ``ldconfig -p``; loads no library.

    ``prefix`` is Python's installation: a Conda one has its own ``lib`` in the interpreter's
    RPATH, before ``LD_LIBRARY_PATH``.
    """
    conda = [str(Path(prefix, "lib"))] if Path(prefix, "conda-meta").is_dir() else []
    named = environ.get("LD_LIBRARY_PATH", "")
    directories = [directory or "." for directory in re.split("[:;]", named)] if named else []
    ldconfig = shutil.which("ldconfig", path=os.pathsep.join(("/sbin", environ.get("PATH", os.defpath))))
    return Loader((*conda, *directories), read_cache(ldconfig))


def read_cache(ldconfig: str | None, timeout_s: float = 5) -> tuple[tuple[str, str], ...] | str:
    """The loader's cache as ``ldconfig -p`` lists it, or one line why it can't be listed."""
    if ldconfig is None:
        return "there is no ldconfig"
    try:
        listed = subprocess.run(
            [ldconfig, "-p"], env={"LC_ALL": "C"}, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if listed.returncode:
        return os.fsdecode(listed.stderr).strip() or f"ldconfig exited with {listed.returncode}"
    return parse_cache(os.fsdecode(listed.stdout), os.uname().machine)
