"""Many at once, and some that die: nothing gets lost, nothing is fetched twice, nothing stays locked.

The processes that pull share a cache, as the ranks of one machine do.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import puller
import pytest
from command_line import Done, child, isolated, secret_free
from hub_registry import FOLDER, MANIFEST, NAME, REGISTRY
from hub_registry import publish as put
from hub_server import Fault, HubServer, Request
from publisher import bundle_of, numbers, publish

from fi_tunecache.deadline import Deadline
from fi_tunecache.folder import Folder
from fi_tunecache.hub import HubAccess
from fi_tunecache.manifest import read_manifest
from fi_tunecache.publish.hub import HubTarget
from fi_tunecache.user_cache import UserCache

pytestmark = pytest.mark.slow

LONG = 300.0
COMMIT = "expand=sha"
STALE = f"{REGISTRY} let a stale write pass: what others had published is put back"


# --- publishers


@pytest.fixture
def publish_at_once(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, int], list[dict[str, Any]]]:
    """So many publishers publish so many bundles each, numbered from 1; what came of each commit."""
    for name, value in isolated(tmp_path, {"HF_ENDPOINT": hub.endpoint}).items():
        monkeypatch.setenv(name, value)

    def run(publishers: int, bundles: int) -> list[dict[str, Any]]:
        outcomes: list[dict[str, Any]] = []

        def work(first: int) -> None:
            deadline = Deadline(LONG)
            target = HubTarget(REGISTRY, HubAccess(UserCache(tmp_path / f"cache{first}"), deadline))
            outcomes.extend(publish(target, number, deadline) for number in range(first, first + bundles))

        threads = [threading.Thread(target=work, args=(1 + bundles * number,)) for number in range(publishers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    return run


def manifest_serials(hub: HubServer) -> list[int]:
    """Of every commit, oldest first, that has a manifest."""
    states = (hub.files(NAME, commit) for commit in reversed(hub.commits(NAME)))
    return [read_manifest(files[MANIFEST], Folder.parse(FOLDER)).serial for files in states if MANIFEST in files]


def test_32_publishers_of_5_bundles_each_lose_none(
    hub: HubServer, publish_at_once: Callable[[int, int], list[dict[str, Any]]]
) -> None:
    """None of them knows of the others; not even the repository is there before. Takes 26 to 46 s on two cores."""
    outcomes = publish_at_once(32, 5)
    assert [outcome for outcome in outcomes if "error" in outcome or outcome["notices"]] == []
    assert numbers(hub.files(NAME)) == list(range(1, 161))
    assert manifest_serials(hub) == list(range(1, 161))
    assert len(hub.commits(NAME)) == 161


def test_publishers_at_a_server_that_ignores_parent_commit_lose_none(
    hub: HubServer, publish_at_once: Callable[[int, int], list[dict[str, Any]]]
) -> None:
    hub.ignore_parent_commit = True
    outcomes = publish_at_once(8, 3)
    assert [outcome for outcome in outcomes if "error" in outcome] == []
    assert {notice for outcome in outcomes for notice in outcome["notices"]} == {STALE}
    assert numbers(hub.files(NAME)) == list(range(1, 25))
    serials = manifest_serials(hub)
    assert serials[-1] == max(serials)


# --- machines that pull at once


@pytest.fixture
def team(hub: HubServer) -> HubServer:
    """A Hub whose repository holds one bundle for the environment that is asked for."""
    put(hub, bundle_of(1))
    hub.clear_log()
    return hub


class Node:
    """A machine on which many processes share a cache."""

    def __init__(self, hub: HubServer, folder: Path, python: str = sys.executable) -> None:
        self.cache = folder / "cache"
        self._hub = hub
        self._folder = folder
        self._python = python
        folder.mkdir()

    @contextmanager
    def start(self, processes: int = 1, **environ: str) -> Iterator[subprocess.Popen[str]]:
        given = json.dumps([REGISTRY, processes, LONG])
        variables = isolated(self._folder, {"HF_ENDPOINT": self._hub.endpoint, **environ})
        with child(self._python, "-W", "error", puller.__file__, given, env=variables) as process:
            yield process

    def pull(self, processes: int = 1, **environ: str) -> list[dict[str, Any]]:
        with self.start(processes, **environ) as process:
            return pulled(process)

    def locked(self) -> list[Path]:
        """Locks that somebody holds."""
        found = []
        for path in self.cache.rglob("*.lock"):
            try:
                with filelock.FileLock(path, timeout=0):
                    pass
            except filelock.Timeout:
                found.append(path)
        return found


def pulled(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=LONG)
    secret_free(Done(process.returncode, out, err))
    assert (process.returncode, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def node(team: HubServer, tmp_path: Path) -> Node:
    return Node(team, tmp_path / "node")


@pytest.fixture
def expected(team: HubServer, tmp_path: Path) -> str:
    """The sha256 of what another machine gets, which is alone."""
    (alone,) = Node(team, tmp_path / "alone").pull()
    team.clear_log()
    return str(alone["sha256"])


def downloads(hub: HubServer) -> Counter[str]:
    """How often each file was sent."""
    return Counter(request.path.rpartition("/")[2] for request in hub.requests("/resolve/", "GET"))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def hold_back(hub: HubServer, processes: int) -> None:
    """Send no file before so many processes have asked for the commit: all of them are cold then."""

    def wait(request: Request) -> None:
        if (request.method, "/resolve/" in request.path) == ("GET", True):
            until(lambda: len(hub.requests(COMMIT)) == processes)

    hub.on_request = wait


def test_64_cold_processes_download_each_file_once(team: HubServer, node: Node, expected: str) -> None:
    """Takes about 20 s on two cores, nearly all of it the start of 128 processes."""
    hold_back(team, 64)
    results = node.pull(64)
    assert [result["sha256"] for result in results] == [expected] * 64
    assert Counter(result["hit"] for result in results) == {False: 1, True: 63}
    assert [result for result in results if result["notices"] or not result["stored"]] == []
    assert list(downloads(team).values()) == [1, 1]
    assert len(team.requests(COMMIT)) == 64
    assert node.locked() == []


def without_flock(folder: Path) -> dict[str, str]:
    """Variables under which file locks do nothing, as on some network file systems, in whatever Python starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import fcntl\nfcntl.flock = lambda *_: None\n")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("version", "processes"),
    [
        pytest.param("", 64, id="the client that is installed here"),
        pytest.param("0.36.2", 32, id="0.36.2"),  # whose own cache may be damaged then
    ],
)
def test_cold_processes_without_file_locks_get_the_right_bytes(
    team: HubServer, expected: str, tmp_path: Path, client_python: Callable[[str], str], version: str, processes: int
) -> None:
    node = Node(team, tmp_path / "node", client_python(version) if version else sys.executable)
    hold_back(team, processes)
    results = node.pull(processes, **without_flock(tmp_path / "site"))
    assert [result.get("sha256") for result in results] == [expected] * processes
    assert sum(not result["hit"] for result in results) > 1, "the locks have worked: this test has shown nothing"
    team.on_request = lambda _: None
    assert node.pull()[0]["sha256"] == expected


