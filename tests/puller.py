"""A process that pulls, or many that pull the same at the same moment, with one cache.

Run as a program, with any huggingface_hub. Where there are many, each is forked before anything was asked: it starts
its own process to talk to the Hub, and knows nothing of the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import made

from fi_tunecache.errors import FiTuneCacheError
from fi_tunecache.retrieval import pull
from fi_tunecache.selection import Request
from fi_tunecache.user_cache import UserCache


def _pull(registry: str, seconds: float) -> dict[str, object]:
    """What came of it: the sha256 of the selection, or what was ``said``."""
    cache = UserCache.locate()
    request = Request(environment=made.H200, registries=(registry,))
    try:
        pulled = pull(request, cache=cache, deadline=seconds)
    except FiTuneCacheError as error:
        return {"said": str(error), "notices": cache.notices}
    stored = cache.read(cache.selection_path(request.selection_id))
    return {
        "sha256": hashlib.sha256(pulled.data).hexdigest(),
        "hit": pulled.hit,
        "stored": stored == pulled.data,
        "notices": cache.notices,
    }


def _main(registry: str, processes: int, seconds: float) -> None:
    if processes == 1:
        print(json.dumps(_pull(registry, seconds)))
        return
    start, ready = os.pipe()
    for _ in range(processes):
        if os.fork() == 0:
            os.close(ready)
            os.read(start, 1)  # until all are there
            line = json.dumps(_pull(registry, seconds)) + "\n"
            os.write(1, line.encode())  # in one piece, whoever writes at the same time
            os._exit(0)
    os.close(ready)
    assert [os.wait()[1] for _ in range(processes)] == [0] * processes


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
