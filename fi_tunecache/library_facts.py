"""The cuBLAS and cuDNN versions that FlashInfer would report, told without loading either.

FlashInfer imports torch first, so a library that torch has mapped answers to its SONAME
(``libcublas.so.13``), while a plain ``libcublas.so`` is always searched for anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from .errors import HardwareError
from .loader import Loader, file_version
from .wheel_facts import Wheel, normalize

__all__ = ["cublas_version", "cudnn_version"]

_Version: TypeAlias = tuple[int, int, int]
_CUDNN_SONAMES = ("libcudnn.so.8", "libcudnn.so.9", "libcudnn.so.10")
_FULL = "use --probe full"
_WHEEL_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


def cublas_version(wheels: Sequence[Wheel], loader: Loader, cuda_version: str | None, torch_folder: Path | None) -> str:
    """``major.minor.patch`` of the cuBLAS that FlashInfer's ``_get_cublas_version`` would find.

    In its order: the plain names by the loader, then the SONAMEs that ctypes finds, then the
    ``nvidia-cublas*`` wheel whose name sorts last (0.7.0 to 0.7.4, ``flashinfer/autotuner/autotuner.py``).
    Its last resort, a guess from the CUDA version, says nothing about cuBLAS and is left out.

    Parameters
    ----------
    wheels, loader
        What is installed, and where libraries are found.
    cuda_version, torch_folder
        Of the installed torch; None where there is none, or it has no CUDA.

    Raises
    ------
    HardwareError
        No cuBLAS is found, or the name of its file does not tell its full version.
    """
    for file_name in ("libcublas.so", "libcublasLt.so"):
        if path := loader.find(file_name):
            return _join(_version_of_file(path))
    for stem in ("cublas", "cublasLt"):
        if soname := loader.find_library(stem):
            return _join(_version_of_soname(soname, wheels, loader, cuda_version, torch_folder))
    for name in sorted((wheel.name for wheel in wheels if wheel.name.startswith("nvidia-cublas")), reverse=True):
        for wheel in wheels:
            if wheel.folder_name == normalize(name):
                return ".".join(wheel.version.split(".")[:3])
    raise HardwareError(
        "no libcublas is within the loader's reach, and no nvidia-cublas wheel is installed",
        "install the torch you will serve with",
    )


def _version_of_soname(
    soname: str, wheels: Sequence[Wheel], loader: Loader, cuda_version: str | None, torch_folder: Path | None
) -> _Version:
    major = soname.rpartition(".so.")[2]
    if cuda_version is None or major != cuda_version.partition(".")[0]:
        return _version_of_file(loader.find(soname) or soname)
    of_torch = (w for w in _wheels_of_torch(wheels) if w.folder_name.startswith("nvidia-cublas"))
    wheel = next((w for w in of_torch if w.version.startswith(f"{major}.")), None)
    return _mapped_by_torch(soname, wheel, loader, torch_folder)


def cudnn_version(wheels: Sequence[Wheel], loader: Loader, cuda_version: str | None, torch_folder: Path | None) -> str:
    """The number that ``torch.backends.cudnn.version()`` would give, as text (``91900``).

    Parameters as in :func:`cublas_version`.

    Raises
    ------
    HardwareError
        torch has no CUDA, no cuDNN is found, or it is open which one torch loads.
    """
    if cuda_version is None:
        raise HardwareError("without a torch that has CUDA nothing says which cuDNN is used", "install one with CUDA")
    name = f"nvidia-cudnn-cu{cuda_version.partition('.')[0]}"
    wheel = next((wheel for wheel in _wheels_of_torch(wheels) if wheel.folder_name == name), None)
    if wheel is not None:
        sonames = [f"libcudnn.so.{wheel.version.partition('.')[0]}"]
    else:
        sonames = [soname for soname in _CUDNN_SONAMES if _bundled(soname, torch_folder) or loader.find(soname)]
    if len(sonames) != 1:
        found = " and ".join(sonames) or "no libcudnn"
        raise HardwareError(f"{name} is not installed for torch, and {found} can be found", _FULL)
    major, minor, patch = _mapped_by_torch(sonames[0], wheel, loader, torch_folder)
    # cudnnGetVersion(): cuDNN 9 made room for two digits of the minor version.
    return str(major * 10000 + minor * 100 + patch if major >= 9 else major * 1000 + minor * 100 + patch)


def _wheels_of_torch(wheels: Sequence[Wheel]) -> Sequence[Wheel]:
    """The wheels, if the installed torch loads NVIDIA's libraries from them: such a build requires a cuDNN wheel."""
    required = (line for wheel in wheels if wheel.folder_name == "torch" for line in wheel.requires)
    return wheels if any(line.startswith("nvidia-cudnn") for line in required) else ()


def _mapped_by_torch(soname: str, wheel: Wheel | None, loader: Loader, torch_folder: Path | None) -> _Version:
    """The version of the library that torch has mapped under ``soname``."""
    if wheel is None:
        return _version_of_file(_bundled(soname, torch_folder) or loader.find(soname) or soname)
    match = _WHEEL_VERSION.match(wheel.version)
    if match is None:
        raise HardwareError(f"{wheel.name} has the odd version {wheel.version!r}", _FULL)
    version = (int(match[1]), int(match[2]), int(match[3]))
    rival = loader.find_in_directories(soname)
    # PyTorch's own builds prefer the wheel (an RPATH), others what LD_LIBRARY_PATH names (a RUNPATH, or none).
    if rival is not None and not _is_beside(rival, wheel) and file_version(rival) != version:
        raise HardwareError(
            f"it is open which {soname} torch loads: {wheel.name} {wheel.version}, or {rival} of LD_LIBRARY_PATH", _FULL
        )
    return version


def _is_beside(path: str, wheel: Wheel) -> bool:
    """Whether a library lies where wheels are installed: LD_LIBRARY_PATH often names a wheel's own folder."""
    return Path(path).resolve().is_relative_to(wheel.folder.parent.resolve())


def _bundled(soname: str, torch_folder: Path | None) -> str | None:
    """A library that torch brings along itself, and prefers."""
    path = None if torch_folder is None else torch_folder / "lib" / soname
    return str(path) if path is not None and path.is_file() else None


def _version_of_file(path: str) -> _Version:
    version = file_version(path)
    if version is None:
        raise HardwareError(f"the file name of {path} does not tell its full version", _FULL)
    return version


def _join(version: _Version) -> str:
    return ".".join(map(str, version))
