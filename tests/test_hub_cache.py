"""huggingface_hub's private cache, and the user cache beside it: damaged, not writable, full, locked."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import made
import pytest
from command_line import TOKENS, only_line, snapshot
from hub_registry import FILE, MANIFEST, REGISTRY, VERSIONS, Machine, publish
from hub_server import HubServer

from fi_tunecache.user_cache import UserCache

# --- the hub cache


def blobs(machine: Machine) -> list[Path]:
    return sorted((machine.cache / "hub-cache").glob("datasets--*/blobs/*"))


DAMAGE = {
    "truncated": lambda data: data[:-20],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\n{}",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize(
    ("pulled_machine", "damage"),
    [
        *(pytest.param(None, damage, id=damage) for damage in DAMAGE),
        *(
            pytest.param(version, "truncated", marks=pytest.mark.slow, id=f"truncated-{version}")
            for version in VERSIONS
        ),
    ],
    indirect=["pulled_machine"],
)
def test_a_damaged_blob_in_the_hub_cache(hub: HubServer, pulled_machine: Machine, damage: str) -> None:
    """What huggingface_hub itself would hand out as if it were whole."""
    assert pulled_machine.entries() == 2
    for kind in ("bundles", "selections"):
        shutil.rmtree(pulled_machine.cache / kind)
    for path in blobs(pulled_machine):
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    hub.clear_log()
    assert pulled_machine.entries() == 2
    needed = [request.path.rpartition("/")[2] for request in hub.requests(FILE, "GET")]
    assert len(needed) == len(set(needed)) == 3, "each file is fetched once more"
    assert pulled_machine.entries("--offline") == 2


def test_a_damaged_blob_offline(hub: HubServer, pulled_machine: Machine) -> None:
    """Nobody may be asked for a sound one."""
    shutil.rmtree(pulled_machine.cache / "selections")
    for path in blobs(pulled_machine):
        path.write_bytes(path.read_bytes()[:-20])
    done = pulled_machine.pull("--offline")
    assert (done.code, done.out) == (5, "")
    assert f"{MANIFEST}: not a JSON document (" in only_line(done.err)
    assert pulled_machine.entries() == 2


def file_in(name: str) -> Callable[[Path], object]:
    def spoil(hub: Path) -> None:
        (hub / name).parent.mkdir(parents=True)
        (hub / name).touch()

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda hub: hub.write_bytes(b""), id="a file in its place"),
        pytest.param(file_in(".locks"), id="locks that can't be made"),
        pytest.param(file_in("datasets--team--tuned"), id="a file in a repository's place"),
        pytest.param(file_in("datasets--team--tuned/blobs"), id="blobs that can't be written"),
        pytest.param(lambda hub: hub.symlink_to("nowhere/at/all"), id="a link that leads nowhere"),
    ],
)  # fmt: skip
def test_a_hub_cache_that_can_not_be_used_is_done_without(
    hub: HubServer, pulled_machine: Machine, spoil: Callable[[Path], object]
) -> None:
    """What matters is kept in the user cache."""
    shutil.rmtree(pulled_machine.cache / "hub-cache")
    spoil(pulled_machine.cache / "hub-cache")
    assert pulled_machine.entries() == 2
    assert pulled_machine.entries("--offline") == 2


def test_a_cache_that_can_not_be_made(hub: HubServer, pulled_machine: Machine) -> None:
    (pulled_machine.folder / "file").touch()
    nowhere = {"FI_TUNECACHE_DIR": str(pulled_machine.folder / "file" / "cache")}
    before = snapshot(pulled_machine.folder)
    done = pulled_machine.pull(**nowhere)
    assert (done.code, done.out) == (2, "")
    assert re.search(
        r"can't be written \(Not a directory: .*\); free space .* FI_TUNECACHE_DIR .*; or write a file with --to FILE",
        only_line(done.err),
    )
    assert snapshot(pulled_machine.folder) == before
    done = pulled_machine.pull("--to", "tuned.json", **nowhere)
    assert done.code == 0
    assert only_line(done.err).startswith("not kept in the cache: ")
    assert (pulled_machine.folder / "tuned.json").exists()


def mounted(machine: Machine, mount: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``pull`` where the cache is on a file system of its own; what is there afterwards is printed."""
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("this system lets nobody mount anything")
    pull = " ".join([sys.executable, "-W error -m fi_tunecache pull --environment facts.json", *arguments])
    script = f"{mount} && {{ {pull}; code=$?; echo; find cache -type f -size +0 | sort; exit $code; }}"
    command = ["unshare", "-rm", "sh", "-c", script]
    done = subprocess.run(command, cwd=machine.folder, env=machine.environ, capture_output=True, text=True, timeout=60)
    assert not any(token in done.stdout + done.stderr for token in TOKENS)
    return done


