"""A registry's tree: which names lead to one, and that no file outside of it is ever read."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from unprivileged import unprivileged

from fi_tunecache.errors import IntegrityError, RegistryError, UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.registry_tree import EMBEDDED, DirectoryTree, open_tree, registry_names

H200 = Folder("0.7.4", "nvidia-h200")
MANIFEST = f"{H200}/manifest.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A registry with one folder and one file beside its manifest."""
    root = tmp_path / "registry"
    (root / str(H200)).mkdir(parents=True)
    (root / "registry.json").write_bytes(b'{"format": 1, "name": "test"}')
    (root / MANIFEST).write_bytes(b"manifest")
    (root / str(H200) / "a.json").write_bytes(b"a")
    (tmp_path / "secret").write_bytes(b"secret")
    return root


# --- reading


def test_bytes_of_a_tree(root: Path) -> None:
    tree = DirectoryTree(root)

    assert tree.read(MANIFEST, 8) == b"manifest"
    assert tree.read(f"{H200}/b.json", 8) is None
    assert tree.read("0.7.4/nvidia-h100/manifest.json", 8) is None
    assert tree.read("registry.json/manifest.json", 8) is None
    assert DirectoryTree(root / "nowhere").read("registry.json", 8) is None
    assert tree.name == str(root)
    assert DirectoryTree(root, "./ours").name == "./ours"


def test_the_revision_of_a_folder_is_that_of_its_manifest(root: Path) -> None:
    tree = DirectoryTree(root)

    assert tree.revision(H200) == hashlib.sha256(b"manifest").hexdigest()[:16]
    assert tree.revision(Folder("0.7.4", "nvidia-h100")) is None
    (root / str(H200) / "a.json").write_bytes(b"b")  # not named by the manifest
    assert tree.revision(H200) == hashlib.sha256(b"manifest").hexdigest()[:16]
    (root / MANIFEST).write_bytes(b"another")
    assert tree.revision(H200) == hashlib.sha256(b"another").hexdigest()[:16]


def test_more_bytes_than_allowed(root: Path) -> None:
    with pytest.raises(
        IntegrityError, match=r"^ours: 0\.7\.4/nvidia-h200/manifest\.json has more than 7 bytes; fetch it"
    ):
        DirectoryTree(root, "ours").read(MANIFEST, 7)


def test_the_folders_of_a_tree(root: Path) -> None:
    for name in ["0.7.2.post1/nvidia-h200", "0.7.4/a40", "0.7.4/Not A Slug", ".git/x", "0.7.4/empty", "docs/a/b"]:
        (root / name).mkdir(parents=True)
    for name in ["0.7.2.post1/nvidia-h200", "0.7.4/a40", "0.7.4/Not A Slug", ".git/x", "docs/a/b"]:
        (root / name / "manifest.json").write_bytes(b"")
    (root / "manifest.json").write_bytes(b"")

    assert DirectoryTree(root).folders() == (Folder("0.7.2.post1", "nvidia-h200"), Folder("0.7.4", "a40"), H200)
    assert DirectoryTree(root / "nowhere").folders() == DirectoryTree(root / "registry.json").folders() == ()


# --- links


def _link_to_file(root: Path) -> None:
    (root / MANIFEST).unlink()
    (root / MANIFEST).symlink_to(root.parent / "secret")


def _link_up(root: Path) -> None:
    (root / MANIFEST).unlink()
    (root / MANIFEST).symlink_to("../../../secret")


def _link_to_folder(root: Path) -> None:
    (root / str(H200)).rename(root.parent / "outside")
    (root / str(H200)).symlink_to(root.parent / "outside")


def _link_of_links(root: Path) -> None:
    (root / MANIFEST).unlink()
    (root / MANIFEST).symlink_to(root / "inside")
    (root / "inside").symlink_to(root.parent / "secret")


def _link_to_neighbour(root: Path) -> None:
    """Whose path starts like the registry's."""
    (root / MANIFEST).unlink()
    (root.parent / "registry2").write_bytes(b"secret")
    (root / MANIFEST).symlink_to(root.parent / "registry2")


@pytest.mark.parametrize("make", [_link_to_file, _link_up, _link_to_folder, _link_of_links, _link_to_neighbour])
def test_a_link_that_leaves_the_tree(root: Path, make: Callable[[Path], None]) -> None:
    make(root)
    tree = DirectoryTree(root, "ours")

    with pytest.raises(IntegrityError, match="leads out of the registry; remove the link") as caught:
        tree.read(MANIFEST, 100)
    assert "secret" not in str(caught.value)
    with pytest.raises(IntegrityError, match="leads out of the registry"):
        tree.revision(H200)


def test_a_link_that_stays_inside(root: Path) -> None:
    (root / "0.7.4" / "alias").symlink_to("nvidia-h200")
    (root / "other.json").symlink_to(MANIFEST)
    tree = DirectoryTree(root)

    assert tree.read("0.7.4/alias/manifest.json", 8) == b"manifest"
    assert tree.read("other.json", 8) == b"manifest"
    assert tree.folders() == (Folder("0.7.4", "alias"), H200)


