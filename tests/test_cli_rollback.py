"""A branch that goes back to an older state than one that was seen: noticed, and refused unless asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Done, only_line
from hub_registry import FOLDER, NAME, REGISTRY, Machine, in_process, one_bundle, publish
from hub_server import HubServer
from made_sources import OF_0_7_2

from fi_tunecache.bundle import write_bundle
from fi_tunecache.folder import Folder
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.registry_tree import open_tree
from fi_tunecache.retrieval import pull
from fi_tunecache.selection import Request
from fi_tunecache.user_cache import UserCache

FIRST, SECOND = one_bundle(), one_bundle(2)
NEXT_STEP = "ask the publisher why; --allow-rollback takes it, and a commit after @ pins one"


def gone_back(seen: int, now: int, branch: str = REGISTRY) -> str:
    return f"{branch}/{FOLDER}: its manifest has gone back from change {seen}, seen before, to {now}"


@pytest.fixture
def machine(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Machine:
    return Machine(tmp_path / "machine", hub.endpoint, in_process(capsys))


@pytest.fixture
def rewound(hub: HubServer, machine: Machine) -> str:
    """The commit that the branch is at again, after the machine has pulled twice."""
    first = publish(hub, FIRST)
    entries(machine.pull("--json"))
    publish(hub, SECOND)
    assert entries(machine.pull("--json")) == 2
    hub.force(NAME, "main", first)
    hub.clear_log()
    return first


def entries(done: Done) -> Any:
    assert (done.code, done.err) == (0, ""), done
    return json.loads(done.out)["entries"]


def refused(done: Done, problem: str) -> None:
    assert (done.code, done.out) == (5, "")
    assert only_line(done.err) == f"{problem}; {NEXT_STEP}"


def test_it_is_refused_and_what_was_pulled_stays(hub: HubServer, machine: Machine, rewound: str) -> None:
    for _ in range(2):
        refused(machine.pull(), gone_back(2, 1))
    assert entries(machine.pull("--json", "--offline")) == 2
    assert {request.method for request in hub.log} <= {"GET", "HEAD"}


def test_who_was_overtaken_while_waiting_takes_what_is_there_now(
    hub: HubServer, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process has asked for the commit; before it goes on, another one pulls a newer one into the same cache."""
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    publish(hub, FIRST)
    slow, cache = Request(environment=FIRST.environment, registries=(REGISTRY,)), UserCache(machine.cache)
    tree = open_tree(REGISTRY, cache=cache)
    before = tree.revision(Folder.parse(FOLDER))
    publish(hub, SECOND)
    assert entries(machine.pull("--json")) == 2
    shutil.rmtree(machine.cache / "selections")

    pulled = pull(slow, cache=cache, opener=lambda _: tree)
    assert pulled.selection.entries == 2
    assert pulled.selection.registries != ((REGISTRY, before),)


def test_it_is_taken_where_that_is_asked_for(machine: Machine, rewound: str) -> None:
    assert entries(machine.pull("--json", "--allow-rollback")) == 1
    assert entries(machine.pull("--json")) == 1, "from then on it is what was seen"
    assert entries(machine.pull("--json", "--offline")) == 1


def test_a_selection_of_before_does_not_hide_it(hub: HubServer, machine: Machine) -> None:
    """Of the older state something may be cached that was not pulled since."""
    first = publish(hub, FIRST)
    compatible = ("--json", "--match", "compatible")
    assert entries(machine.pull(*compatible)) == 1
    publish(hub, SECOND)
    assert entries(machine.pull("--json")) == 2
    hub.force(NAME, "main", first)
    refused(machine.pull(*compatible), gone_back(2, 1))
    assert entries(machine.pull(*compatible, "--allow-rollback")) == 1
    hub.clear_log()
    assert entries(machine.pull(*compatible)) == 1
    assert [request.method for request in hub.log] == ["GET"], "a hit again"


def test_an_undone_yank(hub: HubServer, machine: Machine) -> None:
    first = publish(hub, FIRST, SECOND)
    assert entries(machine.pull("--json")) == 2
    bundle = f"{FOLDER}/{write_bundle(SECOND)[1][:16]}"
    assert machine("yank", bundle, "--from", REGISTRY, "--reason", "wrong clocks").code == 0
    assert entries(machine.pull("--json")) == 1
    hub.force(NAME, "main", first)
    refused(machine.pull(), gone_back(3, 2))
    assert entries(machine.pull("--json", "--offline")) == 1


