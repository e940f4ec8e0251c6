"""Where a managed store of FlashInfer lies: what ``--to`` and FlashInfer's own variables name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .errors import UsageError

__all__ = ["find_store_root"]


def find_store_root(destination: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The root of the managed store that a destination names; None where it names none.

    Does not look whether anything is there. The defaults are those of ``get_default_cache_root``,
    ``flashinfer/autotune_cache.py``, and ``flashinfer/jit/env.py``, 0.7.0 to 0.7.4, and of
    ``resolve_flashinfer_autotune_v2_root``, ``vllm/model_executor/warmup/flashinfer_autotune_cache.py``,
    vLLM 0.33.0.

    Parameters
    ----------
    destination
        ``flashinfer``, ``vllm`` (one rank; else it attaches no managed store) or ``flashinfer:DIR``.

    Raises
    ------
    UsageError
        ``sglang``, which attaches no managed store, a folder that is not named, or a home that is
        needed and not there.
    """
    name, colon, folder = destination.partition(":")
    if name == "sglang":
        raise UsageError(
            "SGLang (0.5.23) reads no managed store, but a file for each rank, which must not be placed by hand",
            "use --to FILE to look at the entries",
        )
    if name not in ("flashinfer", "vllm"):
        return None
    if colon and (name == "vllm" or not folder):
        raise UsageError(f"--to {destination!r} names no managed store", "name its root like --to flashinfer:DIR")
    try:
        if colon:
            return Path(folder).expanduser()
        if name == "vllm" and (override := environ.get("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR")):
            return Path(override).expanduser()
        if override := environ.get("FLASHINFER_AUTOTUNE_CACHE_DIR"):
            return Path(override)  # as it is: FlashInfer expands nothing
        base = environ.get("FLASHINFER_WORKSPACE_BASE")
        return Path(Path.home() if base is None else base, ".cache", "flashinfer", "autotune")
    except RuntimeError:  # as is usual for a container's user
        raise UsageError(
            f"--to {destination} needs a home, and there is none", "name the store's root like --to flashinfer:DIR"
        ) from None
