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
_WHEEL_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


def cublas_version(
    wheels: Sequence[Wheel], loader: Loader, cuda_version: str | None, torch_folder: Path | None
) -> str:
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
            return _text(_version_of_file(path))
    for stem in ("cublas", "cublasLt"):
        if soname := loader.find_library(stem):
            major = soname.rpartition(".so.")[2]
            if cuda_version is not None and major == cuda_version.partition(".")[0]:
                of_torch = (w for w in wheels if re.match(rf"nvidia-cublas.*=={major}\.", f"{w.folder_name}=={w.version}"))
                return _text(_mapped_by_torch(soname, _used_by_torch(wheels, of_torch), loader, torch_folder))
            return _text(_version_of_file(loader.find(soname) or soname))
    for name in sorted((wheel.name for wheel in wheels if wheel.name.startswith("nvidia-cublas")), reverse=True):
        for wheel in wheels:
            if wheel.folder_name == normalize(name):
                return ".".join(wheel.version.split(".")[:3])
    raise HardwareError(
        "no libcublas is within the loader's reach, and no nvidia-cublas wheel is installed",
        "install the torch you will serve with",
    )
