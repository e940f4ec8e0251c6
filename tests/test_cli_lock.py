"""``fi-tunecache pull --lock`` and ``--locked``: a fleet gets what was looked at, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made
import pytest
from command_line import CommandLine, only_line
from hub_registry import FOLDER, NAME, REGISTRY, Machine, in_process, one_bundle, publish
from hub_server import HubServer
from made_sources import OF_0_7_2

from fi_tunecache.bundle import write_bundle
from fi_tunecache.environment import Environment
from fi_tunecache.publish.directory import add_bundles

OTHER_FOLDER = "0.7.2.post1/nvidia-h200"
DRIFTED = made.H200.with_facts({"cuda_version": "12.9"})
RENEW = "if that is meant, write a new lock with --lock"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def lock_document(path: str = "fleet.lock") -> Any:
    return json.loads(Path(path).read_bytes())


def facts(name: str, environment: Environment) -> None:
    Path(name).write_text(json.dumps(environment.metadata()), "utf-8")


@pytest.fixture
def registry(command_line: CommandLine) -> Path:
    """One bundle in each of two folders."""
    add_bundles(Path("registry"), "made", [one_bundle(), one_bundle(environment=OF_0_7_2)])
    facts("facts.json", made.H200)
    facts("other.json", OF_0_7_2)
    return Path("registry").resolve()


PULL = ["pull", "--environment", "facts.json"]
FROM = [*PULL, "--registry", "./registry"]
LOCK, LOCKED = ["--lock", "fleet.lock"], ["--locked", "fleet.lock"]


# --- a lock


def test_what_a_lock_holds(command_line: CommandLine, registry: Path) -> None:
    without = command_line.output(*FROM)
    out = command_line.output(*FROM, *LOCK)
    assert out.splitlines()[1:] == without.splitlines()[1:], "nothing else is different"
    assert lock_document() == {
        "format": 1,
        "registries": [
            {"name": str(registry), "manifests": {FOLDER: sha256((registry / FOLDER / "manifest.json").read_bytes())}}
        ],
        "bundles": {FOLDER: [write_bundle(one_bundle())[1]]},
    }


def test_a_lock_of_the_embedded_registry(command_line: CommandLine) -> None:
    command_line.output("pull", "--like", FOLDER, *LOCK)
    document = command_line.json("pull", "--like", FOLDER, *LOCKED)
    assert [name["name"] for name in lock_document()["registries"]] == ["embedded"]
    assert sorted(bundle["sha256"] for bundle in document["bundles"]) == lock_document()["bundles"][FOLDER]


def test_a_registry_that_has_nothing_is_pinned_too(command_line: CommandLine, registry: Path) -> None:
    """So that nobody fills the place that it is named for first."""
    add_bundles(Path("first"), "made", [one_bundle(environment=OF_0_7_2)])
    command_line.output(*PULL, "--registry", "./first", "--registry", "./registry", *LOCK)
    assert lock_document()["registries"][0]["manifests"] == {FOLDER: None}
    command_line.output(*PULL, *LOCKED)
    add_bundles(Path("first"), "made", [one_bundle(2)])
    assert command_line.fault(5, *PULL, *LOCKED) == (
        f"{Path('first').resolve()}: {FOLDER}/manifest.json is not the one in the lock; {RENEW}"
    )


def test_another_folder_is_added(command_line: CommandLine, registry: Path) -> None:
    command_line.output(*FROM, *LOCK)
    first = lock_document()
    other = ["pull", "--environment", "other.json"]
    command_line.output(*other, "--registry", "./registry", *LOCK)
    both = lock_document()
    assert both["bundles"] == {**first["bundles"], OTHER_FOLDER: [write_bundle(one_bundle(environment=OF_0_7_2))[1]]}
    assert both["registries"][0]["manifests"].keys() == {FOLDER, OTHER_FOLDER}
    for pull in (PULL, other):
        assert command_line.json(*pull, *LOCKED)["entries"] == 1


def test_another_pull_of_the_same_folder_is_added(command_line: CommandLine, registry: Path) -> None:
    """As of two images with different libraries: the lock is good for both."""
    add_bundles(registry, "made", [one_bundle(2, environment=DRIFTED)])
    facts("drifted.json", DRIFTED)
    drifted = ["pull", "--environment", "drifted.json"]
    command_line.output(*FROM, *LOCK)
    command_line.output(*drifted, "--registry", "./registry", *LOCK)
    assert len(lock_document()["bundles"][FOLDER]) == 2
    for pull in (PULL, drifted):
        assert command_line.json(*pull, *LOCKED)["entries"] == 1


def test_a_manifest_that_has_changed_replaces_what_was_pinned_of_its_folder(
    command_line: CommandLine, registry: Path
) -> None:
    command_line.output(*FROM, *LOCK)
    command_line.output("pull", "--environment", "other.json", "--registry", "./registry", *LOCK)
    newer = one_bundle(created="2026-12-02")
    add_bundles(registry, "made", [newer])
    command_line.output(*FROM, *LOCK)
    assert lock_document()["bundles"][FOLDER] == [write_bundle(newer)[1]]
    assert OTHER_FOLDER in lock_document()["bundles"]
    assert command_line.json(*PULL, *LOCKED)["entries"] == 1


def test_other_registries_replace_the_lock(command_line: CommandLine, registry: Path) -> None:
    """What is no longer pinned is told: another machine may need it."""
    command_line.output("pull", "--environment", "other.json", "--registry", "./registry", *LOCK)
    add_bundles(Path("second"), "made", [one_bundle()])
    done = command_line(*PULL, "--registry", "./second", *LOCK)
    assert done.code == 0
    assert only_line(done.err) == (
        f"fleet.lock pinned other commits; what it held for {OTHER_FOLDER} is no longer in it"
    )
    assert list(lock_document()["bundles"]) == [FOLDER]


def test_a_registry_that_changes_meanwhile_is_not_pinned(command_line: CommandLine, registry: Path) -> None:
    command_line.output(*FROM)
    add_bundles(registry, "made", [one_bundle(2)])
    assert command_line.fault(2, *FROM, "--offline", *LOCK) == f"{registry} has changed meanwhile; pull again"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        pytest.param(b"my notes", "not a lock that can be added to (not a JSON document (", id="another file"),
        pytest.param(b"", "not a lock that can be added to (the file is empty); name another file", id="empty"),
        pytest.param(b"{}", "not a lock that can be added to (not a lock (", id="other JSON"),
        pytest.param(
            b'{"format": 2, "registries": [], "bundles": {}}',
            "not a lock that can be added to (lock format 2 is newer than 1); name another file",
            id="a newer format",
        ),
        pytest.param(None, "not a file; name a new file, such as fleet.lock", id="a directory"),
    ],
)
def test_only_a_lock_is_replaced(command_line: CommandLine, registry: Path, content: bytes | None, line: str) -> None:
    """And it is refused before anything is fetched."""
    if content is None:
        Path("fleet.lock").mkdir()
    else:
        Path("fleet.lock").write_bytes(content)
    assert command_line.fault(2, *FROM, *LOCK).startswith(f"fleet.lock is there and {line}")
    assert not command_line.cache.exists()


def test_a_link_to_a_lock_is_followed(command_line: CommandLine, registry: Path) -> None:
    Path("fleet.lock").symlink_to("real.lock")
    for _ in range(2):
        command_line.output(*FROM, *LOCK)
        assert Path("fleet.lock").is_symlink()
        assert list(lock_document("real.lock")["bundles"]) == [FOLDER]


def test_a_lock_that_can_not_be_written(command_line: CommandLine, registry: Path) -> None:
    Path("file").touch()
    done = command_line(*FROM, "--lock", "file/fleet.lock")
    assert (done.code, done.out) == (2, "")
    assert only_line(done.err) == (
        f"{Path('file').resolve()}/fleet.lock can't be written (File exists: {Path('file').resolve()}); "
        "choose another file with --lock"
    )


# --- a pull that is locked


def test_it_is_pulled_as_it_was(command_line: CommandLine, registry: Path) -> None:
    pulled = command_line.json(*FROM, *LOCK, "--to", "a.json")
    for hit in (False, True):
        locked = command_line.json(*PULL, *LOCKED, "--to", "b.json")
        assert locked["hit"] == hit
        assert locked["selection"] != pulled["selection"], "it is kept apart, by the lock's hash"
        assert [locked[key] for key in ("entries", "bundles", "registries")] == (
            [pulled[key] for key in ("entries", "bundles", "registries")]
        )
    first, second = (json.loads(Path(name).read_bytes()) for name in ("a.json", "b.json"))
    for document in (first, second):
        document.pop("_metadata")
    assert first == second


def test_facts_are_taken_from_what_is_pinned(command_line: CommandLine, registry: Path) -> None:
    command_line.output(*FROM, *LOCK)
    like = command_line.json("pull", "--like", FOLDER, *LOCKED)
    assert like["environment"] == made.H200.metadata()
    assert command_line.fault(5, "pull", "--like", OTHER_FOLDER, *LOCKED) == (
        f"{registry}: the lock holds nothing for {OTHER_FOLDER}; {RENEW}"
    )


def test_registries_of_the_environment_are_not_asked(
    command_line: CommandLine, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command_line.output(*FROM, *LOCK)
    add_bundles(Path("second"), "made", [one_bundle(2)])
    monkeypatch.setenv("FI_TUNECACHE_REGISTRY", "./second")
    (name,) = command_line.json(*PULL, *LOCKED)["registries"]
    assert name["name"] == str(registry)
    monkeypatch.setenv("FI_TUNECACHE_REGISTRY", "nonsense")
    assert command_line.json(*PULL, *LOCKED)["hit"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--registry", "./registry"], id="--registry"),
        pytest.param(["--registry", "embedded"], id="another registry"),
        pytest.param(["--lock", "new.lock"], id="--lock"),
    ],
)
def test_the_lock_names_the_registries(command_line: CommandLine, registry: Path, arguments: list[str]) -> None:
    command_line.output(*FROM, *LOCK)
    assert command_line.fault(2, *PULL, *LOCKED, *arguments) == (
        "--locked names the registries, and pins them already; leave out --lock and --registry"
    )


def publish_more(registry: Path) -> None:
    add_bundles(registry, "made", [one_bundle(2)])


def take_away(registry: Path) -> None:
    (registry / FOLDER / "manifest.json").unlink()


def put_other_bytes(registry: Path) -> None:
    (file,) = (registry / FOLDER).glob("????????????????.json")
    file.write_bytes(file.read_bytes().replace(b'"2026-12-01"', b'"2026-12-02"'))


def pin_another_bundle(registry: Path) -> None:
    document = lock_document()
    document["bundles"][FOLDER] = ["0" * 64]
    Path("fleet.lock").write_text(json.dumps(document))


def pin_nothing_of_the_folder(registry: Path) -> None:
    document = lock_document()
    document["bundles"] = {}
    Path("fleet.lock").write_text(json.dumps(document))


BUNDLE = write_bundle(one_bundle())[1][:16]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        pytest.param(
            publish_more, f"REGISTRY: {FOLDER}/manifest.json is not the one in the lock; {RENEW}", id="a new bundle"
        ),
        pytest.param(
            take_away, f"REGISTRY: {FOLDER}/manifest.json is not the one in the lock; {RENEW}", id="no manifest"
        ),
        pytest.param(put_other_bytes, f"REGISTRY/{FOLDER}/{BUNDLE}.json: sha256 is ", id="another bundle's bytes"),
        pytest.param(
            pin_another_bundle,
            f"the lock does not hold bundle {BUNDLE} of REGISTRY for {FOLDER}; {RENEW}",
            id="a bundle that the lock does not name",
        ),
        pytest.param(
            pin_nothing_of_the_folder,
            f"the lock does not hold bundle {BUNDLE} of REGISTRY for {FOLDER}; {RENEW}",
            id="a folder of which the lock names no bundle",
        ),
    ],
)
def test_anything_else_is_refused(
    command_line: CommandLine, registry: Path, change: Callable[[Path], None], line: str
) -> None:
    command_line.output(*FROM, *LOCK)
    command_line.output("cache", "clear")
    change(registry)
    told = command_line.fault(5, *PULL, *LOCKED)
    assert told.replace(str(registry), "REGISTRY").startswith(line)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(
            ["--environment", "other.json"],
            f"REGISTRY: the lock holds nothing for {OTHER_FOLDER}; {RENEW}",
            id="another version",
        ),
        pytest.param(
            ["--environment", "facts.json", "--device", "NVIDIA H100"],
            f"REGISTRY: the lock holds nothing for 0.7.4/nvidia-h100; {RENEW}",
            id="another device",
        ),
        pytest.param(
            ["--environment", "drifted.json", "--match", "compatible"],
            f"the lock does not hold bundle {write_bundle(one_bundle(2, environment=DRIFTED))[1][:16]} of REGISTRY "
            f"for {FOLDER}; {RENEW}",
            id="another choice",
        ),
    ],
)
def test_another_pull_than_the_one_that_was_locked(
    command_line: CommandLine, registry: Path, arguments: list[str], line: str
) -> None:
    add_bundles(registry, "made", [one_bundle(2, environment=DRIFTED)])
    facts("drifted.json", DRIFTED)
    command_line.output(*FROM, *LOCK)
    assert command_line.fault(5, "pull", *arguments, *LOCKED).replace(str(registry), "REGISTRY") == line


def test_a_change_is_noticed_though_it_was_pulled_before(command_line: CommandLine, registry: Path) -> None:
    command_line.output(*FROM, *LOCK)
    command_line.output(*PULL, *LOCKED)
    publish_more(registry)
    assert command_line.fault(5, *PULL, *LOCKED).endswith(RENEW)
    assert command_line.json(*PULL, *LOCKED, "--offline")["hit"], "that asks nobody"


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        pytest.param(
            None, 2, "fleet.lock can't be read (No such file or directory); make it with pull --lock", id="none"
        ),
        pytest.param(b"my notes", 5, "fleet.lock: not a JSON document (", id="no JSON"),
        pytest.param(b"[" * 100_000, 5, "fleet.lock: ", id="deep"),
        pytest.param(b"\xff", 5, "fleet.lock: ", id="not UTF-8"),
        pytest.param(b" " * (16 * 1024 * 1024 + 1), 5, "fleet.lock: ", id="large"),
        pytest.param(b"{}", 5, "fleet.lock: not a lock (Object missing required field `registries`)", id="empty"),
        pytest.param({"format": 2}, 5, "fleet.lock: lock format 2 is newer than 1; upgrade fi-tunecache", id="newer"),
        pytest.param({"format": 0}, 5, "fleet.lock: not a lock (", id="format 0"),
        pytest.param({"registries": []}, 5, "fleet.lock: names no registry, or holds what is no sha256", id="nothing"),
        pytest.param({"bundles": {FOLDER: ["x"]}}, 5, "fleet.lock: names no registry, or holds what is", id="no hash"),
        pytest.param({"bundles": {FOLDER: 3}}, 5, "fleet.lock: not a lock (Expected `array`", id="a number"),
        pytest.param({"name": f"{REGISTRY}@main"}, 5, "NAME", id="a branch"),
        pytest.param({"name": REGISTRY}, 5, "NAME", id="the main branch"),
        pytest.param({"name": "hf://models/team/tuned"}, 5, "NAME", id="not a dataset"),
        pytest.param({"name": "./registry"}, 5, "NAME", id="a relative path"),
        pytest.param({"name": "registry"}, 5, "NAME", id="a bare word"),
        pytest.param({"name": "https://example.com/registry"}, 5, "NAME", id="an address"),
        pytest.param({"name": ""}, 5, "NAME", id="no name"),
        pytest.param({"name": "embedded", "twice": True}, 5, "NAME", id="a registry twice"),
    ],
)
def test_what_is_no_lock(
    command_line: CommandLine, registry: Path, content: bytes | dict[str, Any] | None, code: int, line: str
) -> None:
    command_line.output(*FROM, *LOCK)
    if isinstance(content, dict):
        document = lock_document()
        (pinned,) = document["registries"]
        pinned["name"] = content.pop("name", pinned["name"])
        if line == "NAME":
            line = f"fleet.lock: {pinned['name']!r} is no registry at a commit and no absolute path, or named twice; "
        document["registries"] = [pinned] * (2 if content.pop("twice", False) else 1)
        content = json.dumps({**document, **content}).encode()
    Path("fleet.lock").unlink()
    if content is not None:
        Path("fleet.lock").write_bytes(content)
    assert command_line.fault(code, *PULL, *LOCKED).startswith(line)


# --- on a Hub


@pytest.fixture
def machine(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Machine]:
    """New machines, by name."""
    return lambda name: Machine(tmp_path / name, hub.endpoint, in_process(capsys))


def asked(hub: HubServer) -> list[str]:
    found = [f"{request.method} {request.path.rpartition('/')[2]}" for request in hub.log]
    hub.clear_log()
    return found


def test_a_fleet_gets_the_commit_that_was_locked(hub: HubServer, machine: Callable[[str], Machine]) -> None:
    """Whatever is published, yanked or rewound since."""
    first = publish(hub, one_bundle())
    builder = machine("builder")
    assert builder.pull("--lock", "fleet.lock").code == 0
    lock = (builder.folder / "fleet.lock").read_bytes()
    assert [registry["name"] for registry in json.loads(lock)["registries"]] == [f"{REGISTRY}@{first}"]
    asked(hub)

    publish(hub, one_bundle(created="2026-12-02"), one_bundle(3))
    yank = ["yank", f"{FOLDER}/{BUNDLE}", "--from", REGISTRY, "--reason", "wrong clocks"]
    assert builder(*yank).code == 0
    asked(hub)
    serving = machine("serving")
    (serving.folder / "fleet.lock").write_bytes(lock)
    for number, requests in enumerate([["HEAD", "GET"] * 2, [], []]):
        done = serving.pull("--locked", "fleet.lock", "--json", *(["--offline"] if number == 2 else []))
        assert (done.code, done.err) == (0, "")
        document = json.loads(done.out)
        assert [bundle["bundle"] for bundle in document["bundles"]] == [BUNDLE]
        assert document["registries"] == [{"name": f"{REGISTRY}@{first}", "revision": first}]
        assert [request.partition(" ")[0] for request in asked(hub)] == requests, "never the branch's commit"

    hub.force(NAME, "main", hub.commits(NAME)[-1])
    assert serving.pull("--locked", "fleet.lock").code == 0
    assert asked(hub) == []


def test_the_machine_that_made_the_lock_has_it_all(hub: HubServer, machine: Callable[[str], Machine]) -> None:
    publish(hub, one_bundle())
    builder = machine("builder")
    assert builder.pull("--lock", "fleet.lock").code == 0
    assert len(asked(hub)) == 5, "as for any first pull"
    assert builder.pull("--lock", "fleet.lock").code == 0
    assert asked(hub) == ["GET tuned?expand=sha"]
    assert builder.pull("--locked", "fleet.lock").code == 0
    assert asked(hub) == []


def test_another_folder_costs_no_request(hub: HubServer, machine: Callable[[str], Machine]) -> None:
    publish(hub, one_bundle(), one_bundle(environment=OF_0_7_2))
    builder = machine("builder")
    builder.pull("--lock", "fleet.lock")
    asked(hub)
    done = builder("pull", "--like", OTHER_FOLDER, "--locked", "fleet.lock")
    assert done.code == 5
    assert only_line(done.err).endswith(f": the lock holds nothing for {OTHER_FOLDER}; {RENEW}")
    assert asked(hub) == []


def test_a_branch_that_has_moved_on_is_another_lock(hub: HubServer, machine: Callable[[str], Machine]) -> None:
    publish(hub, one_bundle(), one_bundle(environment=OF_0_7_2))
    builder = machine("builder")
    (builder.folder / "other.json").write_text(json.dumps(OF_0_7_2.metadata()))
    other = ["pull", "--environment", "other.json", "--lock", "fleet.lock"]
    assert builder(*other).err == builder.pull("--lock", "fleet.lock").err == ""
    assert json.loads((builder.folder / "fleet.lock").read_bytes())["bundles"].keys() == {FOLDER, OTHER_FOLDER}
    publish(hub, one_bundle(2))
    done = builder(*other)
    assert done.code == 0
    assert only_line(done.err) == f"fleet.lock pinned other commits; what it held for {FOLDER} is no longer in it"


def test_a_commit_that_is_gone(hub: HubServer, machine: Callable[[str], Machine]) -> None:
    publish(hub, one_bundle())
    builder = machine("builder")
    builder.pull("--lock", "fleet.lock")
    lock = (builder.folder / "fleet.lock").read_text().replace(hub.head(NAME), "1" * 40)
    (builder.folder / "fleet.lock").write_text(lock)
    done = builder.pull("--locked", "fleet.lock")
    assert (done.code, done.out) == (4, "")
    assert only_line(done.err).startswith(f"{REGISTRY}@{'1' * 40}: it has no such branch, tag or commit (404: ")
