"""What a path stands for: a file or a store itself, or what engines leave below a directory."""

from __future__ import annotations

import os
from pathlib import Path

import made
import made_sources
import pytest
from unprivileged import unprivileged

from fi_tunecache.bundle import write_bundle
from fi_tunecache.errors import IntegrityError, UsageError
from fi_tunecache.managed_store import write_entries
from fi_tunecache.measurement_policy import DEFAULT_POLICY
from fi_tunecache.publish.source_paths import cached_bundle_paths, find_sources
from fi_tunecache.source import SourceKind, read_source
from fi_tunecache.user_cache import UserCache

DATA = Path(__file__).parent / "data"
STORE = DATA / "h200-flashinfer-0.7.4" / "managed-store"
ENTRY = made.entry(made.key(made.CUTLASS))


def touch(root: Path, *names: str) -> list[Path]:
    return [made_sources.v1_file(root / name, [ENTRY]) for name in names]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(DATA / "h200-flashinfer-0.7.4" / "gemm-a.v1.json", id="a file"),
        pytest.param(STORE, id="a store"),
        pytest.param(STORE / "v2", id="its folder v2"),
        pytest.param(STORE / "v2" / "645f715d598ccd4e", id="one environment"),
    ],
)
def test_itself(path: Path) -> None:
    assert find_sources(path) == [path]
    assert read_source(path).sections


def test_what_vllm_leaves(tmp_path: Path) -> None:
    ranks = [f"0.7.2/90a/4f1d/autotune_configs_dp{dp}_rank{rank}.json" for dp in (0, 1) for rank in (0, 10)]
    files = touch(tmp_path, *ranks)
    touch(tmp_path, "0.7.2/90a/4f1d/autotune_configs_dp0_rank0.json.tmp", "other.json", "4f1d/config.json")

    for root in (tmp_path, tmp_path / "0.7.2" / "90a"):
        assert find_sources(root) == sorted(files)


def test_what_sglang_leaves(tmp_path: Path) -> None:
    folder = "flashinfer/autotune/0.7.2/sm90/0123456789abcdef"
    files = touch(tmp_path, f"{folder}/rank_tp0_pp0_dp0.json", f"{folder}/rank_tp1_pp0_dp0.json")
    touch(tmp_path, f"{folder}/rank_tp1.json", f"{folder}/rank_tp0_pp0_dp0.json.bak")

    assert find_sources(tmp_path) == files


def test_stores_and_files_below_one_directory(tmp_path: Path) -> None:
    (file,) = touch(tmp_path, "4f1d/autotune_configs_dp0_rank0.json")
    for root in (tmp_path, tmp_path / "rank_tp0_pp0_dp0"):
        write_entries(root, made.H200, DEFAULT_POLICY, [ENTRY])
    touch(tmp_path, "v2/autotune_configs_dp0_rank0.json")  # a store's folder is read as a store

    assert find_sources(tmp_path) == [tmp_path, file, tmp_path / "rank_tp0_pp0_dp0"]


def test_no_deeper_than_eight_folders(tmp_path: Path) -> None:
    (file,) = touch(tmp_path, "1/2/3/4/5/6/7/8/rank_tp0_pp0_dp0.json")
    touch(tmp_path, "1/2/3/4/5/6/7/8/9/rank_tp0_pp0_dp0.json")

    assert find_sources(tmp_path) == [file]


def test_nothing_found(tmp_path: Path) -> None:
    touch(tmp_path, "other.json")
    (tmp_path / "v2").mkdir()
    with pytest.raises(UsageError) as caught:
        find_sources(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds no managed store of FlashInfer (v2/<hash>) and no file of a rank "
        "(autotune_configs_dp0_rank0.json of vLLM, rank_tp0_pp0_dp0.json of SGLang); "
        "name a file, a bundle, a managed store or the cache directory of an engine"
    )


def test_what_is_not_there_is_said_when_it_is_read(tmp_path: Path) -> None:
    (path,) = find_sources(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"none\.json does not exist"):
        read_source(path)


# --- links


def test_a_link_that_was_named(tmp_path: Path) -> None:
    (file,) = touch(tmp_path, "real/4f1d/autotune_configs_dp0_rank0.json")
    (tmp_path / "link").symlink_to(tmp_path / "real")

    assert find_sources(tmp_path / "link") == [tmp_path / "link" / file.relative_to(tmp_path / "real")]


def test_a_link_inside(tmp_path: Path) -> None:
    (file,) = touch(tmp_path, "4f1d/autotune_configs_dp0_rank0.json")
    link = file.with_name("autotune_configs_dp0_rank1.json")
    link.symlink_to(file)

    assert find_sources(tmp_path) == [file, link]


@pytest.mark.parametrize("name", ["4f1d/autotune_configs_dp0_rank0.json", "v2"])
def test_a_link_that_leads_out(tmp_path: Path, name: str) -> None:
    (outside,) = touch(tmp_path, "outside.json")
    store = write_entries(tmp_path / "store", made.H200, DEFAULT_POLICY, [ENTRY]).path.parent
    link = tmp_path / "root" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(store if name == "v2" else outside)

    with pytest.raises(UsageError) as caught:
        find_sources(tmp_path / "root")
    assert str(caught.value) == f"{link} is a link that leaves {tmp_path / 'root'}; name what it leads to"


def test_a_circle_of_links(tmp_path: Path) -> None:
    (file,) = touch(tmp_path, "4f1d/autotune_configs_dp0_rank0.json")
    (tmp_path / "4f1d" / "again").symlink_to(tmp_path)

    assert find_sources(tmp_path) == [file]


@pytest.mark.parametrize("name", ["closed", "v2"])
def test_a_folder_that_may_not_be_listed(shared_path: Path, name: str) -> None:
    closed = shared_path / name
    closed.mkdir(mode=0)
    with unprivileged(), pytest.raises(UsageError) as caught:
        find_sources(shared_path)
    assert str(caught.value) == f"{closed} can't be listed (Permission denied); check its permissions"
    closed.chmod(0o700)


# --- the user cache


def test_the_bundles_of_the_user_cache(tmp_path: Path) -> None:
    cache = UserCache(tmp_path)
    data, sha256 = write_bundle(made.bundle([ENTRY]))
    cache.store_bundle(sha256, data)
    (tmp_path / "bundles" / f"{'0' * 64}.json.corrupt").write_bytes(b"")
    cache.store(cache.selection_path("0" * 32), b"{}")

    (path,) = cached_bundle_paths(cache)
    assert path == cache.bundle_path(sha256)
    assert read_source(path).kind is SourceKind.BUNDLE
    assert made_sources.gathered(read_source(path)).data == data


def test_an_empty_cache(tmp_path: Path) -> None:
    assert cached_bundle_paths(UserCache(tmp_path / "none")) == []


def test_a_cached_bundle_that_was_changed(tmp_path: Path) -> None:
    cache = UserCache(tmp_path)
    data, sha256 = write_bundle(made.bundle([ENTRY]))
    cache.store_bundle(sha256, data)
    os.chmod(cache.bundle_path(sha256), 0o644)  # noqa: PTH101
    cache.bundle_path(sha256).write_bytes(data.replace(b"2026-12-01", b"2026-12-02"))

    with pytest.raises(IntegrityError, match="the file was changed; fetch it again"):
        made_sources.gathered(*map(read_source, cached_bundle_paths(cache)))
