"""How many requests to a Hub each command costs; what comes is the same on every machine and with every client."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made
import pytest
from command_line import TOKENS, run_process, snapshot
from hub_registry import FOLDER, NAME, REGISTRY, VERSIONS, Machine, as_process, in_process, one_bundle, publish
from hub_server import Account, Fault, HubServer

from fi_tunecache.bundle import Bundle, bundle_file_name, write_bundle
from fi_tunecache.publish.directory import add_bundles

ANOTHER_FOLDER = made.H200.with_facts({"flashinfer_version": "0.7.2"})
DRIFTED = made.H200.with_facts({"cuda_version": "12.9"})


@pytest.fixture
def machine(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Machine:
    """One that has nothing yet, with the client that is installed here."""
    return Machine(tmp_path / "machine", hub.endpoint, in_process(capsys))


def asked(hub: HubServer) -> list[str]:
    """The requests since this was asked last; each by its method and the last part of its path."""
    found = [f"{request.method} {request.path.partition('?')[0].rpartition('/')[2]}" for request in tuple(hub.log)]
    assert all(request.status < 300 for request in hub.log)
    hub.clear_log()
    return found


def name(bundle: Bundle) -> str:
    return bundle_file_name(write_bundle(bundle)[1])


def fetched(file: str) -> list[str]:
    return [f"HEAD {file}", f"GET {file}"]


COMMIT = ["GET tuned"]
MANIFEST = fetched("manifest.json")


def selection(document: Any) -> bytes:
    return Path(document["path"]).read_bytes()


# --- a pull


def test_the_first_pull(hub: HubServer, machine: Machine) -> None:
    commit = publish(hub, one_bundle())
    document = machine.json()
    assert asked(hub) == COMMIT + MANIFEST + fetched(name(one_bundle()))
    assert document["registries"] == [{"name": REGISTRY, "revision": commit}]
    assert not document["hit"]


def test_the_next_pull_of_a_branch_asks_for_its_commit(hub: HubServer, machine: Machine) -> None:
    publish(hub, one_bundle())
    first = machine.json()
    before, _ = snapshot(machine.folder), asked(hub)
    second = machine.json()
    assert asked(hub) == COMMIT
    assert second["hit"]
    assert selection(second) == selection(first)
    assert snapshot(machine.folder) == before, "a hit writes nothing"


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        pytest.param(["--offline"], {}, id="--offline"),
        pytest.param([], {"HF_HUB_OFFLINE": "1"}, id="HF_HUB_OFFLINE"),
        pytest.param([], {"TRANSFORMERS_OFFLINE": "yes"}, id="TRANSFORMERS_OFFLINE"),
        pytest.param(["--offline", "--match", "compatible"], {}, id="another match level"),
        pytest.param(["--match", "compatible"], {"HF_HUB_OFFLINE": "on"}, id="another match level, by the variable"),
        pytest.param(["--offline", "--skip-op", "fp8_gemm"], {}, id="another request"),
    ],
)
def test_offline_nothing_is_asked(
    hub: HubServer, machine: Machine, arguments: list[str], environ: dict[str, str]
) -> None:
    """What was not made yet is made from what is here."""
    commit = publish(hub, one_bundle(), one_bundle(2, environment=DRIFTED))
    first = machine.json()
    hub.clear_log()
    document = machine.json(*arguments, **environ)
    assert hub.log == []
    assert document["registries"] == [{"name": REGISTRY, "revision": commit}]
    assert document["hit"] == (document["selection"] == first["selection"])
    assert document["entries"] == (2 if "compatible" in arguments else 1)


def test_offline_on_a_machine_that_has_nothing(hub: HubServer, machine: Machine) -> None:
    publish(hub, one_bundle())
    before = snapshot(machine.folder)
    done = machine.pull("--offline")
    assert (done.code, done.out) == (4, "")
    assert done.err == (
        f"fi-tunecache: {REGISTRY} was never read on this machine, and the Hub may not be asked; "
        "pull once without --offline and HF_HUB_OFFLINE\n"
    )
    assert hub.log == []
    assert snapshot(machine.folder) == before


def test_a_commit_is_never_asked_for(hub: HubServer, machine: Machine) -> None:
    pinned = f"{REGISTRY}@{publish(hub, one_bundle())}"
    document = machine.json("--registry", pinned)
    assert asked(hub) == MANIFEST + fetched(name(one_bundle()))
    again = machine.json("--registry", pinned)
    assert asked(hub) == []
    assert again["hit"]
    assert selection(again) == selection(document)
    publish(hub, one_bundle(2))
    assert machine.json("--registry", pinned)["entries"] == 1
    assert asked(hub) == []


def test_a_tag_and_a_pull_request_are_branches(hub: HubServer, machine: Machine) -> None:
    publish(hub, one_bundle())
    hub.force(NAME, "v1", hub.head(NAME))
    publish(hub, one_bundle(2))
    assert machine.json("--registry", f"{REGISTRY}@v1")["entries"] == 1
    assert asked(hub) == ["GET v1", *MANIFEST, *fetched(name(one_bundle()))]
    assert machine.json()["entries"] == 2
    assert asked(hub) == COMMIT + MANIFEST + fetched(name(one_bundle(2))), "the other bundle is here"


def test_the_library_stays_out_of_the_process_that_asks(hub: HubServer, machine: Machine) -> None:
    publish(hub, one_bundle())
    code = (
        "import sys\n"
        "from fi_tunecache.cli import main\n"
        "assert main(['pull', '--environment', 'facts.json']) == 0\n"
        "assert not sys.modules.keys() & {'huggingface_hub', 'requests', 'httpx', 'httpx2', 'ssl'}\n"
    )
    for _ in range(2):
        done = run_process(folder=machine.folder, environ=machine.environ, code=code)
        assert (done.returncode, done.stderr) == (0, "")
    assert asked(hub) == COMMIT + MANIFEST + fetched(name(one_bundle())) + COMMIT


# --- the branch has moved


def test_it_moved_for_another_folder(hub: HubServer, machine: Machine) -> None:
    publish(hub, one_bundle())
    first = machine.json()
    asked(hub)
    commit = publish(hub, one_bundle(environment=ANOTHER_FOLDER))
    document = machine.json()
    assert asked(hub) == [*COMMIT, "HEAD manifest.json"], "the same bytes are not fetched again"
    assert document["registries"][0]["revision"] == commit
    assert document["bundles"] == first["bundles"]
    assert machine.json()["hit"]
    assert asked(hub) == COMMIT


def test_it_moved_for_a_new_bundle(hub: HubServer, machine: Machine) -> None:
    publish(hub, one_bundle())
    machine.json()
    asked(hub)
    publish(hub, one_bundle(2))
    assert machine.json()["entries"] == 2
    assert asked(hub) == COMMIT + MANIFEST + fetched(name(one_bundle(2))), "only what is new"


# --- several


def test_several_bundles_are_fetched_at_a_time(hub: HubServer, machine: Machine) -> None:
    bundles = [one_bundle(m) for m in range(1, 6)]
    publish(hub, *bundles)
    hub.fault(Fault(r"/[0-9a-f]{16}\.json", delay=0.4))
    started = time.monotonic()
    assert machine.json()["entries"] == 5
    took = time.monotonic() - started
    requests = asked(hub)
    assert requests[:3] == COMMIT + MANIFEST
    assert sorted(requests[3:]) == sorted(request for bundle in bundles for request in fetched(name(bundle)))
    assert took < 5 * 2 * 0.4, "one after the other it would take that long"


def test_registries_in_order_of_precedence(hub: HubServer, machine: Machine) -> None:
    """What the first has, the second is not asked for."""
    both = one_bundle(1)
    publish(hub, both, name=NAME)
    publish(hub, both, one_bundle(2), name="other/tuned")
    names = [REGISTRY, "hf://datasets/other/tuned"]
    document = machine.json(*[word for registry in names for word in ("--registry", registry)])
    assert asked(hub) == COMMIT * 2 + MANIFEST * 2 + fetched(name(both)) + fetched(name(one_bundle(2)))
    assert {row["bundle"]: row["registry"] for row in document["bundles"]} == {
        name(both).partition(".")[0]: names[0],
        name(one_bundle(2)).partition(".")[0]: names[1],
    }
    assert machine.json(FI_TUNECACHE_REGISTRY=",".join(names))["hit"]
    assert asked(hub) == COMMIT * 2


def test_a_bundle_that_came_from_elsewhere_is_not_fetched(hub: HubServer, machine: Machine, tmp_path: Path) -> None:
    add_bundles(tmp_path / "registry", "here", [one_bundle()])
    publish(hub, one_bundle())
    machine.json("--registry", str(tmp_path / "registry"))
    assert asked(hub) == []
    assert machine.json()["entries"] == 1
    assert asked(hub) == COMMIT + MANIFEST


# --- other commands


LIKE = ["--like", FOLDER]


@pytest.mark.parametrize(
    ("command", "requests", "again"),
    [
        pytest.param(["pull", *LIKE], 5, 1, id="pull --like"),
        pytest.param(["pull", *LIKE, "--to", "tuned.json"], 5, 1, id="pull --to FILE"),
        pytest.param(["resolve", *LIKE], 5, 1, id="resolve"),
        pytest.param(["env", *LIKE], 3, 1, id="env --like"),
        pytest.param(["list"], 6, 1 + 1, id="list"),
        pytest.param(["list", FOLDER], 6, 1 + 1, id="list a folder"),
        pytest.param(["verify", REGISTRY], 8, 1 + 1, id="verify"),
    ],
)
def test_the_requests_of_a_command(
    hub: HubServer, machine: Machine, command: list[str], requests: int, again: int
) -> None:
    publish(hub, one_bundle())
    first, needed = machine(*command), len(hub.log)
    second = machine(*command)
    assert (first.code, first.err, second.code, second.err) == (0, "", 0, "")
    assert (needed, len(hub.log) - needed) == (requests, again)


def test_what_fits_nothing_costs_a_look_at_what_there_is(hub: HubServer, machine: Machine) -> None:
    publish(hub, one_bundle(environment=ANOTHER_FOLDER))
    done = machine.pull()
    assert (done.code, done.out) == (3, "")
    assert "(nearest: bundle" in done.err
    assert [f"{request.method} {request.status}" for request in hub.log] == [
        "GET 200",  # the commit
        "HEAD 404",  # no manifest
        "GET 200",  # which folders there are
        "HEAD 200",  # the neighbour's manifest
        "GET 200",
    ]


# --- who asks


@pytest.mark.parametrize(
    ("place", "environ"),
    [
        pytest.param(None, {"HF_TOKEN": TOKENS[0]}, id="HF_TOKEN"),
        pytest.param(None, {"HUGGING_FACE_HUB_TOKEN": TOKENS[0]}, id="HUGGING_FACE_HUB_TOKEN"),
        pytest.param("hf/token", {}, id="hf auth login"),
        pytest.param("elsewhere/token", {"HF_TOKEN_PATH": "elsewhere/token"}, id="HF_TOKEN_PATH"),
    ],
)
def test_a_token_opens_a_private_repository(
    hub: HubServer, machine: Machine, place: str | None, environ: dict[str, str]
) -> None:
    hub.create(NAME, private=True)
    publish(hub, one_bundle())
    hub.tokens[TOKENS[0]] = Account()
    assert machine.pull().code == 4, "nobody is told that it is there"
    hub.clear_log()
    if place:
        (machine.folder / place).parent.mkdir()
        (machine.folder / place).write_text(f"{TOKENS[0]}\n")
    assert machine.json(**environ)["entries"] == 1
    assert len(hub.log) == 5
    assert all(request.authorised for request in hub.log)


def test_without_a_token_none_is_sent(hub: HubServer, machine: Machine) -> None:
    publish(hub, one_bundle())
    machine.json()
    assert not any(request.authorised for request in hub.log)


# --- every client


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_every_client(
    hub: HubServer,
    tmp_path: Path,
    version: str,
    client_python: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same requests, and the same bytes as on a machine with the client that is installed here."""
    run = as_process(client_python(version))
    machine, other = (Machine(tmp_path / folder, hub.endpoint, run) for folder in ("machine", "other"))
    here = Machine(tmp_path / "here", hub.endpoint, in_process(capsys))

    def pull(*arguments: str, on: Machine = machine, **environ: str) -> tuple[bytes, list[str]]:
        document = on.json(*arguments, "--to", "tuned.json", **environ)
        return selection(document) + (on.folder / "tuned.json").read_bytes(), asked(hub)

    bundle = fetched(name(one_bundle()))
    pinned = f"{REGISTRY}@{publish(hub, one_bundle())}"
    first, requests = pull()
    assert requests == COMMIT + MANIFEST + bundle
    assert pull() == (first, COMMIT)
    assert pull("--offline") == pull(HF_HUB_OFFLINE="1") == (first, [])
    assert pull("--offline", "--match", "compatible")[1] == []
    assert pull(on=here) == (first, COMMIT + MANIFEST + bundle)

    locked, requests = pull("--registry", pinned, on=other)
    assert requests == MANIFEST + bundle
    assert pull("--registry", pinned, on=other) == (locked, [])
    assert pull(on=other) == (first, COMMIT), "of that commit all is here"

    publish(hub, one_bundle(environment=ANOTHER_FOLDER))
    assert pull()[1] == [*COMMIT, "HEAD manifest.json"]
    publish(hub, one_bundle(2), one_bundle(3))
    moved, requests = pull()
    assert requests[:3] == COMMIT + MANIFEST
    assert sorted(requests[3:]) == sorted(fetched(name(one_bundle(2))) + fetched(name(one_bundle(3))))
    assert pull(on=here)[0] == moved
    assert not (machine.folder / "hf").exists(), "the user's own cache is left alone"
