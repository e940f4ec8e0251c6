"""Find the sources that a path stands for: files and stores, and what engines leave below a directory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from fi_tunecache.errors import UsageError
from fi_tunecache.managed_store import environment_folders
from fi_tunecache.user_cache import UserCache

__all__ = ["cached_bundle_paths", "find_sources"]

_RANK_FILE = re.compile(r"autotune_configs_dp\d+_rank\d+\.json|rank_tp\d+_pp\d+_dp\d+\.json")
"""One a rank. vLLM 0.33.0 (``model_executor/warmup/kernel_warmup.py``): ``<root>/<config hash>/…``; SGLang 0.5.23
(``srt/model_executor/runner/flashinfer_autotune.py``): ``<root>/flashinfer/autotune/<version>/<arch>/<hash>/…``."""

_MAX_DEPTH = 8
"""An engine's file lies at most six folders below its own cache's root; nobody wants a whole disk searched."""


def find_sources(path: Path) -> list[Path]:
    """The sources at a path; reads directories, no files.

    Parameters
    ----------
    path
        A file, or an environment of a managed store or a store's ``v2`` folder: itself. Any other directory: the
        managed stores in it (itself may be one) and the per-rank files of vLLM and SGLang, at most eight folders
        deep, sorted. Links to directories are not followed.

    Raises
    ------
    UsageError
        Nothing there, nothing found, a directory that can't be listed, or a file or store in it that is a link
        out of it.
    """
    if not path.is_dir() or path.name == "v2" or (path / "manifest.json").is_file():
        return [path]
    found = sorted(_walk(path))
    if not found:
        raise UsageError(
            f"{path} holds no managed store of FlashInfer (v2/<hash>) and no file of a rank "
            "(autotune_configs_dp0_rank0.json of vLLM, rank_tp0_pp0_dp0.json of SGLang)",
            "name a file, a bundle, a managed store or the cache directory of an engine",
        )
    return found


def _walk(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename} can't be listed ({error.strerror})", "check its permissions") from error

    def refuse_link_out(path: Path) -> None:
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
            raise UsageError(f"{path} is a link that leaves {root}", "name what it leads to")

    for name, folders, files in os.walk(root, onerror=refuse):
        folder = Path(name)
        if "v2" in folders and _has_environments(folder):
            refuse_link_out(folder / "v2")
            yield folder
            folders.remove("v2")
        if len(folder.relative_to(root).parts) >= _MAX_DEPTH:
            folders.clear()
        for file in filter(_RANK_FILE.fullmatch, files):
            refuse_link_out(folder / file)
            yield folder / file


def _has_environments(folder: Path) -> bool:
    try:
        return bool(environment_folders(folder))
    except OSError as error:
        raise UsageError(f"{error.filename} can't be listed ({error.strerror})", "check its permissions") from error


def cached_bundle_paths(cache: UserCache) -> list[Path]:
    """The bundles in the user cache, by their paths; those that were found damaged are not listed.

    Their names are their sha256, which :func:`~fi_tunecache.publish.gather.gather` checks.
    """
    return [file.path for file in cache.files() if file.kind == "bundles" and file.path.suffix == ".json"]