def test_the_root_may_be_a_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)

    assert DirectoryTree(link).read(MANIFEST, 8) == b"manifest"


def test_a_link_to_nothing_is_nothing(root: Path) -> None:
    (root / MANIFEST).unlink()
    (root / MANIFEST).symlink_to("gone")

    assert DirectoryTree(root).read(MANIFEST, 8) is None


def test_links_in_a_circle(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")

    with pytest.raises(RegistryError, match=r"^ours/a can't be read \(.*symbolic links\)"):
        DirectoryTree(root, "ours").read("a", 8)


# --- what is no file, or can't be read


def test_a_directory_in_the_place_of_a_file(root: Path) -> None:
    (root / MANIFEST).unlink()
    (root / MANIFEST).mkdir()

    with pytest.raises(RegistryError, match=r"^ours/0\.7\.4/nvidia-h200/manifest\.json is not a file; tell"):
        DirectoryTree(root, "ours").read(MANIFEST, 8)


def test_a_pipe_is_not_waited_for(root: Path) -> None:
    (root / MANIFEST).unlink()
    os.mkfifo(root / MANIFEST)
    program = (
        "import pathlib, sys; from fi_tunecache.registry_tree import DirectoryTree\n"
        "try: DirectoryTree(pathlib.Path(sys.argv[1])).read(sys.argv[2], 8)\n"
        "except OSError as error: print(error)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program, root, MANIFEST], check=True, capture_output=True, text=True, timeout=60
    ).stdout

    assert "manifest.json is not a file" in output


def test_a_file_that_may_not_be_read(shared_path: Path) -> None:
    (shared_path / "registry.json").write_bytes(b"{}")
    (shared_path / "a.json").write_bytes(b"{}")
    (shared_path / "a.json").chmod(0)
    tree = DirectoryTree(shared_path, "ours")

    with unprivileged():
        assert tree.read("registry.json", 8) == b"{}"
        with pytest.raises(
            RegistryError, match=r"^ours/a\.json can't be read \(Permission denied\); check its permissions"
        ):
            tree.read("a.json", 8)


def test_a_tree_that_may_not_be_listed(shared_path: Path) -> None:
    tree = DirectoryTree(shared_path / "registry", "ours")
    (shared_path / "registry").mkdir(mode=0)

    with (
        unprivileged(),
        pytest.raises(RegistryError, match=r"^ours can't be listed \(Permission denied\); check its perm"),
    ):
        tree.folders()


def test_a_path_that_is_too_long() -> None:
    with pytest.raises(RegistryError, match=r"can't be read \(File name too long\)"):
        open_tree(f"/{'x' * 300}")


# --- names


@pytest.mark.parametrize(
    ("given", "variable", "names"),
    [
        pytest.param((), None, (EMBEDDED,), id="default"),
        pytest.param((), "", (EMBEDDED,), id="empty variable"),
        pytest.param((), " , ", (EMBEDDED,), id="only separators"),
        pytest.param((), "/a", ("/a",), id="variable"),
        pytest.param((), "/b,/a", ("/b", "/a"), id="in order of precedence"),
        pytest.param((), "/b /a\t/c,\n/d", ("/b", "/a", "/c", "/d"), id="commas and spaces"),
        pytest.param((), "/a,/b,/a", ("/a", "/b"), id="the first of duplicates"),
        pytest.param(("/c", "/d", "/c"), "/a,/b", ("/c", "/d"), id="given ones replace the variable"),
        pytest.param(("/with, space",), None, ("/with, space",), id="a given one is not split"),
    ],
)
def test_the_registries_in_use(given: tuple[str, ...], variable: str | None, names: tuple[str, ...]) -> None:
    environ = {} if variable is None else {"FI_TUNECACHE_REGISTRY": variable}

    assert registry_names(given, environ) == names


@pytest.mark.parametrize("name", ["registry", "org/name", "", "Embedded", "0.7.4/nvidia-h200", "~user/x", "x" * 500])
def test_a_bare_word_is_no_registry(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)  # where a folder of the name "registry" is one

    with pytest.raises(UsageError, match=r"is not the name of a registry; use hf://datasets/organi") as caught:
        open_tree(name)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["{root}", "{root}/", "./registry", "../{parent}/registry", "~/registry"])
def test_a_path_is_a_registry(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    monkeypatch.setenv("HOME", str(root.parent))
    name = name.format(root=root, parent=root.parent.name)
    tree = open_tree(name)

    assert tree.read(MANIFEST, 8) == b"manifest"
    assert tree.name == name


@pytest.mark.parametrize("name", [".", ".."])
def test_this_directory_and_the_one_above(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "sub").mkdir()
    monkeypatch.chdir(root if name == "." else root / "sub")

    assert open_tree(name).folders() == (H200,)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "{root}/0.7.4", "{root}/registry.json"])
def test_a_path_without_a_registry(name: str, root: Path) -> None:
    with pytest.raises(RegistryError, match=r"is not a registry: it has no registry\.json; check the path"):
        open_tree(name.format(root=root))


def test_a_home_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)  # of no user in the password file

    with pytest.raises(RegistryError, match=r"^~/registry is not a registry"):
        open_tree("~/registry")
