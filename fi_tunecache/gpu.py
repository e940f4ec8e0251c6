"""The GPU of this process: which GPUs CUDA would show it, decided from what NVML lists.

The decision is pure; :func:`read_installed_gpus` is the only part that touches the driver. It
asks NVML, which initialises no CUDA, so it is safe before a fork.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from .errors import HardwareError

__all__ = [
    "CudaDevice",
    "InstalledGpu",
    "MigInstance",
    "gpu_name",
    "read_installed_gpus",
    "usable_gpus",
    "visible_gpus",
]

_WITHOUT_GPU = "name one with --device 'NVIDIA H200', or bring all facts with --environment FILE or --like"
_INDEX = re.compile(r"\s*([+-]?[0-9]+)")


class MigInstance(Struct, frozen=True):
    """One slice of a GPU in MIG mode; ``name`` as torch gives it (``NVIDIA H100 80GB HBM3 MIG 1g.10gb``)."""

    uuid: str
    name: str


class CudaDevice(Struct, frozen=True):
    """What CUDA enumerates: a whole GPU, or one MIG instance of it. ``index`` is nvidia-smi's, of the GPU."""

    index: int
    uuid: str
    name: str


class InstalledGpu(Struct, frozen=True):
    """One GPU as NVML lists it. ``mig`` is None where MIG mode is off, else the instances, perhaps none."""

    index: int
    uuid: str
    name: str
    mig: tuple[MigInstance, ...] | None = None

    @property
    def devices(self) -> tuple[CudaDevice, ...]:
        """A GPU in MIG mode is usable through its instances only."""
        if self.mig is None:
            return (CudaDevice(self.index, self.uuid, self.name),)
        return tuple(CudaDevice(self.index, instance.uuid, instance.name) for instance in self.mig)


def visible_gpus(
    installed: Sequence[InstalledGpu], cuda_visible_devices: str | None, cuda_device_order: str | None
) -> tuple[CudaDevice, ...]:
    """What CUDA shows to a process with these two environment variables.

    An entry that is not one of the installed GPUs ends the list, one that is named twice empties
    it, and the first entry decides whether indices, ``GPU-`` or ``MIG-`` identifiers are read
    (``torch.cuda._parse_visible_devices``; CUDA programming guide, "Environment Variables").
    Does not apply the rule that one process sees one MIG instance, which depends on the driver:
    where the instances have one name it makes no difference.

    Raises
    ------
    HardwareError
        Indices select among GPUs of different names, and CUDA numbers them by its own guess of
        their speed, which can't be known without CUDA.
    """
    if cuda_visible_devices is None:
        return _devices(installed)
    entries = cuda_visible_devices.split(",")
    kind = next((kind for kind in ("GPU-", "MIG-") if entries[0].startswith(kind)), None)
    named = _leading_indices(entries) if kind is None else _leading_identifiers(entries, kind)
    if len(set(named)) < len(named):
        return ()
    chosen: list[CudaDevice] = []
    for entry in named:
        found = _find(entry, installed)
        if not found:
            break
        if found[0] in chosen:
            return ()
        chosen.extend(found)
    kinds = {tuple(_names(gpu.devices)) for gpu in installed}
    if kind is None and chosen and cuda_device_order != "PCI_BUS_ID" and len(kinds) > 1:
        raise HardwareError(
            f"CUDA_VISIBLE_DEVICES={cuda_visible_devices} counts GPUs of different names in CUDA's own order:"
            f" {_listing(_devices(installed))}",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or pick one with --gpu INDEX",
        )
    return tuple(chosen)


def usable_gpus(
    installed: Sequence[InstalledGpu] | str, environ: Mapping[str, str], gpu_index: int | None = None
) -> tuple[CudaDevice, ...]:
    """The devices that this process may use; none where there is no GPU, which is no error here.

    Parameters
    ----------
    installed
        All GPUs of the machine, or the reason why they could not be read.
    environ
        ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` count.
    gpu_index
        nvidia-smi's index among all installed GPUs; if given, the two variables do not count.

    Raises
    ------
    HardwareError
        There are GPUs, but none with that index, or it is open which ones an index means.
    """
    if isinstance(installed, str):
        return ()
    if gpu_index is None:
        return visible_gpus(installed, environ.get("CUDA_VISIBLE_DEVICES"), environ.get("CUDA_DEVICE_ORDER"))
    gpus = [gpu for gpu in installed if gpu.index == gpu_index]
    if installed and not gpus:
        raise HardwareError(f"there is no GPU {gpu_index}", f"the GPUs are {_listing(installed)}")
    return _devices(gpus)


