"""A registry's folder: its name never leads anywhere else."""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_tunecache.device import Device
from fi_tunecache.environment import Environment
from fi_tunecache.errors import HardwareError, UsageError
from fi_tunecache.folder import Folder


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        pytest.param("0.7.4/nvidia-h200", Folder("0.7.4", "nvidia-h200"), id="slug"),
        pytest.param("0.7.4/NVIDIA H200", Folder("0.7.4", "nvidia-h200"), id="true name"),
        pytest.param("0.7.2.post1/nvidia-h200", Folder("0.7.2.post1", "nvidia-h200"), id="post release"),
        pytest.param("0.7.5.dev20261201/a40", Folder("0.7.5.dev20261201", "a40"), id="development release"),
        pytest.param("0.7.4+cu130/a40", Folder("0.7.4+cu130", "a40"), id="local version"),
        pytest.param("0.7.4/Quadro RTX 6000/8000", Folder("0.7.4", "quadro-rtx-6000-8000"), id="name with a slash"),
    ],
)
def test_a_folder_by_its_name(text: str, folder: Folder) -> None:
    assert Folder.parse(text) == folder
    assert Folder.parse(str(folder)) == folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "'' does not name a version and a device; write it like 0.7.4/nvidia-h200", id="empty"),
        pytest.param("0.7.4", "'0.7.4' does not name a version and a device", id="no device"),
        pytest.param("0.7.4/", "'0.7.4/' does not name a version and a device", id="empty device"),
        pytest.param(
            "/nvidia-h200", "'' can't be the folder of a FlashInfer version; write a version", id="no version"
        ),
        pytest.param("../nvidia-h200", "'..' can't be the folder of a FlashInfer version", id="leads up"),
        pytest.param("0..7/a40", "'0..7' can't be the folder of a FlashInfer version", id="two dots"),
        pytest.param(".git/a40", "'.git' can't be the folder", id="hidden"),
        pytest.param("0.7.4\n/a40", r"'0.7.4\n' can't be the folder", id="newline"),
        pytest.param("0.7 4/a40", "'0.7 4' can't be the folder", id="space"),
        pytest.param("\u0660.\u0667/a40", "can't be the folder", id="other digits"),
        pytest.param("0\\..\\x/a40", "can't be the folder", id="backslashes"),
        pytest.param("C:/a40", "'C:' can't be the folder", id="drive"),
        pytest.param(f"{'0' * 65}/a40", "can't be the folder", id="65 characters"),
        pytest.param("0.7.4/量子", "'-' can't be the folder of a device; write it like nvidia-h200", id="no slug"),
        pytest.param("0.7.4/\x1b[2J", "is not a GPU name", id="terminal escape"),
    ],
)
def test_what_is_no_folder(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Folder.parse(text)

    assert message in str(caught.value)
    assert caught.value.next_step


@pytest.mark.parametrize("slug", ["", "-", "a--b", "-a", "a-", "A", "a.b", "a_b", "..", "a/b", "a\n", "é"])
def test_what_is_no_slug(slug: str) -> None:
    with pytest.raises(UsageError, match="can't be the folder of a device"):
        Folder("0.7.4", slug)


@given(st.text(max_size=12) | st.text("./\\:~0a-+!", max_size=12), st.text("./\\:~0a-", max_size=12))
def test_no_folder_leads_out_of_its_tree(version: str, device: str) -> None:
    try:
        text = str(Folder.parse(f"{version}/{device}"))
    except UsageError:
        return
    assert PurePosixPath(text).parts == tuple(text.split("/"))
    assert len(PureWindowsPath(text).parts) == len(PurePosixPath(text).parts) == 2
    assert ".." not in text
    assert not PureWindowsPath(text).drive


def test_the_folder_of_an_environment() -> None:
    environment = Environment(flashinfer_version="0.7.4", gpu="NVIDIA GeForce RTX 4090 D")

    assert Folder.of(environment) == Folder("0.7.4", Device("NVIDIA GeForce RTX 4090 D").slug)


def test_an_environment_without_a_folder() -> None:
    with pytest.raises(
        UsageError, match=r"FlashInfer's version is not known here; .* --fact flashinfer_version=0\.7\.4"
    ):
        Folder.of(Environment(gpu="NVIDIA H200"))
    with pytest.raises(HardwareError, match="no GPU was found"):
        Folder.of(Environment(flashinfer_version="0.7.4"))


def test_folders_have_an_order() -> None:
    assert sorted([Folder("0.7.4", "b"), Folder("0.7.2", "c"), Folder("0.7.4", "a")]) == [
        Folder("0.7.2", "c"),
        Folder("0.7.4", "a"),
        Folder("0.7.4", "b"),
    ]
