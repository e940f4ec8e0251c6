"""Locks: what one pins, that nothing else is handed out, and that a file which is none is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import made
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_tunecache.errors import FormatError, IntegrityError, UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.registry import Registry
from fi_tunecache.registry_lock import (
    LockedRegistry,
    LockedTree,
    RegistryLock,
    lock_selection,
    read_lock,
    write_lock,
)
from fi_tunecache.registry_tree import DirectoryTree
from fi_tunecache.retrieval import pull
from fi_tunecache.selection import Request, Selection
from fi_tunecache.user_cache import UserCache

FOLDER, OTHER = Folder("0.7.4", "nvidia-h200"), Folder("0.7.2", "nvidia-h200")
MANIFEST = f"{FOLDER}/manifest.json"
COMMIT, A, B, C = "c" * 40, "a" * 64, "b" * 64, "c" * 64
HUB = f"hf://datasets/team/tuned@{COMMIT}"


def lock(name: str = HUB, manifest: str | None = A, *bundles: str, folder: Folder = FOLDER) -> RegistryLock:
    return RegistryLock((LockedRegistry(name, {str(folder): manifest}),), {str(folder): bundles})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A registry of two folders, each with a bundle."""
    older = made.H200.with_facts({"flashinfer_version": "0.7.2"})
    entries = [made.entry(made.key(made.CUTLASS))]
    add_bundles(tmp_path / "registry", "made", [made.bundle(entries), made.bundle(entries, environment=older)])
    return tmp_path / "registry"


def selection(root: Path, cache: Path) -> Selection:
    return pull(Request(environment=made.H200, registries=(str(root),)), cache=UserCache(cache)).selection


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- the file


hashes = st.text("0123456789abcdef", min_size=64, max_size=64)
folders = st.builds(
    "{}/{}".format, st.from_regex(r"\A0\.[0-9]\.[0-9]\Z"), st.sampled_from(["nvidia-h200", "nvidia-b200"])
)
commits = st.text("0123456789abcdef", min_size=40, max_size=40)
names = st.sampled_from(["embedded", "/srv/registry", "/a b/é"]) | st.builds("hf://datasets/a/b@{}".format, commits)
locks = st.builds(
    RegistryLock,
    st.lists(
        st.builds(LockedRegistry, names, st.dictionaries(folders, st.none() | hashes, max_size=3)),
        min_size=1,
        max_size=3,
        unique_by=lambda registry: registry.name,
    ).map(tuple),
    st.dictionaries(folders, st.lists(hashes, max_size=3).map(tuple), max_size=3),
)


@given(locks)
def test_reading_and_writing_are_inverse(pinned: RegistryLock) -> None:
    data = write_lock(pinned)
    assert read_lock(data) == pinned
    assert data == write_lock(read_lock(data))
    assert data.endswith(b"}\n")


def test_a_change_shows_line_by_line() -> None:
    before, after = (write_lock(lock(HUB, A, *bundles)).splitlines() for bundles in ((A,), (A, B)))
    assert len(set(after) - set(before)) == 2, "the new line, and the comma before it"


def changed(**fields: Any) -> bytes:
    return json.dumps({**msgspec.to_builtins(lock(HUB, A, B)), **fields}).encode()


def registries(*names: str, **manifests: object) -> bytes:
    return changed(registries=[{"name": name, "manifests": manifests} for name in names])


