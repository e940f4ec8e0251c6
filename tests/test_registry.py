"""A registry, whatever its tree: what it hands out was checked."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import made
import msgspec
import pytest

from fi_tunecache.bundle import read_bundle, write_bundle
from fi_tunecache.errors import FormatError, IntegrityError, RegistryError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import Manifest, describe_bundle, write_manifest
from fi_tunecache.registry import Registry, check_bundle_bytes, open_registry
from fi_tunecache.registry_tree import EMBEDDED, DirectoryTree, RegistryTree

ROOT = Path(__file__).parent.parent
H200 = Folder("0.7.4", "nvidia-h200")

SMALL = made.bundle([made.entry(made.key(made.CUDNN))])
DATA, SHA256 = write_bundle(SMALL)
ROW = describe_bundle(SMALL, DATA, SHA256)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A registry of one bundle."""
    (tmp_path / str(H200)).mkdir(parents=True)
    (tmp_path / "registry.json").write_bytes(b'{"format": 1, "name": "test"}')
    (tmp_path / str(H200) / "manifest.json").write_bytes(write_manifest(Manifest((ROW,))))
    (tmp_path / str(H200) / ROW.file).write_bytes(DATA)
    return tmp_path


class _Memory:
    """A tree that is neither a directory nor embedded."""

    name = "memory"

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def revision(self, folder: Folder) -> str | None:
        return "1" if f"{folder}/manifest.json" in self._files else None

    def folders(self) -> tuple[Folder, ...]:
        return tuple(sorted({Folder.parse(path.rpartition("/")[0]) for path in self._files if "/" in path}))

    def read(self, path: str, limit: int) -> bytes | None:
        return self._files.get(path)


def _directory(tmp_path: Path) -> Registry:
    shutil.copytree(ROOT / "manifests", tmp_path / "registry", ignore=shutil.ignore_patterns("__*"))
    return open_registry(str(tmp_path / "registry"))


def _memory(tmp_path: Path) -> Registry:
    paths = (ROOT / "manifests").rglob("*.json")
    tree: RegistryTree = _Memory({path.relative_to(ROOT / "manifests").as_posix(): path.read_bytes() for path in paths})
    return Registry(tree)


# --- every registry behind the protocol


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda tmp_path: open_registry(EMBEDDED), id="embedded"),
        pytest.param(_directory, id="directory"),
        pytest.param(_memory, id="memory"),
    ],
)
def test_all_that_a_registry_holds(make: Callable[[Path], Registry], tmp_path: Path) -> None:
    registry = make(tmp_path)

    assert registry.descriptor().name == "fi-tunecache embedded"
    assert list(map(str, registry.folders())) == ["0.7.2.post1/nvidia-h200", "0.7.4/nvidia-h200"]
    assert {folder: len(registry.manifest(folder).bundles) for folder in registry.folders()} == {
        Folder("0.7.2.post1", "nvidia-h200"): 1,
        H200: 5,
    }
    for folder in registry.folders():
        assert registry.revision(folder)
        for row in registry.manifest(folder).bundles:
            data = registry.bundle_bytes(folder, row)
            bundle = registry.bundle(folder, row)
            assert bundle == registry.bundle(folder, row, data) == read_bundle(data)
            assert describe_bundle(bundle, data, row.sha256, row.benefit) == row

    nowhere = Folder("0.7.4", "nvidia-h100")
    assert registry.manifest(nowhere) == Manifest()
    assert registry.revision(nowhere) is None


def test_the_embedded_registry_is_what_the_script_makes_of_the_data(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "build_embedded_registry.py"
    subprocess.run(
        [sys.executable, script, ROOT / "tests" / "data", tmp_path / "registry"], check=True, capture_output=True
    )

    def files(root: Path) -> dict[str, bytes]:
        paths = [path for path in root.rglob("*") if path.is_file() and path.suffix == ".json"]
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}

    assert files(tmp_path / "registry") == files(ROOT / "manifests")
    assert len(files(ROOT / "manifests")) == 9


# --- what is refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(
            DATA[:-1], rf"size is {ROW.size - 1} bytes, the manifest says {ROW.size}; the file was changed", id="short"
        ),
        pytest.param(b"", rf"size is 0 bytes, the manifest says {ROW.size}", id="empty"),
        pytest.param(DATA + b" ", rf"has more than {ROW.size} bytes; fetch it again or tell the publisher", id="long"),
        pytest.param(
            DATA.replace(b"91900", b"92400"),
            rf"sha256 is .{{16}}…, the manifest says {SHA256[:16]}…; the",
            id="changed",
        ),
        pytest.param(b"x" * ROW.size, r"sha256 is .*fetch it again or tell the publisher", id="other bytes"),
    ],
)
def test_bytes_that_are_not_those_of_the_manifest(root: Path, content: bytes, message: str) -> None:
    (root / str(H200) / ROW.file).write_bytes(content)
    registry = open_registry(str(root))

    with pytest.raises(IntegrityError, match=message) as caught:
        registry.bundle_bytes(H200, ROW)
    assert ROW.file in str(caught.value)
    with pytest.raises(IntegrityError, match=message):
        registry.bundle(H200, ROW)