def test_an_undone_yank_of_all_there_was(hub: HubServer, machine: Machine) -> None:
    """A machine that has nothing left remembers why."""
    first = publish(hub, FIRST)
    assert entries(machine.pull("--json")) == 1
    bundle = f"{FOLDER}/{write_bundle(FIRST)[1][:16]}"
    assert machine("yank", bundle, "--from", REGISTRY, "--reason", "wrong clocks").code == 0
    assert machine.pull().code == 3
    hub.force(NAME, "main", first)
    refused(machine.pull(), gone_back(2, 1))


def test_a_folder_that_is_gone(hub: HubServer, machine: Machine) -> None:
    publish(hub, FIRST)
    entries(machine.pull("--json"))
    hub.force(NAME, "main", hub.commits(NAME)[-1])
    refused(machine.pull(), gone_back(1, 0))


def test_resolve_tells_it_beside_what_it_shows(machine: Machine, rewound: str) -> None:
    """It stores nothing, and is there to say what there is."""
    done = machine("resolve", "--environment", "facts.json", "--json")
    assert done.code == 0
    assert json.loads(done.out)["entries"] == 1
    assert only_line(done.err) == f"{gone_back(2, 1)}: pull takes that with --allow-rollback only"
    refused(machine.pull(), gone_back(2, 1))


def test_resolve_is_silent_where_a_branch_goes_on(hub: HubServer, machine: Machine) -> None:
    publish(hub, FIRST)
    entries(machine.pull("--json"))
    publish(hub, SECOND)
    assert machine("resolve", "--environment", "facts.json").err == ""


# --- what is not a rollback


@pytest.mark.parametrize("is_commit", [False, True], ids=["another branch", "a commit"])
def test_an_older_state_that_is_named_itself(hub: HubServer, machine: Machine, is_commit: bool) -> None:
    """Each branch is remembered by itself, and a commit can't go back."""
    first = publish(hub, FIRST)
    hub.force(NAME, "old", first)
    publish(hub, SECOND)
    assert entries(machine.pull("--json")) == 2
    assert entries(machine.pull("--json", "--registry", f"{REGISTRY}@{first if is_commit else 'old'}")) == 1


def test_a_branch_that_goes_on_in_another_folder(hub: HubServer, machine: Machine) -> None:
    publish(hub, FIRST)
    assert entries(machine.pull("--json")) == 1
    publish(hub, one_bundle(environment=OF_0_7_2))
    assert entries(machine.pull("--json")) == 1


def test_a_rewound_branch_whose_folder_is_the_same(hub: HubServer, machine: Machine) -> None:
    first = publish(hub, FIRST)
    publish(hub, one_bundle(environment=OF_0_7_2))
    assert entries(machine.pull("--json")) == 1
    hub.force(NAME, "main", first)
    assert entries(machine.pull("--json")) == 1


def test_a_tag_that_moves_is_a_branch(hub: HubServer, machine: Machine) -> None:
    first = publish(hub, FIRST)
    tag = f"{REGISTRY}@v1"
    second = publish(hub, SECOND)
    repository = hub.repository(NAME)
    assert repository is not None
    assert repository.move("refs/tags/v1", second)
    assert entries(machine.pull("--json", "--registry", tag)) == 2
    assert repository.move("refs/tags/v1", first)
    refused(machine.pull("--registry", tag), gone_back(2, 1, tag))
    assert entries(machine.pull("--json")) == 2, "the main branch is where it was"


def test_a_directory_is_under_the_hands_of_its_user(machine: Machine) -> None:
    registry = machine.folder / "registry"
    add_bundles(registry, "made", [FIRST])
    manifest = registry / FOLDER / "manifest.json"
    before = manifest.read_bytes()
    add_bundles(registry, "made", [SECOND])
    pull = ("--json", "--registry", "./registry")
    assert entries(machine.pull(*pull)) == 2
    manifest.write_bytes(before)
    assert entries(machine.pull(*pull)) == 1


def test_a_lock_is_not_concerned(machine: Machine, hub: HubServer) -> None:
    publish(hub, FIRST)
    assert machine.pull("--lock", "fleet.lock").code == 0
    publish(hub, SECOND)
    assert entries(machine.pull("--json")) == 2
    assert entries(machine.pull("--json", "--locked", "fleet.lock")) == 1


def test_another_machine_has_not_seen_it(
    hub: HubServer, rewound: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Machine(tmp_path / "other", hub.endpoint, in_process(capsys))
    assert entries(other.pull("--json")) == 1
