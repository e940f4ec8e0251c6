"""Reading a large selection: a hit and a full parse of ours, and FlashInfer's `load_configs`.

usage: PYTHONPATH=FOLDER_OF_FLASHINFER python reading.py FILE

Run as a script this is FlashInfer's side: for every line on the standard input it loads FILE into
a new autotuner, its metadata replaced by the file's, and prints the seconds that took.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from made_registry import HERE
from measurement import Section, compare, missing, seconds_of

from fi_tunecache.flashinfer_json import read_cache_file
from fi_tunecache.materialisation import stamped
from fi_tunecache.selection import read_selection

__all__ = ["measure_reading"]

_FLASHINFER = "FlashInfer 0.7.4, load_configs() of the stamped file"
_FLOOR = "json.loads() of the stamped file"
_VARIABLE = "FI_TUNECACHE_TEST_FLASHINFER"


def measure_reading(scratch: Path, selection_file: Path, rounds: int) -> Section:
    """Read a selection from its file, and the v1 file that is made from it."""
    data = selection_file.read_bytes()
    selection = read_selection(data)
    file = scratch / "stamped.json"
    file.write_bytes(stamped(selection, data, HERE))
    actions = {
        "a hit: read_selection()": partial(seconds_of, lambda: read_selection(selection_file.read_bytes())),
        "in full: read_cache_file()": partial(seconds_of, lambda: read_cache_file(file.read_bytes())),
        _FLOOR: partial(seconds_of, lambda: json.loads(file.read_bytes())),
    }
    folder = Path(os.environ.get(_VARIABLE, ""), "0.7.4")
    if os.environ.get(_VARIABLE) and (folder / "flashinfer").is_dir():
        with _flashinfer(folder, file, scratch, selection.entries) as load:
            rows = compare({**actions, _FLASHINFER: load}, rounds, _FLASHINFER)
    else:
        rows = compare(actions, rounds, _FLOOR)
        rows.append(missing(_FLASHINFER, f"{_VARIABLE} names no folder that has 0.7.4/flashinfer"))
    return Section(
        f"Reading a selection of {selection.entries:,} entries",
        f"{len(data) / 1e6:.0f} MB; the ratio is to FlashInfer's, or where that was not measured to json.loads()'s. A "
        "hit checks the digest of the whole file and parses our object in its metadata; in full, every entry is parsed "
        "into objects and checked. FlashInfer puts the file that `pull --to FILE` writes into a dict, unchecked.",
        tuple(rows),
    )


@contextmanager
def _flashinfer(folder: Path, file: Path, scratch: Path, entries: int) -> Iterator[partial[float]]:
    process = subprocess.Popen(
        [sys.executable, __file__, str(file)],
        env={**os.environ, "PYTHONPATH": str(folder), "FLASHINFER_WORKSPACE_BASE": str(scratch)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield partial(_ask, process, entries)
    process.communicate()


def _ask(process: subprocess.Popen[str], entries: int) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    print(file=process.stdin, flush=True)
    answer = json.loads(process.stdout.readline())
    if answer["entries"] != entries:
        raise AssertionError(f"FlashInfer took {answer['entries']} of {entries} entries")
    return float(answer["seconds"])


def _load_when_asked(file: Path) -> None:
    logging.disable()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from flashinfer import autotuner

    metadata = json.loads(file.read_bytes())["_metadata"]
    autotuner.autotuner._collect_metadata = lambda: metadata
    for _ in sys.stdin:
        autotuner.AutoTuner._instance = None
        tuner = autotuner.AutoTuner.get()
        started = time.perf_counter()
        tuner.load_configs(str(file))
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "entries": len(tuner._file_configs)}), file=answers, flush=True)


if __name__ == "__main__":
    _load_when_asked(Path(sys.argv[1]))
