"""Resolution and selection for a large registry, each round in a process of its own.

usage: python resolution_at_size.py REGISTRY SELECTION_FILE

Run as a script this is one round: it resolves against REGISTRY, writes the selection
to SELECTION_FILE, and prints seconds and peak memory (VmHWM, in bytes) as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from made_registry import HERE, OTHER_CUDNN, write_registry
from measurement import Section, row

from fi_tunecache.candidates import fetch_candidates
from fi_tunecache.folder import Folder
from fi_tunecache.match_level import MatchLevel
from fi_tunecache.materialisation import materialise
from fi_tunecache.registry_tree import open_tree
from fi_tunecache.resolution import choose
from fi_tunecache.selection import Request

__all__ = ["measure_resolution"]

_Result = TypeVar("_Result")

_READ = "read and check the bundles"
_EXACT = "choose(), exact"
_COMPATIBLE = "choose(), compatible"
_DROPPED = "choose(), compatible, another cuDNN"
_DISK = "from disk to both resolutions"
_MATERIALISE = "materialise the selection"
_FLOOR = "json.loads() of the same bundles"
_PEAK_START, _PEAK_READ = "peak memory, modules imported", "peak memory, bundles read"
_PEAK_RESOLVED, _PEAK_MATERIALISED = "peak memory, resolved at both levels", "peak memory, selection materialised"
_TARGET_S, _TARGET_MB = 1, 300


def measure_resolution(scratch: Path, rounds: int, bundles: int, entries: int) -> tuple[Section, Path]:
    """The section, and the file of the selection that has all entries."""
    registry, selection = scratch / "registry", scratch / "selection.json"
    write_registry(registry, bundles, entries)
    command = [sys.executable, __file__, str(registry), str(selection)]
    results = [json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) for _ in range(rounds)]
    counts = results[0]["counts"]
    seconds = {name: [result["seconds"][name] for result in results] for name in results[0]["seconds"]}
    peaks = {name: [result["peaks"][name] for result in results] for name in results[0]["peaks"]}
    size = sum(path.stat().st_size for path in registry.rglob("*.json"))
    rows = [
        row(
            name,
            values,
            seconds[_FLOOR],
            unit="s",
            target=_TARGET_S if name.startswith("choose()") else None,
            note=f"{counts[name]:,} entries" if name in counts else None,
        )
        for name, values in seconds.items()
    ]
    rows += [
        row(name, values, unit="MB", target=_TARGET_MB if name == _PEAK_RESOLVED else None)
        for name, values in peaks.items()
    ]
    about = (
        f"{bundles:,} bundles of {entries} entries, no two of one shape, {size / 1e6:.0f} MB. Every second bundle has "
        "its lookups recorded, two runners each. One bundle in ten is from this environment; the others differ in "
        "cudnn-frontend, so at level compatible all are candidates and every entry is taken; with another cuDNN, half "
        "of them. The target of 1 s is for `choose()` on parsed bundles: judging, grouping, making consistent, "
        "reasons. From disk, as `resolve` and a cold `pull` do it, is reading, hashing, parsing and checking every "
        "bundle and then `choose()` at both levels; most of that is parsing. Each round is a new process; peak memory "
        "is its VmHWM, which counts the interpreter and the bundles' bytes too. The ratio is to the last of the times."
    )
    return Section(f"Resolution and selection at {bundles * entries:,} entries", about, tuple(rows)), selection


class _Round:
    """Seconds, peaks and counts of one round, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    def time(self, name: str, action: Callable[[], _Result]) -> _Result:
        started = time.perf_counter()
        result = action()
        self.seconds[name] = time.perf_counter() - started
        return result

    def peak(self, name: str) -> None:
        # Not ru_maxrss: a new process inherits that from the one that started it.
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        self.peaks[name] = int(status["VmHWM"].split()[0]) * 1024


def _play_round(registry: str, selection_file: Path) -> dict[str, object]:
    this = _Round()
    this.peak(_PEAK_START)
    request = Request(environment=HERE, registries=(registry,), level=MatchLevel.COMPATIBLE)
    tree = open_tree(registry)
    fetched = this.time(_READ, lambda: fetch_candidates(request, [tree], None))
    this.peak(_PEAK_READ)
    exact = this.time(_EXACT, lambda: choose(fetched.candidates, HERE, MatchLevel.EXACT))
    compatible = this.time(_COMPATIBLE, lambda: choose(fetched.candidates, HERE, MatchLevel.COMPATIBLE))
    this.peak(_PEAK_RESOLVED)
    seconds = this.seconds
    seconds[_DISK] = seconds[_READ] + seconds[_EXACT] + seconds[_COMPATIBLE]
    revisions = ((registry, tree.revision(Folder.of(HERE))),)
    _, data = this.time(_MATERIALISE, lambda: materialise(request, fetched.candidates, compatible, exact, revisions))
    this.peak(_PEAK_MATERIALISED)
    selection_file.write_bytes(data)
    dropped = this.time(_DROPPED, lambda: choose(fetched.candidates, OTHER_CUDNN, MatchLevel.COMPATIBLE))
    files = list(fetched.data.values())
    this.time(_FLOOR, lambda: [json.loads(data) for data in files])
    counts = {_EXACT: len(exact.chosen), _COMPATIBLE: len(compatible.chosen), _DROPPED: len(dropped.chosen)}
    return {"seconds": seconds, "peaks": this.peaks, "counts": counts}


if __name__ == "__main__":
    print(json.dumps(_play_round(sys.argv[1], Path(sys.argv[2]))))