# --- one of them dies


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


BUNDLE = r"/resolve/.*/[0-9a-f]{16}\.json"


@pytest.mark.parametrize("victim", ["who pulls", "its process"])
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(COMMIT), id="asked for the commit"),
        pytest.param(Fault("/resolve/.*/manifest.json", "HEAD"), id="asked for the manifest"),
        pytest.param(Fault("/resolve/.*/manifest.json", "GET", cut=0), id="at the start of the manifest"),
        pytest.param(Fault("/resolve/.*/manifest.json", "GET", cut=300), id="in the middle of the manifest"),
        pytest.param(Fault(BUNDLE, "HEAD"), id="asked for the bundle"),
        pytest.param(Fault(BUNDLE, "GET", cut=300), id="in the middle of the bundle"),
    ],
)
def test_who_downloads_is_killed_and_those_who_wait_go_on(
    team: HubServer, node: Node, expected: str, fault: Fault, victim: str
) -> None:
    team.fault(replace(fault, hang=LONG, times=1))
    with node.start() as doomed:
        until(lambda: bool(team.requests(fault.path, fault.method)))
        (worker,) = children(doomed.pid)
        with node.start(3) as others:
            until(lambda: len(team.requests(COMMIT)) == 4)
            os.kill(doomed.pid if victim == "who pulls" else worker, signal.SIGKILL)
            results = pulled(others)
        if victim == "who pulls":
            assert doomed.wait() == -signal.SIGKILL
            until(lambda: is_gone(worker))
        else:
            assert f"{REGISTRY}: the process that talks to the Hub ended" in pulled(doomed)[0]["said"]
    assert [result.get("sha256") for result in results] == [expected] * 3
    assert sum(not result["hit"] for result in results) == 1
    assert max(downloads(team).values()) <= 2
    assert node.locked() == []


DIES = """
import os, signal, sys

NAME, STEP = os.environ["DIES"].split()
if NAME == ("worker" if any("hub_worker" in word for word in sys.orig_argv) else "puller"):
    done = 0

    def hook(event, arguments):
        global done
        if event in ("os.rename", "os.symlink", "os.link") and os.environ["FI_TUNECACHE_DIR"] in str(arguments):
            if done == int(STEP):
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1

    sys.addaudithook(hook)
"""
"""A sitecustomize: the process of that name dies before its STEP-th file is put into the cache."""


@pytest.mark.parametrize(("victim", "least"), [("puller", 4), ("worker", 4)])
def test_whoever_dies_at_any_step_leaves_a_cache_that_the_next_can_use(
    team: HubServer, tmp_path: Path, expected: str, victim: str, least: int
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(DIES)
    for step in itertools.count():
        node = Node(team, tmp_path / f"node{step}")
        with node.start(DIES=f"{victim} {step}", PYTHONPATH=str(tmp_path / "site")) as doomed:
            out, _ = doomed.communicate(timeout=LONG)
        if doomed.returncode == 0 and "sha256" in json.loads(out):
            break
        assert doomed.returncode == (-signal.SIGKILL if victim == "puller" else 0)
        (result,) = node.pull()
        assert (result.get("sha256"), result["stored"]) == (expected, True)
        assert node.locked() == []
    assert step >= least