def test_a_bundle_at_hand_is_not_read_again(root: Path) -> None:
    (root / str(H200) / ROW.file).unlink()

    assert open_registry(str(root)).bundle(H200, ROW, DATA) == SMALL


def test_an_integrity_error_tells_what_was_compared() -> None:
    with pytest.raises(IntegrityError) as caught:
        check_bundle_bytes(DATA[:-1], ROW, "b.json")
    assert (caught.value.expected, caught.value.actual) == (str(ROW.size), str(ROW.size - 1))

    with pytest.raises(IntegrityError) as caught:
        check_bundle_bytes(b"x" * ROW.size, ROW, "b.json")
    assert caught.value.expected == SHA256
    assert len(caught.value.actual) == 64

    check_bundle_bytes(DATA, ROW, "b.json")


def test_a_bundle_that_is_missing(root: Path) -> None:
    (root / str(H200) / ROW.file).unlink()

    with pytest.raises(IntegrityError, match=rf"{ROW.file}: the manifest names it, but it is missing; tell the publ"):
        open_registry(str(root)).bundle(H200, ROW)


def test_a_bundle_that_lies_elsewhere(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / ROW.file
    (root / str(H200) / ROW.file).rename(outside)
    (root / str(H200) / ROW.file).symlink_to(outside)

    with pytest.raises(IntegrityError, match=rf"{H200}/{ROW.file} leads out of the registry; remove the link"):
        open_registry(str(root)).bundle(H200, ROW)


@pytest.mark.parametrize(
    ("wrong", "value"),
    [
        ("environment", {**ROW.environment, "cudnn_version": "92400"}),
        ("policy", {"measure_execution_mode": "eager"}),
        ("default_raced", not ROW.default_raced),
        ("created", "2031-01-01"),
    ],
)
def test_a_bundle_that_its_row_does_not_describe(root: Path, wrong: str, value: object) -> None:
    """What decides whether, and in which order, a bundle is used must be in the bundle itself."""
    row = msgspec.structs.replace(ROW, **{wrong: value})
    with pytest.raises(FormatError, match=rf"{ROW.file}: the manifest is wrong about its {wrong}; tell"):
        open_registry(str(root)).bundle(H200, row)


def test_a_file_with_the_right_hash_that_is_no_bundle(root: Path) -> None:
    document = json.loads(DATA)
    del document["_metadata"]["fi_tunecache"]
    data = json.dumps(document).encode()
    row = describe_bundle(SMALL, data, hashlib.sha256(data).hexdigest())
    (root / str(H200) / row.file).write_bytes(data)

    with pytest.raises(FormatError, match=rf"{row.file}: no provenance: a v1 file, not a bundle"):
        open_registry(str(root)).bundle(H200, row)


def test_a_damaged_manifest(root: Path) -> None:
    (root / str(H200) / "manifest.json").write_bytes(b'{"format": 1, "bundles": [')

    with pytest.raises(FormatError, match=rf"^{root}/{H200}/manifest\.json: not a JSON document"):
        open_registry(str(root)).manifest(H200)


def test_a_manifest_in_the_wrong_folder(root: Path) -> None:
    (root / "0.7.2").mkdir()
    (root / str(H200)).rename(root / "0.7.2" / "nvidia-h200")

    with pytest.raises(
        FormatError, match=r"was tuned with flashinfer 0\.7\.4 on NVIDIA H200, not for 0\.7\.2/nvidia-h200"
    ):
        open_registry(str(root)).manifest(Folder("0.7.2", "nvidia-h200"))


@pytest.mark.parametrize(
    ("descriptor", "error", "message"),
    [
        pytest.param(b'{"format": 2}', FormatError, "registry format 2 is newer than 1; upgrade", id="newer format"),
        pytest.param(b"", FormatError, r"registry\.json: the file is empty", id="empty"),
        pytest.param(None, RegistryError, r"is not a registry: it has no registry\.json; check", id="missing"),
    ],
)
def test_a_descriptor_that_is_none(root: Path, descriptor: bytes | None, error: type[Exception], message: str) -> None:
    registry = Registry(DirectoryTree(root))
    (root / "registry.json").unlink()
    if descriptor is not None:
        (root / "registry.json").write_bytes(descriptor)

    with pytest.raises(error, match=message):
        registry.descriptor()
