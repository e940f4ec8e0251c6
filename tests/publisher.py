"""Publishes numbered bundles, each in a commit of its own. Run as a program it does so with any huggingface_hub."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import made
from memory_target import TreeInMemory

from fi_tunecache.bundle import Bundle, write_bundle
from fi_tunecache.deadline import Deadline
from fi_tunecache.errors import FiTuneCacheError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import describe_bundle
from fi_tunecache.publish.commit import commit
from fi_tunecache.publish.publication import open_target
from fi_tunecache.publish.registry_edit import Edit
from fi_tunecache.publish.target import Target
from fi_tunecache.registry import Registry
from fi_tunecache.user_cache import UserCache

__all__ = ["bundle_of", "edit_of", "numbers", "outcomes", "publish", "publisher"]


def bundle_of(number: int) -> Bundle:
    """One entry, which differs with the number."""
    return made.bundle([made.entry(made.key(made.CUTLASS, number), number)])


def edit_of(*numbers: int) -> Edit:
    """It adds the bundles of these numbers, all to one folder."""
    folder = Folder.of(made.H200)
    rows, files = [], {}
    for number in numbers:
        bundle = bundle_of(number)
        data, sha256 = write_bundle(bundle)
        rows.append(describe_bundle(bundle, data, sha256))
        files[f"{folder}/{rows[-1].file}"] = data
    return Edit({folder: tuple(rows)}, files)


def numbers(files: Mapping[str, bytes]) -> list[int]:
    """Which bundles a registry with these files lists, sorted. Each is there as its row says, and once."""
    registry = Registry(TreeInMemory(files))
    bundles = [
        registry.bundle(folder, row) for folder in registry.folders() for row in registry.manifest(folder).bundles
    ]
    return sorted(entry.key.profile[0][0] for bundle in bundles for entry in bundle.entries.values())


def publish(target: Target, number: int, deadline: Deadline, *, create_pr: bool = False) -> dict[str, Any]:
    """Publish a bundle; what came of it, or the name of the ``error``, its exit ``code`` and what it ``said``."""
    try:
        outcome = commit(target, edit_of(number), f"Bundle {number}", deadline=deadline, create_pr=create_pr)
    except FiTuneCacheError as error:
        return {"error": type(error).__name__, "code": error.exit_code, "said": str(error)}
    return {**{name: getattr(outcome, name) for name in outcome.__struct_fields__}, "notices": [*outcome.notices]}


@contextmanager
def publisher(
    target: str,
    numbers: Sequence[int],
    *,
    folder: Path,
    python: str = sys.executable,
    seconds: float = 60.0,
    killed_at: int | None = None,
    **environ: str,
) -> Iterator[subprocess.Popen[str]]:
    """Start a process, its caches below ``folder``; ``killed_at`` counts the files it has put into a directory."""
    from command_line import child, isolated  # needs pytest, which the program does without

    given = json.dumps([target, numbers, seconds, killed_at])
    with child(python, "-W", "error", __file__, given, env=isolated(folder, environ)) as process:
        yield process


def outcomes(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What came of each commit, as from :func:`publish`; waits for the end."""
    from command_line import Done, secret_free

    out, err = process.communicate(timeout=120)
    secret_free(Done(process.returncode, out, err))
    assert (process.returncode, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def _main(target: str, numbers: Sequence[int], seconds: float, killed_at: int | None) -> None:
    if killed_at is not None:
        _die_at(killed_at, target)
    deadline = Deadline(seconds)
    opened = open_target(target, cache=UserCache.locate(), deadline=deadline)
    for number in numbers:
        print(json.dumps(publish(opened, number, deadline)), flush=True)


def _die_at(step: int, root: str) -> None:
    """Before a file of the directory is put in its place."""
    done = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal done
        if event == "os.rename" and str(arguments[1]).startswith(root):
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1

    sys.addaudithook(hook)


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
