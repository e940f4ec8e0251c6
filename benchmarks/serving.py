"""What a program pays for `enable()`: a lookup of FlashInfer's autotuner with it and without, and the first one.

usage: PYTHONPATH=FOLDER_OF_FLASHINFER python serving.py SELECTION LARGE_SELECTION

Run as a script this is the program: it reads the names of actions on the standard input, one a line, and answers each
with the seconds that it took.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from made_registry import HERE, write_registry
from measurement import Row, Section, missing, row, take_turns

from fi_tunecache.deadline import Deadline

__all__ = ["measure_serving"]

_VARIABLE = "FI_TUNECACHE_TEST_FLASHINFER"
_SMALL = (10, 100)

_STOCK = "choose_one(), a hit in a loaded file"
_FIRST = "choose_one(), a hit of ours, the first of its key"
_LATER = "choose_one(), a hit of ours, a later one"
_RECORDED = "choose_one(), a hit of ours, a later one, recorded"
_MISS = "choose_one(), a miss, {entries} entries of ours"
_STOCK_MISS = "choose_one(), a miss, {entries} entries of a loaded file"
_START = "the first lookup, {small} entries, without FlashInfer's own metadata call"


def measure_serving(scratch: Path, large: Path, rounds: int) -> Section:
    """``large`` is the file of a selection with many entries."""
    from fi_tunecache.match_level import MatchLevel
    from fi_tunecache.retrieval import pull
    from fi_tunecache.selection import Request, read_selection
    from fi_tunecache.user_cache import UserCache

    registry, cache = scratch / "serving-registry", UserCache(scratch / "serving-cache")
    write_registry(registry, *_SMALL)
    request = Request(environment=HERE, registries=(str(registry),), level=MatchLevel.COMPATIBLE)
    pulled = pull(request, cache=cache)
    entries = f"{read_selection(large.read_bytes()).entries:,}"
    small = f"{pulled.selection.entries:,}"
    names = {
        "stock": _STOCK,
        "first": _FIRST,
        "later": _LATER,
        "recorded": _RECORDED,
        "miss": _MISS.format(entries=entries),
        "stock miss": _STOCK_MISS.format(entries=entries),
        "start": _START.format(small=small),
    }
    title = "A lookup of FlashInfer's autotuner"
    about = (
        f"FlashInfer 0.7.4 on the CPU, one runner a lookup; of hits the mean over {small} keys, asked once each. The "
        "ratio is to a hit in a file that was loaded by `load_configs()`. After the first lookup "
        "`AutoTuner.choose_one` is FlashInfer's own function again."
    )
    folder = Path(os.environ.get(_VARIABLE, ""), "0.7.4")
    if not (os.environ.get(_VARIABLE) and (folder / "flashinfer").is_dir()):
        why = f"{_VARIABLE} names no folder that has 0.7.4/flashinfer"
        return Section(title, about, tuple(missing(name, why) for name in names.values()))
    environ = {
        "FI_TUNECACHE_DIR": str(cache.root),
        "FI_TUNECACHE_REGISTRY": str(registry),
        "FI_TUNECACHE_MATCH": "compatible",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))),
        "FLASHINFER_WORKSPACE_BASE": str(scratch),
    }
    selection = cache.selection_path(pulled.selection.id)
    with _program(environ, selection, large) as ask:
        values = take_turns({name: partial(ask, name) for name in names}, rounds)
    return Section(title, about, tuple(_rows(names, values)))


def _rows(names: dict[str, str], values: dict[str, list[float]]) -> Iterator[Row]:
    notes = {
        "first": "at most 1.15 of a hit in a file",
        "later": "at most 1.05 of a hit in a file",
        "recorded": "at most 2 µs more where a hit takes 6 to 7 µs",
        "miss": "at most 10 µs where a hit in a file takes 6 to 7 µs",
    }
    stock = values["stock"]
    for name, what in names.items():
        target = 10.0 if name == "start" else None
        yield row(what, values[name], None if name == "start" else stock, target=target, note=notes.get(name))


@contextlib.contextmanager
def _program(environ: dict[str, str], *files: Path) -> Iterator[Callable[[str], float]]:
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, files)],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(name: str) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        print(name, file=process.stdin, flush=True)
        return float(process.stdout.readline())

    yield ask
    process.communicate()


class _Program:
    """FlashInfer, and lookups that a selection's entries answer."""

    def __init__(self, small: Path, large: Path) -> None:
        import torch
        from flashinfer import autotuner

        from fi_tunecache.autotuner.live import LiveAutotuner
        from fi_tunecache.autotuner.served_entry import served_entries
        from fi_tunecache.key import Key
        from fi_tunecache.materialisation import stamped
        from fi_tunecache.selection import read_selection

        self._autotuner = autotuner
        autotuner._collect_metadata = autotuner.autotuner._collect_metadata = HERE.metadata
        self._stock_function = autotuner.AutoTuner.choose_one
        self._live = LiveAutotuner(autotuner)
        self._entries, self._files = [], []
        for file in (small, large):
            data = file.read_bytes()
            selection = read_selection(data)
            self._entries.append(served_entries(selection, data))
            self._files.append(file.with_suffix(".stamped"))
            self._files[-1].write_bytes(stamped(selection, data, HERE))
        keys = list(map(Key.parse, self._entries[0]))
        # Without specs of what is dynamic a profile stands for the shapes; what it leaves open is the same in all.
        open_sizes = [(i, j) for i, shape in enumerate(keys[0].profile) for j, size in enumerate(shape) if size == -1]
        specs = tuple(autotuner.ConstraintSpec(i, j, lambda shapes: 1) for i, j in open_sizes)
        self._config = autotuner.TuningConfig(constraint_specs=specs)
        runners: dict[Any, Any] = {}
        self._lookups = []
        for key in keys:
            if (key.runner, key.extras) not in runners:
                extras = tuple(getattr(torch, extra.name) for extra in key.extras)  # dtypes alone
                members = {"get_valid_tactics": None, "forward": None, "get_cache_key_extras": lambda s, i, e=extras: e}
                runners[key.runner, key.extras] = type(key.runner, (autotuner.TunableRunner,), members)()
            inputs = [torch.empty([abs(size) for size in shape], device="meta") for shape in key.profile]
            self._lookups.append((key.custom_op, [runners[key.runner, key.extras]], inputs))
        _, runner, inputs = self._lookups[0]
        self._unknown = ("an op that nobody has tuned", runner, inputs)  # so FlashInfer looks at every key of a file
        self._known = self._filled(0)
        self._ask_all(self._known)
        self._many, self._many_stock = self._filled(1), self._loaded(1)

    def _loaded(self, number: int) -> Any:
        tuner = self._autotuner.AutoTuner()
        tuner.load_configs(str(self._files[number]))
        return tuner

    def _filled(self, number: int) -> Any:
        tuner = self._autotuner.AutoTuner()
        layer = self._live.put_layer(tuner, Deadline(10), fail=_raise, want=lambda: None, attached=lambda _: None)
        assert layer is not None
        layer.fill(self._entries[number])
        return tuner

    def _ask_all(self, tuner: Any) -> float:
        config, lookups, choose = self._config, self._lookups, tuner.choose_one
        started = time.perf_counter()
        for op, runners, inputs in lookups:
            choose(op, runners, config, inputs)
        return (time.perf_counter() - started) / len(lookups)

    def _ask_unknown(self, tuner: Any, times: int) -> float:
        op, runners, inputs = self._unknown
        started = time.perf_counter()
        for _ in range(times):
            tuner.choose_one(op, runners, self._config, inputs)
        return (time.perf_counter() - started) / times

    def stock(self) -> float:
        return self._ask_all(self._loaded(0))

    def first(self) -> float:
        return self._ask_all(self._filled(0))

    def later(self) -> float:
        return self._ask_all(self._known)

    def recorded(self) -> float:
        import fi_tunecache

        with fi_tunecache.record_lookups():
            self._ask_all(self._known)
            return self._ask_all(self._known)

    def miss(self) -> float:
        return self._ask_unknown(self._many, 1000)

    def stock_miss(self) -> float:
        return self._ask_unknown(self._many_stock, 5)

    def start(self) -> float:
        """A lookup with everything that ``enable()`` has put off, less FlashInfer's look at this machine."""
        import fi_tunecache

        kind = self._autotuner.AutoTuner
        kind._instance = None
        tuner = kind.get()
        fi_tunecache.enable()
        op, runners, inputs = self._lookups[0]
        started = time.perf_counter()
        tuner.choose_one(op, runners, self._config, inputs)
        seconds = time.perf_counter() - started
        assert kind.__dict__["choose_one"] is self._stock_function
        assert len(tuner._file_configs.ours) == len(self._lookups)
        fi_tunecache.disable()
        return seconds


def _raise(error: Exception) -> None:
    raise error


def _answer(*files: str) -> None:
    logging.disable()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    program = _Program(*map(Path, files))
    for line in sys.stdin:
        print(getattr(program, line.strip().replace(" ", "_"))(), file=answers, flush=True)


if __name__ == "__main__":
    _answer(*sys.argv[1:])