def gpu_name(installed: Sequence[InstalledGpu] | str, environ: Mapping[str, str], gpu_index: int | None = None) -> str:
    """The one name of the devices that :func:`usable_gpus` finds.

    Raises
    ------
    HardwareError
        As there; and if there is no GPU, or several of different names.
    """
    devices = usable_gpus(installed, environ, gpu_index)
    names = _names(devices)
    if len(names) > 1:
        next_step = "pick one with --gpu INDEX"
        if gpu_index is not None:
            next_step = "leave --gpu out and name one MIG instance in CUDA_VISIBLE_DEVICES"
        raise HardwareError(f"there are several GPUs of different names: {_listing(devices)}", next_step)
    if names:
        return names[0]
    if isinstance(installed, str) or not installed:
        problem = f"no GPU was found: {installed or 'the NVIDIA driver lists none'}"
    elif gpu_index is not None or environ.get("CUDA_VISIBLE_DEVICES") is None:
        problem = f"no GPU can be used: in MIG mode without an instance are {_listing(installed)}"
    else:
        problem = f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']!r} shows none of {_listing(installed)}"
    raise HardwareError(problem, _WITHOUT_GPU)


def _devices(gpus: Iterable[InstalledGpu]) -> tuple[CudaDevice, ...]:
    return tuple(device for gpu in gpus for device in gpu.devices)


def _names(devices: Iterable[CudaDevice]) -> list[str]:
    return sorted({device.name for device in devices})


def _listing(devices: Iterable[CudaDevice | InstalledGpu]) -> str:
    return ", ".join(dict.fromkeys(f"{device.index}: {device.name}" for device in devices))


def _leading_indices(entries: Iterable[str]) -> list[int]:
    """CUDA reads each entry as C's strtoul would: ``1gpu2`` is 1; a negative number or none ends the list."""
    indices = []
    for entry in entries:
        match = _INDEX.match(entry)
        if match is None or int(match[1]) < 0:
            break
        indices.append(int(match[1]))
    return indices


def _leading_identifiers(entries: Iterable[str], kind: str) -> list[str]:
    identifiers = []
    for entry in entries:
        if not entry.startswith(kind):
            break
        identifiers.append(entry)
    return identifiers


def _find(entry: int | str, installed: Sequence[InstalledGpu]) -> tuple[CudaDevice, ...]:
    """The devices of one entry; empty where it is none of them, or an abbreviation of several."""
    if isinstance(entry, int):
        return installed[entry].devices if entry < len(installed) else ()
    whole = [gpu.devices for gpu in installed if gpu.uuid.startswith(entry)]
    instances = [(device,) for device in _devices(installed) if device.uuid.startswith(entry)]
    found = whole if entry.startswith("GPU-") else instances
    return found[0] if len(found) == 1 else ()


def read_installed_gpus() -> tuple[InstalledGpu, ...] | str:
    """All GPUs that NVML lists, in its order, which is that of their PCI bus; or one line why not.

    Loads ``libnvidia-ml.so.1``, and leaves NVML shut down again.
    """
    import pynvml

    reasons = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "this machine or container has no NVIDIA driver (libnvidia-ml.so.1)",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "the NVIDIA driver in the kernel and its libraries have different versions: reboot, or reload the driver"
        ),
        pynvml.NVML_ERROR_NO_PERMISSION: "no permission to use the NVIDIA driver: look at /dev/nvidia*",
    }
    try:
        pynvml.nvmlInit()
        try:
            return tuple(_installed_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return reasons.get(error.value, f"NVML says: {error}")


def _installed_gpu(nvml: Any, index: int) -> InstalledGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return InstalledGpu(
        index, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), _mig_instances(nvml, handle)
    )


def _mig_instances(nvml: Any, handle: Any) -> tuple[MigInstance, ...] | None:
    try:
        enabled = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return None
    if not enabled:
        return None
    instances = []
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError_NotFound):
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            instances.append(MigInstance(nvml.nvmlDeviceGetUUID(instance), nvml.nvmlDeviceGetName(instance)))
    return tuple(instances)
