"""From what FlashInfer saved on an H200 to machines that serve, over the loopback Hub, with each huggingface_hub.

One client publishes; another machine with the same client pulls, and others with the other clients.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import TOKENS, Done
from hub_registry import NAME, REGISTRY, Machine, as_process
from hub_server import Account, HubServer

from fi_tunecache.flashinfer_json import read_cache_file
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import BundleRow, read_manifest
from fi_tunecache.registry import open_registry
from fi_tunecache.source import SourceKind, read_source
from fi_tunecache.verification import verify_registry

VERSIONS = ("0.36.2", "1.33.0", "2.4.0")
ROOT = Path(__file__).parent.parent
V1 = Path(__file__).parent / "data" / "h200-flashinfer-0.7.4"
POST1 = Path(__file__).parent / "data" / "h200-flashinfer-0.7.2.post1"

PUBLICATIONS = (
    [V1 / "gemm-a.v1.json", "--lookups", V1 / "gemm-a.lookups.json", "--private", "--workload", "engine=vllm"],
    [V1 / "managed-store", POST1 / "managed-store", "--lookups", POST1 / "lookups.json"],
)
"""A v1 file with its lookups; and stores of two releases, of which one has its own."""

ENTRIES = {"0.7.4/nvidia-h200": [90, 63, 63, 63], "0.7.2.post1/nvidia-h200": [27]}


def environments() -> dict[str, dict[str, str]]:
    """The facts of the machines that serve: those that tuned, or like them."""
    v1 = json.loads((V1 / "gemm-a.v1.json").read_bytes())["_metadata"]
    post1 = json.loads((POST1 / "facts.json").read_bytes())["metadata"]
    return {"0.7.4": v1, "0.7.2.post1": post1}


class Team:
    """Machines with one token, each with its own caches and home."""

    def __init__(self, hub: HubServer, folder: Path, python: Callable[[str], str]) -> None:
        self.hub = hub
        self._folder = folder
        self._python = python
        hub.tokens[TOKENS[0]] = Account()

    def machine(self, name: str, version: str) -> Machine:
        home = self._folder / f"{name}-{version}"
        made = Machine(
            home, self.hub.endpoint, as_process(self._python(version)), HF_TOKEN=TOKENS[0], HOME=str(home / "home")
        )
        for release, facts in environments().items():
            (home / f"{release}.json").write_text(json.dumps(facts), "utf-8")
        return made

    def publish(self, version: str) -> Machine:
        publisher = self.machine("publisher", version)
        for arguments in PUBLICATIONS:
            done = publisher("publish", *map(str, arguments), "--to", REGISTRY, "--yes")
            assert done.code == 0, done.err
        return publisher

    def rows(self) -> dict[str, list[BundleRow]]:
        files = self.hub.files(NAME)
        return {
            folder: list(read_manifest(files[f"{folder}/manifest.json"], Folder.parse(folder)).bundles)
            for folder in ENTRIES
        }

    def requests(self) -> int:
        count = len(self.hub.log)
        assert all(request.authorised for request in self.hub.log)
        self.hub.clear_log()
        return count


@pytest.fixture
def team(hub: HubServer, tmp_path: Path, client_python: Callable[[str], str]) -> Team:
    return Team(hub, tmp_path, client_python)


def pull(machine: Machine, release: str, *arguments: str, **environ: str) -> Any:
    done: Done = machine("pull", "--environment", f"{release}.json", "--json", *arguments, **environ)
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def cached(machine: Machine) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (machine.cache / "bundles").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_what_one_client_publishes_every_client_pulls(team: Team, version: str, tmp_path: Path) -> None:
    publisher = team.publish(version)
    assert {folder: [row.entry_count for row in rows] for folder, rows in team.rows().items()} == ENTRIES
    repository = team.hub.repository(NAME)
    assert repository is not None
    assert repository.private
    assert len(team.hub.commits(NAME)) == 3, "its first, and one for each publication"

    published = {
        f"{row.sha256}.json": team.hub.read(NAME, f"{folder}/{row.file}")
        for folder, rows in team.rows().items()
        for row in rows
    }
    selections: dict[str, bytes] = {}
    for other in VERSIONS:
        machine = team.machine("serving", other)
        for release, mode in (("0.7.4", "auto"), ("0.7.4", "eager"), ("0.7.4", "cuda_graph"), ("0.7.2.post1", "auto")):
            file = f"{release}-{mode}.tuned.json"
            document = pull(machine, release, "--execution-mode", mode, "--to", file)
            tuned = read_cache_file((machine.folder / file).read_bytes())
            assert len(tuned.entries) == document["entries"]
            assert tuned.metadata is not None
            assert environments()[release].items() <= tuned.metadata.items()
            assert read_source(machine.folder / file).kind is SourceKind.PULLED
            data = Path(document["path"]).read_bytes() + (machine.folder / file).read_bytes()
            assert selections.setdefault(file, data) == data, "the same bytes with every client"
        assert cached(machine) == published
        assert not (machine.folder / "hf").exists(), "the user's own cache is left alone"
        assert not (machine.folder / "home").exists()

    local = tmp_path / "local"  # what the Hub holds is what would lie in a directory
    for arguments in PUBLICATIONS:
        words = [str(word) for word in arguments if word != "--private"]
        assert publisher("publish", *words, "--to", str(local), "--yes").code == 0
    for folder, rows in team.rows().items():
        for row in rows:
            assert (local / folder / row.file).read_bytes() == published[f"{row.sha256}.json"]
        assert (local / folder / "manifest.json").read_bytes() == team.hub.read(NAME, f"{folder}/manifest.json")
    assert verify_registry(open_registry(str(local))).problems == ()


def documented() -> dict[str, int]:
    """The requests that docs/team-registry.md promises for a pull."""
    page = (ROOT / "docs" / "team-registry.md").read_text("utf-8")
    (table,) = re.findall(r"^\| \| requests \|\n\|---\|---\|\n(.*?)\n\n", page, re.M | re.S)
    rows = (row.strip("| ").split(" | ") for row in table.splitlines())
    return {what: int(count) for what, count in rows}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_requests_of_a_pull_are_those_of_the_page(team: Team, version: str) -> None:
    publisher = team.publish(version)
    pinned = f"{REGISTRY}@{team.hub.head(NAME)}"
    machine = team.machine("serving", version)
    team.requests()

    def requests(*arguments: str, **environ: str) -> int:
        pull(machine, "0.7.2.post1", *arguments, **environ)
        return team.requests()

    first = requests("--lock", "fleet.lock")
    assert documented() == {
        "first pull of one bundle": first,
        "nothing has changed": requests(),
        "nothing has changed; the name holds a commit, or `--locked`": requests("--registry", pinned)
        + requests("--locked", "fleet.lock"),
        "`--offline`, `HF_HUB_OFFLINE=1`": requests("--offline") + requests(HF_HUB_OFFLINE="1"),
    }

    again = publisher("publish", *map(str, PUBLICATIONS[0]), "--to", REGISTRY)
    assert (again.code, again.out.splitlines()[-1]) == (0, f"Nothing to add to {REGISTRY}.")
    assert {request.method for request in team.hub.log} <= {"GET", "HEAD"}
