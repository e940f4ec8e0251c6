"""Verification: every problem of a registry, a file or the cache is a line, and it does not stop at the first."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import made
import msgspec
import pytest

from fi_tunecache.bundle import write_bundle
from fi_tunecache.errors import UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import BundleRow, read_manifest
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.registry import open_registry
from fi_tunecache.retrieval import pull
from fi_tunecache.selection import Request
from fi_tunecache.user_cache import UserCache
from fi_tunecache.verification import Report, verify_cache, verify_file, verify_registry

DATA = Path(__file__).parent / "data"
EMBEDDED = Path(__file__).parent.parent / "manifests"
FOLDER = Folder.parse("0.7.4/nvidia-h200")


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    root = tmp_path / "registry"
    bundles = [made.bundle([made.entry(made.key(made.CUTLASS), tactic)]) for tactic in (1, 2)]
    add_bundles(root, "made", bundles)
    return root


def rows(root: Path) -> tuple[BundleRow, ...]:
    path = root / str(FOLDER) / "manifest.json"
    return read_manifest(path.read_bytes(), FOLDER).bundles


def change_manifest(root: Path, change: Callable[[list[dict[str, object]]], object]) -> None:
    path = root / str(FOLDER) / "manifest.json"
    document = msgspec.json.decode(path.read_bytes())
    change(document["bundles"])
    path.write_bytes(msgspec.json.encode(document))


def verify(root: Path) -> Report:
    return verify_registry(open_registry(str(root)))


def test_the_embedded_registry_is_what_it_should_be() -> None:
    bundles = len(list(EMBEDDED.glob("*/*/????????????????.json")))
    manifests = len(list(EMBEDDED.glob("*/*/manifest.json")))
    assert verify_registry(open_registry("embedded")) == Report(1 + manifests + bundles, (), "file")


def test_a_registry_that_is_well_made(registry: Path) -> None:
    assert verify(registry) == Report(4, ())


def test_each_damaged_bundle_is_a_line(registry: Path) -> None:
    first, second = rows(registry)
    folder = registry / str(FOLDER)
    data = (folder / first.file).read_bytes()
    (folder / first.file).write_bytes(data.replace(b"2026-12-01", b"2026-12-02"))
    (folder / second.file).unlink()

    report = verify(registry)
    assert report.checked == 4
    changed, missing = report.problems
    assert changed.startswith(f"{registry}/{FOLDER}/{first.file}: sha256 is ")
    assert changed.endswith(
        "the manifest says " + first.sha256[:16] + "…; the file was changed; fetch it again or tell the publisher"
    )
    assert missing == (
        f"{registry}/{FOLDER}/{second.file}: the manifest names it, but it is missing; tell the publisher"
    )


def test_a_bundle_that_breaks_a_rule_is_a_line(registry: Path) -> None:
    (row, _) = rows(registry)
    folder = registry / str(FOLDER)
    bad = (folder / row.file).read_bytes().replace(b'"format":1', b'"format":9', 1)
    _replace_bundle(registry, row, bad)

    (problem,) = verify(registry).problems
    assert problem.endswith("bundle format 9 is newer than 1; upgrade fi-tunecache")


def _replace_bundle(root: Path, row: BundleRow, data: bytes) -> None:
    """Put other bytes in the place of a bundle, under their own name and hash."""
    sha256 = hashlib.sha256(data).hexdigest()
    (root / str(FOLDER) / f"{sha256[:16]}.json").write_bytes(data)

    def rename(bundles: list[dict[str, object]]) -> None:
        (found,) = (item for item in bundles if item["file"] == row.file)
        found.update(file=f"{sha256[:16]}.json", sha256=sha256, size=len(data))

    change_manifest(root, rename)


@pytest.mark.parametrize(
    ("field", "value", "wrong"),
    [
        pytest.param("entries", {"bf16_gemm": {made.CUTLASS: 9}}, "entries", id="counts"),
        pytest.param("lookups", 3, "lookups", id="lookups"),
        pytest.param("created", "2026-12-09", "created", id="date"),
        pytest.param("default_raced", False, "default_raced", id="default"),
        pytest.param("tuning_seconds", 5.0, "tuning_seconds", id="tuning time"),
    ],
)
def test_a_manifest_that_is_wrong_about_a_bundle(registry: Path, field: str, value: object, wrong: str) -> None:
    change_manifest(registry, lambda bundles: bundles[0].update({field: value}))
    (problem,) = verify(registry).problems
    where = f"{registry}/{FOLDER}/{rows(registry)[0].file}"
    assert problem == f"{where}: the manifest is wrong about its {wrong}; tell the publisher"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"yanked": {"reason": "wrong clocks", "date": "2026-12-02"}}, id="yanked"),
        pytest.param({"benefit": {"bf16_gemm": 0.98}}, id="measured afterwards"),
    ],
)
def test_what_the_publisher_adds_later_is_not_wrong(registry: Path, change: dict[str, object]) -> None:
    change_manifest(registry, lambda bundles: bundles[0].update(change))
    assert verify(registry) == Report(4, ())


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        pytest.param("registry.json", b"{", "registry.json: not a JSON document (", id="descriptor"),
        pytest.param(
            "registry.json", b'{"format":9,"name":"a"}', "registry.json: registry format 9 is newer than 1", id="newer"
        ),
        pytest.param(f"{FOLDER}/manifest.json", b"{}", f"{FOLDER}/manifest.json: not a manifest (", id="manifest"),
        pytest.param(
            f"{FOLDER}/manifest.json",
            b'{"format":1,"bundles":[{"file":"../../../etc/passwd"}]}',
            f"{FOLDER}/manifest.json: not a manifest (",
            id="a path that leads out",
        ),
    ],
)
def test_metadata_that_can_not_be_read(registry: Path, file: str, data: bytes, message: str) -> None:
    (registry / file).write_bytes(data)
    (problem,) = verify(registry).problems
    assert problem.startswith(f"{registry}/{message}")


def test_a_bundle_that_is_a_link_out_of_the_registry(registry: Path, tmp_path: Path) -> None:
    (row, _) = rows(registry)
    path = registry / str(FOLDER) / row.file
    shutil.move(path, tmp_path / "outside.json")
    path.symlink_to(tmp_path / "outside.json")
    (problem,) = verify(registry).problems
    assert problem == f"{registry}: {FOLDER}/{row.file} leads out of the registry; remove the link"


@pytest.mark.parametrize(
    ("path", "entries"),
    [
        pytest.param("h200-flashinfer-0.7.4/gemm-a.v1.json", 90, id="a v1 file"),
        pytest.param("h200-flashinfer-0.7.4/managed-store", 270, id="a store"),
        pytest.param("h200-flashinfer-0.7.2.post1/managed-store", 27, id="a store of 0.7.2.post1"),
    ],
)
def test_real_results_are_sound(path: str, entries: int) -> None:
    assert verify_file(DATA / path) == Report(entries, (), "entry")


def test_a_bundle_is_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "bundle.json"
    path.write_bytes(write_bundle(made.bundle([made.entry(made.key(made.CUTLASS))]))[0])
    assert verify_file(path) == Report(1, (), "entry")


def test_the_problems_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text("""{"('mm', 'MmRunner', ((1, 2),))": ["MmRunner", 0]}""")
    assert verify_file(path) == Report(
        1,
        (
            "no _metadata: FlashInfer accepts the file blindly, on any GPU and any version",
            "1 key without extras: no lookup of FlashInfer 0.6.13 or newer can hit a key without extras",
        ),
        "entry",
    )


def test_a_file_that_can_not_be_read_is_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.touch()
    assert verify_file(path) == Report(1, (f"{path}: the file is empty; remove it; whatever wrote it did not finish",))


def test_nothing_there_is_no_problem_but_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        verify_file(tmp_path / "none.json")


def test_a_broken_environment_of_a_store_is_a_line(tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(DATA / "h200-flashinfer-0.7.4" / "managed-store", store)
    manifest = store / "v2" / "645f715d598ccd4e" / "manifest.json"
    manifest.write_bytes(b"{")
    report = verify_file(store)
    assert report.checked == 180
    (problem,) = report.problems
    assert problem.startswith(f"{manifest}: not a JSON document (")


@pytest.fixture
def cache(tmp_path: Path, registry: Path) -> UserCache:
    """With two bundles, one of which is used, and the selection."""
    cache = UserCache(tmp_path / "cache")
    pull(Request(environment=made.H200, registries=(str(registry),)), cache=cache)
    return cache


def cached(cache: UserCache, kind: str) -> Path:
    return next(path for path in sorted((cache.root / kind).iterdir()) if not path.name.endswith(".resolution.json"))


def test_a_cache_that_is_sound(cache: UserCache) -> None:
    assert verify_cache(cache) == Report(2, ())


def test_an_empty_cache_is_sound(tmp_path: Path) -> None:
    assert verify_cache(UserCache(tmp_path / "none")) == Report(0, ())


def test_a_changed_bundle_is_told_and_left_alone(cache: UserCache) -> None:
    path = cached(cache, "bundles")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b" ")

    (problem,) = verify_cache(cache).problems
    assert problem == f"{path}: the file was changed; the next pull sets it aside and makes it again"
    assert path.exists()

    cache.read_bundle(path.stem)  # as pull does
    report = verify_cache(cache)
    assert report == Report(1, (f"{path}.corrupt was damaged and set aside; remove it when you have looked at it",))


def test_a_bundle_under_its_hash_that_is_none(cache: UserCache) -> None:
    data = b"{}"
    path = cache.bundle_path(hashlib.sha256(data).hexdigest())
    path.write_bytes(data)
    (problem,) = verify_cache(cache).problems
    assert problem.startswith(f"{path}: no _metadata: ")


def test_a_changed_selection(cache: UserCache) -> None:
    path = cached(cache, "selections")
    path.write_bytes(path.read_bytes().replace(b"91900", b"91901"))
    (problem,) = verify_cache(cache).problems
    assert problem == f"{path}: its digest is wrong: the file was changed; pull again"


def test_a_selection_under_another_name(cache: UserCache) -> None:
    path = cached(cache, "selections")
    other = path.with_name("0" * 32 + ".json")
    path.rename(other)
    assert verify_cache(cache).problems == (f"{other}: its id is not its name; pull again",)


def test_an_empty_selection(cache: UserCache) -> None:
    path = cached(cache, "selections")
    path.write_bytes(b"")
    (problem,) = verify_cache(cache).problems
    assert problem.startswith(f"{path}: not a selection (")
