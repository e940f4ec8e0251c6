"""Runs programs that use the real FlashInfer, each in a process forked from this one, where it is imported already.

usage: PYTHONPATH=FOLDER_OF_FLASHINFER python serving_driver.py

Reads one JSON object a line and answers with one: ``program`` (Python source), ``folder`` (its working directory),
``environ`` (all of its variables), ``metadata`` (the facts that FlashInfer is to find), ``given`` (a name for the
program). The program leaves what it has to say in ``result``, which is JSON.

The answer has that, ``profiles`` (how many kernels FlashInfer has timed), ``log`` (level and message of what we have
logged) and ``seconds``; instead of all that ``error``, where the program has ended with one.

What a program has at hand beside FlashInfer's own names:

``ask(lookup)``
    What FlashInfer's ``choose_one`` gives to an op that asks: runner and tactic. Where it times kernels, the tactics
    in ``offers`` are there, pairs of a runner's class and a tactic, the fastest first; without any it times 77.
``tuner()``
    FlashInfer's.
``in_ranks(size, work)``
    What ``work(rank)`` returns in each of so many forked processes, which are the ranks of torch.distributed (gloo);
    None of one that has died. A collective that one of them does not come to is an error after 20 seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import flashinfer_driver as driver
import torch
import torch.distributed as distributed
from flashinfer import autotuner
from flashinfer.autotune_cache import MeasurementPolicy, autotune_v2
from flashinfer.autotuner import AutoTuner, autotune

EVERY_SHAPE = autotuner.TuningConfig()
"""Of an op that FlashInfer has not: each shape is a bucket."""
STOCK = {name: AutoTuner.__dict__[name] for name in ("choose_one", "search_cache")}


class Program:
    """What one program has done to FlashInfer."""

    def __init__(self) -> None:
        self.profiles = 0
        self.offers: list[Any] = []
        self.log: list[tuple[str, str]] = []

    def begin(self, asked: dict[str, Any]) -> None:
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environ"])
        autotuner._collect_metadata = autotuner.autotuner._collect_metadata = lambda: dict(asked["metadata"])
        AutoTuner._prepare_input_tensors = lambda tuner, profile, inputs: list(inputs)
        AutoTuner._profile_single_kernel = self._profile
        AutoTuner._get_l2_cache_size_in_bytes = lambda tuner, device_id=None: 1
        AutoTuner._prepare_input_tensors_with_batches = lambda tuner, inputs, config: [inputs]
        torch.cuda.is_current_stream_capturing = lambda: False
        handler = logging.Handler()
        handler.emit = lambda record: self.log.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
        logger = logging.getLogger("fi_tunecache")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)

    def _profile(self, runner: Any, inputs: Any, tactic: Any, *_: Any, **__: Any) -> float:
        self.profiles += 1
        candidate = [type(runner).__name__, driver.value(tactic)]
        order = [[name, driver.value(offered)] for name, offered in self.offers]
        measured = 1.0 + (order.index(candidate) if candidate in order else len(order))
        if (group := autotuner.get_autotune_process_group()) is None:
            return measured
        everywhere = torch.tensor([measured + distributed.get_rank(group) * 0.01])  # as FlashInfer does after timing
        distributed.all_reduce(everywhere, group=group)
        return everywhere.item() / distributed.get_world_size(group)

    def ask(self, lookup: dict[str, Any], offers: list[Any] | None = None) -> list[Any]:
        op = lookup["custom_op"]
        self.offers = offers or [[name, [77, []] if name.startswith("Cudnn") else 77] for name, _ in lookup["runners"]]
        runners = [driver.toy_runner(name, extras, {"offers": self.offers}) for name, extras in lookup["runners"]]
        inputs = [None if shape == [0] else torch.empty(shape, device="meta") for shape in lookup["shapes"]]
        config = driver.TUNING_CONFIGS.get(op, EVERY_SHAPE)
        runner, tactic = AutoTuner.get().choose_one(op, runners, config, inputs)
        return [type(runner).__name__, tactic]


def in_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # the store looks up names while everybody waits
    ranks = []
    for rank in range(size):
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(reads)
                distributed.init_process_group(
                    "gloo", f"tcp://127.0.0.1:{port}", datetime.timedelta(seconds=20), size, rank
                )
                said = json.dumps(work(rank))
            except Exception:  # noqa: BLE001
                said = json.dumps(traceback.format_exc())
            with os.fdopen(writes, "w") as answers:
                answers.write(said)
            time.sleep(0.5 if rank == 0 else 0)  # the store is here, and others may still ask it
            os._exit(0)
        os.close(writes)
        ranks.append((child, reads))
    found = []
    for child, reads in ranks:
        with os.fdopen(reads) as answers:
            said = answers.read()
        os.waitpid(child, 0)
        found.append(json.loads(said) if said else None)
    return found


def run(asked: dict[str, Any]) -> dict[str, Any]:
    program = Program()
    program.begin(asked)
    import fi_tunecache

    names = {
        "AutoTuner": AutoTuner,
        "MeasurementPolicy": MeasurementPolicy,
        "STOCK": STOCK,
        "ask": program.ask,
        "autotune": autotune,
        "autotuner": autotuner,
        "autotune_v2": autotune_v2,
        "contextlib": contextlib,
        "fi_tunecache": fi_tunecache,
        "given": asked.get("given"),
        "in_ranks": in_ranks,
        "json": json,
        "os": os,
        "program": program,
        "result": None,
        "threading": threading,
        "time": time,
        "torch": torch,
        "tuner": AutoTuner.get,
    }
    started = time.perf_counter()
    try:
        exec(compile(asked["program"], "<program>", "exec"), names)  # noqa: S102 - it is the test's own
    except Exception:  # noqa: BLE001
        return {"error": traceback.format_exc(), "log": program.log}
    seconds = time.perf_counter() - started
    return {"result": names["result"], "profiles": program.profiles, "log": program.log, "seconds": seconds}


def in_child(asked: dict[str, Any]) -> str:
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reads)
            with os.fdopen(writes, "w") as answers:
                json.dump(run(asked), answers)
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return answer or json.dumps({"error": "the program ended without an answer"})


if __name__ == "__main__":
    print(json.dumps({"version": driver.flashinfer.__version__}), file=driver.answers, flush=True)
    for line in sys.stdin:
        print(in_child(json.loads(line)), file=driver.answers, flush=True)