READ_ONLY = "mount --bind cache cache && mount -o remount,bind,ro cache"


def test_a_read_only_cache(hub: HubServer, pulled_machine: Machine) -> None:
    """What is in it is used, online and offline; what would have to be kept in it is not."""
    before = snapshot(pulled_machine.folder)
    for arguments in (["--offline"], ["--offline", "--match", "compatible", "--to", "offline.json"]):
        done = mounted(pulled_machine, READ_ONLY, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("1 entry for NVIDIA H200")
    done = mounted(pulled_machine, READ_ONLY)
    assert done.returncode == 2
    assert re.search(r"can't be written \(Read-only file system.*\); free space or", only_line(done.stderr))
    done = mounted(pulled_machine, READ_ONLY, "--to", "online.json")
    assert done.returncode == 0
    assert done.stdout.startswith("2 entries for NVIDIA H200")
    assert only_line(done.stderr).startswith("not kept in the cache: ")
    (pulled_machine.folder / "offline.json").unlink()
    (pulled_machine.folder / "online.json").unlink()
    assert snapshot(pulled_machine.folder) == before


def big(hub: HubServer) -> None:
    publish(hub, made.bundle([made.entry(made.key(made.CUTLASS, m), m) for m in range(1, 2000)]))


def test_a_full_disk(hub: HubServer, pulled_machine: Machine) -> None:
    big(hub)
    shutil.rmtree(pulled_machine.cache)
    pulled_machine.cache.mkdir()
    done = mounted(pulled_machine, "mount -t tmpfs -o size=64k none cache")
    assert done.returncode == 2
    assert re.search(r"can't be written \(No space left on device\); free space or fix", only_line(done.stderr))
    kept = done.stdout.split()
    assert not [name for name in kept if name.startswith("cache/selections/")]
    assert not [name for name in kept if name.endswith((".tmp", ".incomplete"))], "no half of a file is left"


def test_a_limit_on_the_size_of_files(hub: HubServer, pulled_machine: Machine) -> None:
    """Which is not the Hub's fault."""
    big(hub)
    before = pulled_machine.state()
    command = [sys.executable, "-m", "fi_tunecache", "pull", "--environment", "facts.json"]
    unwatched = {name: value for name, value in pulled_machine.environ.items() if not name.startswith("COV")}
    done = subprocess.run(
        command,
        cwd=pulled_machine.folder,
        env=unwatched,  # measuring what is run would write files too
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert only_line(done.stderr) == (
        f"{REGISTRY}: the hub cache can't be used (File too large); free space, fix its permissions, or set "
        "FI_TUNECACHE_DIR"
    )
    assert pulled_machine.state() == before


def test_a_process_that_holds_the_lock_and_does_nothing(hub: HubServer, pulled_machine: Machine) -> None:
    """Is waited for, and then done without while there is time."""
    selection = json.loads(pulled_machine.pull("--offline", "--json").out)["selection"]
    with UserCache(pulled_machine.cache).lock(selection) as held:
        assert held
        started = time.monotonic()
        done = pulled_machine.pull("--timeout", "4")
        took = time.monotonic() - started
    assert (done.code, 2 <= took < 4) == (0, True), done
    assert done.out.startswith("2 entries")
    assert only_line(done.err).endswith("can't be had; going on without it")
