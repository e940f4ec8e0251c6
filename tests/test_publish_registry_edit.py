"""An edit of a registry: a merge that loses nothing, and the files that make it, each of them once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_manifests import registry, row, yanked

from fi_tunecache.errors import FormatError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import (
    BundleRow,
    Manifest,
    RegistryDescriptor,
    Yank,
    read_descriptor,
    read_manifest,
    write_manifest,
)
from fi_tunecache.publish.card import dataset_card
from fi_tunecache.publish.registry_edit import Edit, Snapshot, files_to_write, read_card
from fi_tunecache.registry_tree import DirectoryTree

H200, H100 = Folder("0.7.4", "nvidia-h200"), Folder("0.7.4", "nvidia-h100")
OURS = RegistryDescriptor("ours", notices=("moving soon",))

rows = st.builds(
    lambda number, yank: yanked(number, yank) if yank else row(number),
    st.integers(0, 5),
    st.sampled_from(["", "", "slow", "wrong"]),
)
row_lists = st.lists(rows, max_size=8)
manifests = st.builds(lambda held, serial: Manifest(serial=serial).with_rows(held), row_lists, st.integers(0, 9))


def held(manifest: Manifest) -> dict[str, bool]:
    """Whether each of its bundles is yanked."""
    return {item.file: item.yanked is not None for item in manifest.bundles}


# --- a manifest takes rows


@given(manifests, row_lists)
def test_no_row_is_lost_and_the_old_ones_keep_their_places(manifest: Manifest, added: list[BundleRow]) -> None:
    now = manifest.with_rows(added)
    assert [item.file for item in now.bundles[: len(manifest.bundles)]] == [item.file for item in manifest.bundles]
    assert held(now).keys() == {item.file for item in (*manifest.bundles, *added)}


@given(manifests, row_lists)
def test_what_is_yanked_anywhere_is_yanked_for_good(manifest: Manifest, added: list[BundleRow]) -> None:
    yanks = {item.file for item in (*manifest.bundles, *added) if item.yanked}
    assert {file for file, yank in held(manifest.with_rows(added)).items() if yank} == yanks


@given(manifests, row_lists)
def test_adding_again_gives_the_very_same_manifest(manifest: Manifest, added: list[BundleRow]) -> None:
    now = manifest.with_rows(added)
    assert now.with_rows(added) is now
    assert now.with_rows(manifest.bundles) is now


@given(st.data(), manifests, st.lists(row_lists, min_size=2, max_size=4))
def test_the_order_in_which_publishers_arrive_does_not_matter(
    data: st.DataObject, manifest: Manifest, edits: list[list[BundleRow]]
) -> None:
    def after(order: list[list[BundleRow]]) -> dict[str, bool]:
        now = manifest
        for added in order:
            now = now.with_rows(added)
        return held(now)

    assert after(data.draw(st.permutations(edits))) == after(edits) == held(manifest.with_rows(itertools.chain(*edits)))


@given(manifests, row_lists, st.integers(0, 12))
def test_each_change_has_a_serial_of_its_own(manifest: Manifest, added: list[BundleRow], after: int) -> None:
    now = manifest.with_rows(added, after=after)
    if now is manifest:
        assert now.serial >= after
    else:
        assert now.serial == max(manifest.serial, after) + 1
    assert now.with_rows(added, after=after) is now


def test_what_is_there_stays_as_it_is() -> None:
    """The first to publish a bundle said what is said of it, the first to yank it why."""
    first = Manifest().with_rows([row(1, lookups=3), yanked(2, "slow")])
    assert first.with_rows([row(1, lookups=0, benefit={"bf16_gemm": 0.5}), yanked(2, "wrong")]) is first

    now = first.with_rows([yanked(1, "wrong", lookups=9)])
    assert now.bundles[0] == row(1, lookups=3, yanked=Yank("wrong", "2026-12-02"))


def test_the_rest_of_a_manifest_is_kept() -> None:
    manifest = Manifest(notices=("moving soon",), serial=4)
    assert manifest.with_rows([row(1)]) == Manifest((row(1),), notices=("moving soon",), serial=5)


# --- an edit of several


@pytest.mark.parametrize(
    ("edit", "there", "done"),
    [
        pytest.param(Edit({}), {}, True, id="nothing to do"),
        pytest.param(Edit({H200: (row(1),)}), {}, False, id="no such folder"),
        pytest.param(Edit({H200: (row(1),)}), registry(row(1)), True, id="there"),
        pytest.param(Edit({H200: (row(1), row(2))}), registry(row(1)), False, id="half of it"),
        pytest.param(Edit({H200: (row(1),)}), registry(yanked(1)), True, id="there, and yanked since"),
        pytest.param(Edit({H200: (yanked(1),)}), registry(row(1)), False, id="not yanked yet"),
        pytest.param(Edit({H200: (row(1),)}), {H100: registry(row(1))[H200]}, False, id="in another folder"),
        pytest.param(Edit({H200: (row(1),)}, serials={H200: 1}), registry(row(1)), True, id="at this serial"),
        pytest.param(Edit({H200: (row(1),)}, serials={H200: 2}), registry(row(1)), False, id="the serial is behind"),
    ],
)
def test_whether_an_edit_is_done(edit: Edit, there: Mapping[Folder, Manifest], done: bool) -> None:
    assert edit.done_in(there) is done


def test_what_others_had_written_is_put_back_by_the_same_edit() -> None:
    lost = registry(row(2), yanked(3))
    edit = Edit({H200: (row(1),)}, {f"{H200}/{row(1).file}": b"1"}).with_manifests(lost)

    assert edit.serials == {H200: 2}
    assert edit.files == {f"{H200}/{row(1).file}": b"1"}
    assert edit.applied_to({})[H200] == Manifest((row(1), row(2), yanked(3)), serial=3)


def test_the_serial_is_beyond_all_that_were_seen() -> None:
    edit = Edit({H200: (row(1),)})
    for serial in (5, 3):
        edit = edit.with_manifests({H200: Manifest(serial=serial)})
    assert edit.applied_to({})[H200].serial == 6


# --- the files


def written(edit: Edit, snapshot: Snapshot) -> dict[str, bytes]:
    return files_to_write(edit, snapshot, "a title", "hf://datasets/team/tuned")


def of(*items: BundleRow, folder: Folder = H200) -> Edit:
    """An edit that brings these rows with their bytes."""
    return Edit({folder: items}, {f"{folder}/{item.file}": item.file.encode() for item in items})


def manifest_in(files: Mapping[str, bytes], folder: Folder = H200) -> Manifest:
    return read_manifest(files[f"{folder}/manifest.json"], folder)


def test_a_new_registry() -> None:
    files = written(of(row(1), row(2)), Snapshot(None))
    assert list(files) == [
        "registry.json",
        f"{H200}/{row(1).file}",
        f"{H200}/{row(2).file}",
        "coverage.svg",
        "README.md",
        f"{H200}/manifest.json",
    ]
    assert read_descriptor(files["registry.json"]) == RegistryDescriptor("a title")
    assert manifest_in(files) == Manifest((row(1), row(2)), serial=1)
    assert b"fi-tunecache pull --registry hf://datasets/team/tuned" in files["README.md"]


def test_a_registry_without_bundles() -> None:
    assert list(written(Edit({}), Snapshot(None))) == ["registry.json", "coverage.svg", "README.md"]


def test_only_what_is_new_is_written() -> None:
    there = Snapshot("c", registry(row(1), row(0, gpu="NVIDIA H100")), OURS, "# By hand\n")
    files = written(of(row(1), row(2)), there)

    assert list(files) == [f"{H200}/{row(2).file}", "coverage.svg", "README.md", f"{H200}/manifest.json"]
    assert manifest_in(files) == Manifest((row(1), row(2)), serial=2)
    now = registry(row(1), row(2), row(0, gpu="NVIDIA H100"))
    assert files["README.md"].decode() == dataset_card("hf://datasets/team/tuned", OURS, now, "# By hand\n")


def test_several_folders_at_once() -> None:
    here, there = row(1), row(1, gpu="NVIDIA H100")
    edit = Edit({H200: (here,), H100: (there,)}, {f"{H200}/{here.file}": b"1", f"{H100}/{there.file}": b"2"})
    files = written(edit, Snapshot("c", {}, OURS))

    assert list(files)[:2] == [f"{H200}/{here.file}", f"{H100}/{there.file}"]
    assert list(files)[-2:] == [f"{H200}/manifest.json", f"{H100}/manifest.json"]
    assert len(files) == 6


def test_a_yank_writes_no_bundle() -> None:
    files = written(Edit({H200: (yanked(1),)}), Snapshot("c", registry(row(1)), OURS))
    assert list(files) == ["coverage.svg", "README.md", f"{H200}/manifest.json"]
    assert manifest_in(files).bundles == (yanked(1),)


def test_rows_that_are_put_back_have_their_files_in_the_registry_already() -> None:
    edit = of(row(1)).with_manifests(registry(row(2)))
    files = written(edit, Snapshot("c", {}, OURS))
    assert [path for path in files if path.endswith((row(1).file, row(2).file))] == [f"{H200}/{row(1).file}"]
    assert manifest_in(files).bundles == (row(1), row(2))


@given(st.lists(rows, min_size=1, max_size=4), st.lists(rows, max_size=4))
def test_what_was_written_is_not_written_again(added: list[BundleRow], there: list[BundleRow]) -> None:
    edit = of(*added)
    before = Snapshot("c", registry(*there), OURS, "")
    files = written(edit, before)
    after = {**before.manifests, **({H200: manifest_in(files)} if files else {})}

    assert edit.done_in(after)
    assert written(edit, msgspec.structs.replace(before, manifests=after)) == {}


def test_a_manifest_that_nobody_could_read_is_not_written() -> None:
    """Such as one that has become too long."""
    full = Manifest(tuple(row(number) for number in range(10_000)))
    with pytest.raises(FormatError, match="10001 bundles are more than 10000"):
        written(of(row(10_000)), Snapshot("c", {H200: full}, OURS))


def test_a_row_goes_into_the_folder_that_it_belongs_to() -> None:
    with pytest.raises(FormatError, match=r"not for 0\.7\.4/nvidia-h100"):
        written(of(row(1), folder=H100), Snapshot("c", {}, OURS))


@given(manifests)
def test_a_manifest_is_written_as_it_is_read(manifest: Manifest) -> None:
    assert read_manifest(write_manifest(manifest), H200) == manifest


# --- the card that is there


@pytest.mark.parametrize(
    ("data", "card"),
    [
        pytest.param(None, None, id="none"),
        pytest.param(b"", "", id="empty"),
        pytest.param("# Größe\r\n".encode(), "# Größe\r\n", id="text"),
    ],
)
def test_the_card_is_read(tmp_path: Path, data: bytes | None, card: str | None) -> None:
    if data is not None:
        (tmp_path / "README.md").write_bytes(data)
    assert read_card(DirectoryTree(tmp_path)) == card


def test_a_card_that_could_not_be_kept(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes("# Größe".encode("latin-1"))
    with pytest.raises(FormatError, match=r"^ours/README.md: not UTF-8 text; save it as UTF-8$"):
        read_card(DirectoryTree(tmp_path, "ours"))
