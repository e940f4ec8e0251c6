"""Worlds of ranks under torch.distributed (gloo), each rank a process; what they agree on, and how they behave.

Run as a program it imports torch once and then reads cases, a line of JSON each. For each it forks the ranks, plays the
steps and prints what came of them: for each step a list with an item a rank, None for one that did not live to tell.

A case has ``ranks``, how many; ``store``, where theirs is: ``apart`` (in a process of its own), ``rank 0`` (in that
rank's) or ``file``; ``meet``, whether they wait for each other before each step; and ``steps``. A step has ``topic``,
``seconds`` (the deadline), ``size`` (of the leader's bytes), ``sizes`` (keys of the default group's store whose sizes
are to be told afterwards), ``group`` (the ranks in it; otherwise it is the default
group, or one of ``_GROUPS``) and ``behaviour``: by number of the rank in the world, any of

=============  =========================================================================================
``absent``     true: never asks, as a rank without this package
``late``       begins so many seconds later
``seconds``    has a deadline of its own
``takes``      needs so many seconds to make or to accept the bytes
``raises``     can't make or accept them: a CacheError with this text
``breaks``     the same with a RuntimeError, which is what a store raises too
``dies``       ``asked``: when it is to make or accept; ``told``: when agree returns; or seconds after asking
``store``      when it is to make or accept, the store's process gets the signal of this number
``stops``      stands still: from so many seconds after asking, for so many
``writes``     before it asks, sets these keys in the default group's store
=============  =========================================================================================
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from fi_tunecache.deadline import Deadline
from fi_tunecache.errors import CacheError, UsageError
from fi_tunecache.ranks import Ranks, many_ranks

_GROUPS: dict[str, Callable[[], object]] = {
    "world": lambda: dist.group.WORLD,
    "nothing": lambda: None,
    "without store": lambda: dist.ProcessGroup(0, 2),
    "unregistered": lambda: dist.ProcessGroup(
        dist.PrefixStore("unregistered", dist.distributed_c10d._get_default_store()),
        dist.get_rank(),
        dist.get_world_size(),
    ),
}
_DIGITS = 5


def _play(case: dict[str, Any], folder: Path) -> list[list[Any]]:
    port_read, port_write = os.pipe()  # a word a rank
    end_read, end_write = os.pipe()  # is closed when all ranks are done, or dead
    server = _fork(lambda: _serve(port_write)) if case["store"] == "apart" else 0
    ranks: list[tuple[int, IO[bytes]]] = []
    for number in range(case["ranks"]):
        read, write = os.pipe()

        def run(number: int = number, write: int = write) -> None:
            os.close(end_write)
            _join(case, number, port_read, port_write, folder)
            for outcome in _outcomes(case["steps"], number, case.get("meet", False), server):
                os.write(write, json.dumps(outcome).encode() + b"\n")
            os.close(write)
            os.read(end_read, 1)  # others may need the store that is in this process

        ranks.append((_fork(run), os.fdopen(read, "rb")))
        os.close(write)
    outcomes = [[json.loads(line) for line in output] for _, output in ranks]
    for fd in (port_read, port_write, end_read, end_write):
        os.close(fd)
    if server:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    for process, output in ranks:
        output.close()
        os.waitpid(process, 0)
    (folder / "store").unlink(missing_ok=True)
    return [[told[step] if step < len(told) else None for told in outcomes] for step in range(len(case["steps"]))]


def _fork(run: Callable[[], None]) -> int:
    process = os.fork()
    if process == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return process


def _serve(port_write: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _tell_port(server, port_write)
    signal.pause()


def _tell_port(server: dist.TCPStore, port_write: int) -> None:
    os.write(port_write, f"{server.port:0{_DIGITS}}".encode() * 64)


def _join(case: dict[str, Any], number: int, port_read: int, port_write: int, folder: Path) -> None:
    """Become a rank of the world."""
    world = {"rank": number, "world_size": case["ranks"], "timeout": timedelta(minutes=1)}
    if case["store"] == "file":
        dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), **world)
        return
    has_server = case["store"] == "rank 0" and number == 0
    port = 0 if has_server else int(os.read(port_read, _DIGITS))
    store = dist.TCPStore("127.0.0.1", port, is_master=has_server, wait_for_workers=False)
    if has_server:
        _tell_port(store, port_write)
    dist.init_process_group("gloo", store=store, **world)


def _outcomes(steps: list[dict[str, Any]], number: int, meet: bool, server: int) -> Iterator[dict[str, Any]]:
    subgroups = {tuple(step["group"]): None for step in steps if isinstance(step.get("group"), list)}
    made = {ranks: dist.new_group(ranks) for ranks in subgroups}
    for step in steps:
        group = step.get("group", True)
        if group is not True:
            group = made[tuple(group)] if isinstance(group, list) else _GROUPS[group]()
        if meet:
            dist.barrier()
        behaviour = step.get("behaviour", {}).get(str(number), {})
        yield {"many": many_ranks(), **_outcome(step, group, behaviour, server)}


def _outcome(step: dict[str, Any], group: object, behaviour: dict[str, Any], server: int) -> dict[str, Any]:
    time.sleep(behaviour.get("late", 0))
    try:
        ranks = Ranks.of(group)
    except UsageError as error:
        return {"error": str(error)}
    if behaviour.get("absent"):
        return {"place": [ranks.rank, ranks.size, ranks.is_leader]}
    store = dist.distributed_c10d._get_default_store()
    for key, value in behaviour.get("writes", {}).items():
        store.set(key, value)
    dies = behaviour.get("dies")
    given: list[str] = []

    def asked() -> None:
        time.sleep(behaviour.get("takes", 0))
        if "store" in behaviour:
            os.kill(server, behaviour["store"])
        if dies == "asked":
            _die()
        if "raises" in behaviour:
            raise CacheError(behaviour["raises"])
        if "breaks" in behaviour:
            raise RuntimeError(behaviour["breaks"])

    def make() -> bytes:
        data = hashlib.sha256(step["topic"].encode()).digest() * (step["size"] // 32)
        given.append(hashlib.sha256(data).hexdigest())
        asked()
        return data

    def accept(data: bytes) -> None:
        given.append(hashlib.sha256(data).hexdigest())
        asked()

    if isinstance(dies, float):
        threading.Timer(dies, _die).start()
    if "stops" in behaviour:
        _stop_and_go(*behaviour["stops"])
    began = time.monotonic()
    agreed = ranks.agree(step["topic"], Deadline(behaviour.get("seconds", step["seconds"])), make, accept)
    seconds = time.monotonic() - began
    if dies == "told":
        _die()
    return {
        "place": [ranks.rank, ranks.size, ranks.is_leader],
        "install": agreed.install,
        "sha256": agreed.sha256,
        "data": None if agreed.data is None else hashlib.sha256(agreed.data).hexdigest(),
        "given": given,
        "reason": agreed.reason,
        "seconds": seconds,
        "sizes": [len(store.get(key)) for key in step.get("sizes", ())],
    }


def _stop_and_go(after: float, seconds: float) -> None:
    rank = os.getpid()

    def run() -> None:
        time.sleep(after)
        os.kill(rank, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(rank, signal.SIGCONT)

    _fork(run)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _main(folder: Path) -> None:
    print(json.dumps(many_ranks()), flush=True)
    for line in sys.stdin:
        print(json.dumps(_play(json.loads(line), folder)), flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