WRITE_ONE = r"write one with pull --lock"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        pytest.param(b"", "the file is empty", id="empty"),
        pytest.param(b"{", "not a JSON document", id="truncated"),
        pytest.param(b"[]", f"not a lock .*; {WRITE_ONE}", id="a list"),
        pytest.param(b"[" * 99 + b"]" * 99, "nested deeper than 8", id="deep"),
        pytest.param(b" " * (17 << 20), "bytes are more than", id="17 MiB"),
        pytest.param(b'{"format":1}', f"not a lock .*; {WRITE_ONE}", id="nothing in it"),
        pytest.param(changed(format=2), "lock format 2 is newer than 1; upgrade fi-tunecache", id="a newer format"),
        pytest.param(changed(format=0), "not a lock", id="no format"),
        pytest.param(changed(registries=[]), f"names no registry, .*; {WRITE_ONE}", id="no registry"),
        pytest.param(changed(bundles={str(FOLDER): ["x"]}), f"holds what is no sha256; {WRITE_ONE}", id="a hash"),
        pytest.param(changed(bundles={str(FOLDER): [A.upper()]}), "holds what is no sha256", id="upper case"),
        pytest.param(changed(bundles={str(FOLDER): [f"{A}\n"]}), "holds what is no sha256", id="a newline"),
        pytest.param(changed(bundles={str(FOLDER): A}), "not a lock", id="no list of hashes"),
        pytest.param(registries(HUB, x="y"), "holds what is no sha256", id="a manifest's hash"),
        pytest.param(registries(HUB, x=1), "not a lock", id="a number for a hash"),
        pytest.param(registries("hf://datasets/team/tuned"), "is no registry at a commit", id="a branch"),
        pytest.param(registries("hf://datasets/team/tuned@main"), "is no registry at a commit", id="a named branch"),
        pytest.param(registries(HUB[:-1]), "is no registry at a commit", id="part of a commit"),
        pytest.param(registries("hf://team/tuned"), "is no registry at a commit", id="no dataset"),
        pytest.param(registries(f"hf://datasets/../x@{COMMIT}"), "is no registry at a commit", id="a path in a name"),
        pytest.param(registries("./registry"), "no absolute path", id="a relative path"),
        pytest.param(registries("/a/../b"), "no absolute path", id="a path with .."),
        pytest.param(registries("registry"), "is no registry", id="a bare word"),
        pytest.param(registries(HUB, HUB), "named twice", id="a registry twice"),
        pytest.param(registries("x" * 9999), "is no registry", id="a long name"),
    ],
)
def test_what_is_no_lock(data: bytes, line: str) -> None:
    with pytest.raises(FormatError, match=line) as caught:
        read_lock(data, source="fleet.lock")
    assert str(caught.value).startswith("fleet.lock: ")
    assert len(str(caught.value)) < 350


# --- what is handed out


def test_a_locked_tree_hands_out_what_is_pinned_and_no_more(root: Path) -> None:
    tree = LockedTree(DirectoryTree(root), LockedRegistry(str(root), {str(FOLDER): sha256(root / MANIFEST)}))
    assert tree.read(MANIFEST, 9999) == (root / MANIFEST).read_bytes()
    assert tree.name == str(root)
    assert tree.branch is None
    assert tree.revision(FOLDER) == DirectoryTree(root).revision(FOLDER)
    assert tree.folders() == (FOLDER,), "of two"
    assert not tree.discard(MANIFEST)
    tree.prefetch([MANIFEST])
    with pytest.raises(
        IntegrityError, match=rf"{root}: the lock holds nothing for {OTHER}; if that is meant, write a new"
    ):
        tree.read(f"{OTHER}/manifest.json", 9999)


def test_another_manifest_is_refused(root: Path) -> None:
    pinned = sha256(root / MANIFEST)
    tree = LockedTree(DirectoryTree(root), LockedRegistry(str(root), {str(FOLDER): pinned}))
    (root / MANIFEST).write_bytes((root / MANIFEST).read_bytes() + b" ")
    for change in (lambda: None, (root / MANIFEST).unlink):
        change()
        actual = sha256(root / MANIFEST) if (root / MANIFEST).exists() else ""
        with pytest.raises(IntegrityError, match=rf"{root}: {MANIFEST} is not the one in the lock; if that") as caught:
            tree.read(MANIFEST, 9999)
        assert (caught.value.expected, caught.value.actual) == (pinned, actual)


def test_what_was_not_there_must_not_come(root: Path) -> None:
    tree = LockedTree(DirectoryTree(root), LockedRegistry(str(root), {"0.9/nvidia-h200": None, str(FOLDER): None}))
    assert tree.read("0.9/nvidia-h200/manifest.json", 9) is None
    with pytest.raises(IntegrityError, match="is not the one in the lock"):
        tree.read(MANIFEST, 9999)


def test_bundles_have_their_hashes_in_the_manifest(root: Path) -> None:
    tree = LockedTree(DirectoryTree(root), LockedRegistry(str(root), {str(FOLDER): sha256(root / MANIFEST)}))
    (row,) = Registry(tree).manifest(FOLDER).bundles
    path = root / str(FOLDER) / row.file
    data = Registry(tree).bundle_bytes(FOLDER, row)
    assert data == path.read_bytes()
    path.write_bytes(data.replace(b"2026-12-01", b"2026-12-02"))
    with pytest.raises(IntegrityError, match="the manifest says"):
        Registry(tree).bundle_bytes(FOLDER, row)


