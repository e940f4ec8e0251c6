"""A warm pull inside a process that has imported everything: what a serving process pays for a hit."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from measurement import Section, row, seconds_of, take_turns

from fi_tunecache.folder import Folder
from fi_tunecache.registry import open_registry
from fi_tunecache.retrieval import pull
from fi_tunecache.selection import Request
from fi_tunecache.user_cache import UserCache

__all__ = ["measure_warm_pull"]

_PULL, _OFFLINE, _PARSE = "pull()", "pull(offline=True)", "json.loads() of the selection's file"
_TARGET_MS = 2


def measure_warm_pull(scratch: Path, rounds: int) -> Section:
    """Hits for the embedded registry's H200."""
    bundle = open_registry("embedded").manifest(Folder("0.7.4", "nvidia-h200")).bundles[0]
    request = Request(environment=bundle.tuned_in, registries=("embedded",))
    cache = UserCache(scratch / "cache")
    path = cache.selection_path(pull(request, cache=cache).selection.id)
    if not (pull(request, cache=cache).hit and pull(request, cache=cache, offline=True).hit):
        raise AssertionError("a second pull is no hit")
    actions: dict[str, Callable[[], object]] = {
        _PULL: lambda: pull(request, cache=cache),
        _OFFLINE: lambda: pull(request, cache=cache, offline=True),
        _PARSE: lambda: json.loads(path.read_bytes()),
    }
    values = take_turns({name: partial(seconds_of, action) for name, action in actions.items()}, rounds)
    rows = []
    for name in (_PULL, _OFFLINE):
        median = row(name, values[name], values[_PARSE], target=_TARGET_MS)
        slowest = statistics.quantiles(values[name], n=100, method="inclusive")[-1] * 1e3
        rows += [
            median,
            msgspec.structs.replace(
                median, what=f"{name}, 99th percentile", value=slowest, low=None, high=None, ratio=None
            ),
        ]
    return Section(
        "A warm pull in process",
        "The ratio is to the last row. `pull()` compares the selection with the registry's manifest, with "
        f"`offline=True` it does not. The selection has {path.stat().st_size / 1e3:.0f} kB.",
        (*rows, row(_PARSE, values[_PARSE], values[_PARSE])),
    )
