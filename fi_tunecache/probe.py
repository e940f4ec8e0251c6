"""The probe: what this machine is, in the seven facts that FlashInfer stamps into a cache.

The *light* probe reads them from what is installed, in milliseconds, and says for each fact that
it can't determine why not. The *full* probe asks FlashInfer itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from .autotuner import collect_metadata
from .environment import Environment
from .errors import HardwareError
from .gpu import InstalledGpu, gpu_name, read_installed_gpus, usable_gpus
from .library_facts import cublas_version, cudnn_version
from .loader import Loader, read_loader
from .wheel_facts import (
    cuda_version,
    cudnn_frontend_version,
    cutlass_dsl_version,
    find_package,
    find_wheels,
    flashinfer_version,
)

__all__ = ["Probe", "ProbeMode", "light_probe", "probe_environment"]


ProbeMode: TypeAlias = Literal["auto", "light", "full"]


class Probe(Struct, frozen=True, kw_only=True):
    """An environment, who determined it, and (fact, one line why not and what would help) for what is missing."""

    environment: Environment
    source: Literal["flashinfer", "light"]
    undetermined: tuple[tuple[str, str], ...] = ()


def probe_environment(
    mode: ProbeMode = "auto",
    gpu_index: int | None = None,
    *,
    need_gpu: bool = True,
    search_path: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Probe:
    """Determine the environment of this machine.

    Parameters
    ----------
    mode
        ``light`` imports neither torch nor FlashInfer and initialises no CUDA. ``full`` asks
        FlashInfer in this process: imports it, initialises CUDA and keeps both. ``auto`` is
        ``full`` where ``flashinfer.autotuner`` is imported already, else ``light``.
    gpu_index
        nvidia-smi's index of the GPU to name, among all installed; by default the one that
        ``CUDA_VISIBLE_DEVICES`` leaves visible.
    need_gpu
        False where the GPU's name is given: then none is looked for, and none can be ambiguous.
    search_path, environ
        By default ``sys.path`` and ``os.environ``. The full probe asks them about the GPU only.

    Returns
    -------
    Probe
        A fact that could not be determined is None in its environment, with the reason beside it.

    Raises
    ------
    HardwareError
        There are GPUs, but not one name: none has that index, those that are visible have
        different names, or it is open which are visible. Or the full probe fails.
    FormatError
        FlashInfer's own function is missing or has another shape.
    """
    if mode == "light" or (mode == "auto" and "flashinfer.autotuner" not in sys.modules):
        return light_probe(gpu_index, need_gpu=need_gpu, search_path=search_path, environ=environ)
    environment = collect_metadata()
    if need_gpu and gpu_index is not None:
        name = gpu_name(read_installed_gpus(), os.environ if environ is None else environ, gpu_index)
        environment = environment.with_facts({"gpu": name})
    why = "FlashInfer itself can't determine it; give it, or bring all facts with --environment FILE or --like"
    return Probe(
        environment=environment,
        source="flashinfer",
        undetermined=tuple((fact, why) for fact in environment.undetermined()),
    )


def light_probe(
    gpu_index: int | None = None,
    *,
    need_gpu: bool = True,
    search_path: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    loader: Loader | None = None,
    installed_gpus: Sequence[InstalledGpu] | str | None = None,
) -> Probe:
    """Determine the environment from installed files, the loader's cache and NVML alone.

    What is not given is read from this machine: ``loader`` by ``ldconfig -p``, ``installed_gpus``
    by NVML. The rest, and HardwareError, as in :func:`probe_environment`.
    """
    path = sys.path if search_path is None else search_path
    variables = os.environ if environ is None else environ
    facts: dict[str, str] = {}
    reasons: dict[str, str] = {}

    def read(name: str, reader: Callable[[], str]) -> str | None:
        try:
            facts[name] = reader()
        except HardwareError as error:
            reasons[name] = str(error)
        return facts.get(name)

    wheels = find_wheels(path)
    libraries = read_loader(variables) if loader is None else loader
    torch = find_package("torch", path)
    flashinfer = read("flashinfer_version", lambda: flashinfer_version(path, wheels))
    cuda = read("cuda_version", lambda: cuda_version(path))
    read("cublas_version", lambda: cublas_version(wheels, libraries, cuda, torch))
    read("cudnn_version", lambda: cudnn_version(wheels, libraries, cuda, torch))
    read("cudnn_frontend_version", lambda: cudnn_frontend_version(wheels))
    read("cutlass_dsl_version", lambda: cutlass_dsl_version(flashinfer, wheels))
    if need_gpu:
        gpus = read_installed_gpus() if installed_gpus is None else installed_gpus
        if gpu_index is None and not usable_gpus(gpus, variables):
            read("gpu", lambda: gpu_name(gpus, variables))
        else:
            facts["gpu"] = gpu_name(gpus, variables, gpu_index)
    else:
        reasons["gpu"] = "it was not looked for"
    environment = Environment.from_metadata(facts, source="the light probe")
    return Probe(
        environment=environment,
        source="light",
        undetermined=tuple(
            (fact, reasons.get(fact) or f"it reads {facts[fact]!r}") for fact in environment.undetermined()
        ),
    )