def test_an_opener_opens_what_is_in_the_lock(root: Path) -> None:
    pinned = lock(str(root), sha256(root / MANIFEST))
    opener = pinned.opener(lambda name: DirectoryTree(Path(name)))
    assert pinned.names == (str(root),)
    assert opener(str(root)).folders() == (FOLDER,)
    with pytest.raises(KeyError):
        opener(str(root.parent))


@pytest.mark.parametrize(
    ("bundles", "folder", "fits"),
    [
        pytest.param("its own", FOLDER, True, id="its own"),
        pytest.param("none", FOLDER, False, id="another"),
        pytest.param("its own", OTHER, False, id="of another folder"),
    ],
)
def test_a_selection_is_checked(root: Path, tmp_path: Path, bundles: str, folder: Folder, fits: bool) -> None:
    chosen = selection(root, tmp_path / "cache")
    (bundle,) = chosen.bundles
    pinned = lock(str(root), A, bundle.sha256 if bundles == "its own" else B)
    if fits:
        pinned.check(chosen, folder)
        return
    line = (
        rf"the lock does not hold bundle {bundle.bundle_id} of {root} for {folder}; if that is meant, write a new lock"
    )
    with pytest.raises(IntegrityError, match=line):
        pinned.check(chosen, folder)


# --- making one


def test_a_lock_of_a_selection(root: Path, tmp_path: Path) -> None:
    chosen = selection(root, tmp_path / "cache")
    pinned = lock_selection(chosen, FOLDER, lambda name: DirectoryTree(Path(name)))
    assert pinned == lock(str(root), sha256(root / MANIFEST), chosen.bundles[0].sha256)
    assert read_lock(write_lock(pinned)) == pinned
    pinned.check(chosen, FOLDER)


def test_a_registry_that_has_nothing_is_pinned_to_that(root: Path, tmp_path: Path) -> None:
    elsewhere = made.H200.with_facts({"gpu": "NVIDIA B200"})
    add_bundles(tmp_path / "second", "second", [made.bundle([made.entry(made.key(made.TINY))], environment=elsewhere)])
    request = Request(environment=made.H200, registries=(str(root), str(tmp_path / "second")))
    chosen = pull(request, cache=UserCache(tmp_path / "cache")).selection
    pinned = lock_selection(chosen, FOLDER, lambda name: DirectoryTree(Path(name)))
    assert [registry.manifests for registry in pinned.registries] == [
        {str(FOLDER): sha256(root / MANIFEST)},
        {str(FOLDER): None},
    ]


def test_a_registry_that_has_changed_meanwhile(root: Path, tmp_path: Path) -> None:
    chosen = selection(root, tmp_path / "cache")
    add_bundles(root, "made", [made.bundle([made.entry(made.key(made.CUDNN))])])
    with pytest.raises(UsageError, match=rf"^{root} has changed meanwhile; pull again$"):
        lock_selection(chosen, FOLDER, lambda name: DirectoryTree(Path(name)))


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        pytest.param(
            lock(HUB, B, C, folder=OTHER),
            RegistryLock(
                (LockedRegistry(HUB, {str(FOLDER): A, str(OTHER): B}),), {str(FOLDER): (A, B), str(OTHER): (C,)}
            ),
            id="another folder",
        ),
        pytest.param(lock(HUB, A, C), lock(HUB, A, A, B, C), id="another bundle of the same manifest"),
        pytest.param(lock(HUB, A, B), lock(HUB, A, A, B), id="what it holds"),
        pytest.param(lock(HUB, C, C), lock(HUB, C, C), id="another manifest of the folder"),
        pytest.param(lock("/srv/tuned", C, C), lock("/srv/tuned", C, C), id="another registry"),
        pytest.param(lock(f"{HUB[:-1]}0", A, A), lock(f"{HUB[:-1]}0", A, A), id="another commit"),
    ],
)
def test_a_lock_is_added_to(added: RegistryLock, expected: RegistryLock) -> None:
    before = lock(HUB, A, A, B)
    assert before.with_folder(added) == expected
    assert expected.with_folder(added) == expected, "once more changes nothing"
