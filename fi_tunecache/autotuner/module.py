"""FlashInfer's module ``flashinfer.autotuner``: importing it, and asking whether it has what we use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

from ..environment import Environment
from ..errors import FormatError, HardwareError

__all__ = ["brief", "collect_metadata", "import_autotuner", "require"]


def collect_metadata() -> Environment:
    """The facts that FlashInfer itself would stamp, from ``flashinfer.autotuner._collect_metadata``.

    Imports FlashInfer and torch into this process (seconds), initialises CUDA and loads cuBLAS:
    never call it at import or before a fork. A fact that FlashInfer can't determine (``unknown``)
    is None.

    Raises
    ------
    HardwareError
        FlashInfer can't be imported, or its function fails.
    FormatError
        This FlashInfer has no such function (0.6.7 to 0.7.4 have), or it returns something else.
    """
    collect = getattr(import_autotuner("use --probe light"), "_collect_metadata", None)
    if not callable(collect):
        raise FormatError("flashinfer.autotuner has no _collect_metadata", "use --probe light, or update fi-tunecache")
    try:
        metadata = collect()
    except Exception as error:
        raise HardwareError(f"FlashInfer can't tell its environment: {brief(error)}", "use --probe light") from error
    if not isinstance(metadata, Mapping) or not all(isinstance(name, str) for name in metadata):
        raise FormatError("flashinfer.autotuner._collect_metadata returns no facts", "use --probe light")
    return Environment.from_metadata(metadata, source="flashinfer.autotuner._collect_metadata")


def import_autotuner(advice: str) -> ModuleType:
    try:
        return import_module("flashinfer.autotuner")
    except (Exception, SystemExit) as error:
        raise HardwareError(f"FlashInfer can't be imported: {brief(error)}", advice) from error


def require(owner: object, *names: str) -> None:
    for name in names:
        if not hasattr(owner, name):
            title = getattr(owner, "__name__", type(owner).__name__)
            raise FormatError(f"{title} has no {name}", "update fi-tunecache")


def brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
