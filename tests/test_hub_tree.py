"""A Hub's repository as a registry's tree: what is asked for when, and what counts as a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_registry import FOLDER, MANIFEST, NAME, REGISTRY, one_bundle, publish
from hub_server import HubServer

from fi_tunecache.deadline import Deadline
from fi_tunecache.errors import IntegrityError, RegistryError
from fi_tunecache.folder import Folder
from fi_tunecache.hub import HubAccess, HubTree, folders_among, hub_is_offline
from fi_tunecache.registry_tree import open_tree
from fi_tunecache.user_cache import UserCache

H200 = Folder("0.7.4", "nvidia-h200")


@pytest.fixture
def access(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubAccess:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return HubAccess(UserCache(tmp_path / "cache"), Deadline(30))


@pytest.mark.parametrize(
    ("paths", "folders"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([MANIFEST, f"{FOLDER}/0123456789abcdef.json"], [H200], id="a folder"),
        pytest.param(
            ["0.9/nvidia-b200/manifest.json", MANIFEST, "0.7.4/a40/manifest.json"],
            [Folder("0.7.4", "a40"), H200, Folder("0.9", "nvidia-b200")],
            id="sorted",
        ),
        pytest.param(["manifest.json", "0.7.4/manifest.json", "/manifest.json"], [], id="not deep enough"),
        pytest.param(["docs/0.7.4/nvidia-h200/manifest.json", f"{FOLDER}/old/manifest.json"], [], id="too deep"),
        pytest.param(["0.7.4/NVIDIA H200/manifest.json", "0.7.4/x_y/manifest.json"], [], id="no slug"),
        pytest.param(
            ["../nvidia-h200/manifest.json", "a b/x/manifest.json", ".git/x/manifest.json"], [], id="no version"
        ),
        pytest.param([f"{FOLDER}/MANIFEST.json", f"{FOLDER}/manifest.json.bak", FOLDER], [], id="no manifest"),
    ],
)
def test_the_folders_among_paths(paths: list[str], folders: list[Folder]) -> None:
    assert folders_among(paths) == tuple(folders)


@pytest.mark.parametrize(
    ("environ", "offline"),
    [
        pytest.param({}, False, id="not set"),
        *(pytest.param({"HF_HUB_OFFLINE": value}, True, id=value) for value in ("1", "true", "TRUE", "yes", "On")),
        *(pytest.param({"HF_HUB_OFFLINE": value}, False, id=f"{value!r}") for value in ("", "0", "false", "no", "2")),
        pytest.param({"TRANSFORMERS_OFFLINE": "1"}, True, id="the other variable"),
        pytest.param({"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"}, False, id="the first that is set counts"),
    ],
)
def test_the_variables_by_which_huggingface_hub_goes_offline(environ: dict[str, str], offline: bool) -> None:
    assert hub_is_offline(environ) == offline


def test_nothing_is_asked_before_it_is_needed_and_nothing_twice(hub: HubServer, access: HubAccess) -> None:
    commit = publish(hub, one_bundle())
    tree = HubTree(REGISTRY, access)
    assert (tree.name, tree.branch, hub.log) == (REGISTRY, REGISTRY, [])
    for _ in range(2):
        assert tree.revision(H200) == tree.revision(Folder("0.9", "a40")) == tree.commit == commit
    assert len(hub.log) == 1
    for _ in range(2):
        assert tree.read(MANIFEST, 9999) == hub.read(NAME, MANIFEST)
    assert len(hub.log) == 3
    for _ in range(2):
        assert tree.folders() == (H200,)
        assert {file.path for file in tree.files()} >= {MANIFEST, "registry.json"}
    assert len(hub.log) == 4
    publish(hub, one_bundle(2))
    assert tree.commit == commit, "it stays where it is"


def test_a_commit_follows_nothing(hub: HubServer, access: HubAccess) -> None:
    tree = HubTree(f"{REGISTRY}@{publish(hub, one_bundle())}", access)
    assert (tree.branch, tree.commit) == (None, hub.head(NAME))
    assert hub.log == []


def test_what_is_damaged_is_fetched_once_more(hub: HubServer, access: HubAccess) -> None:
    publish(hub, one_bundle())
    tree = HubTree(REGISTRY, access)
    tree.read(MANIFEST, 9999)
    (blob,) = (access.cache.hub_path / "datasets--team--tuned" / "blobs").iterdir()
    blob.write_bytes(b"damaged")
    assert tree.read(MANIFEST, 9999) == b"damaged", "huggingface_hub does not look"
    assert tree.discard(MANIFEST)
    assert tree.read(MANIFEST, 9999) == hub.read(NAME, MANIFEST)
    assert not tree.discard(MANIFEST), "a third time would bring nothing else"
    assert not HubTree(REGISTRY, HubAccess(access.cache, access.deadline, offline=True)).discard(MANIFEST)


def test_what_a_tree_does_not_hand_out(hub: HubServer, access: HubAccess) -> None:
    publish(hub, one_bundle())
    tree = HubTree(REGISTRY, access)
    assert tree.read("0.9/a40/manifest.json", 9) is None
    with pytest.raises(IntegrityError, match=rf"^{REGISTRY}: {MANIFEST} has more than 9 bytes; fetch it again or tell"):
        tree.read(MANIFEST, 9)


def test_what_goes_on_is_told(hub: HubServer, access: HubAccess, tmp_path: Path) -> None:
    publish(hub, one_bundle(), one_bundle(2))
    told: list[str] = []
    tree = open_tree(REGISTRY, cache=access.cache, progress=told.append)
    paths = sorted(f"{FOLDER}/{path.name}" for path in map(Path, hub.files(NAME)) if len(path.stem) == 16)
    tree.prefetch(paths[:1])
    assert told == hub.log == [], "a single file is as fast where it is read"
    tree.prefetch(paths)
    tree.folders()
    tree.read(paths[0], 9999)
    assert told == [
        f"fetching 2 files of {REGISTRY}",
        f"asking {REGISTRY} for its commit",
        f"listing {REGISTRY}",
        f"fetching {paths[0]} of {REGISTRY}",
    ]
    assert len(hub.log) == 6


def test_an_error_is_one_of_ours(hub: HubServer, access: HubAccess) -> None:
    tree = HubTree(REGISTRY, access)
    with pytest.raises(RegistryError, match=f"^{REGISTRY}: it does not exist, or it is private") as caught:
        tree.folders()
    assert caught.value.__cause__ is None
