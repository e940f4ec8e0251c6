"""``fi-tunecache verify`` and ``cache``: what is wrong, and what the cache holds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import made
import pytest
from command_line import CommandLine, only_line, snapshot
from unprivileged import unprivileged

from fi_tunecache.publish.directory import add_bundles

DATA = Path(__file__).parent / "data"


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    root = tmp_path / "registry"
    add_bundles(root, "made", [made.bundle([made.entry(made.key(made.CUTLASS))])])
    return root


@pytest.fixture
def filled(command_line: CommandLine, registry: Path) -> CommandLine:
    """The same with one selection, its reasons and its bundle in the cache."""
    command_line.output("pull", "--like", "0.7.4/nvidia-h200", "--registry", registry)
    return command_line


def spoil(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])


def test_the_embedded_registry(command_line: CommandLine) -> None:
    files = command_line.json("verify")["checked"][0]["count"]
    for arguments in (["verify"], ["verify", "embedded"]):
        assert command_line.output(*arguments) == f"embedded: {files} files checked, 0 problems\n"


def test_registries_of_the_environment(
    command_line: CommandLine, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FI_TUNECACHE_REGISTRY", f"{registry},embedded")
    assert [row["target"] for row in command_line.json("verify")["checked"]] == [str(registry), "embedded"]


@pytest.mark.parametrize("name", ["registry", "./registry", "{tmp_path}/registry"])
def test_a_registry_by_its_path(command_line: CommandLine, registry: Path, name: str) -> None:
    line = command_line.output("verify", name.format(tmp_path=registry.parent))
    assert line == f"{registry}: 3 files checked, 0 problems\n"


def test_a_damaged_registry(command_line: CommandLine, registry: Path) -> None:
    (bundle,) = registry.glob("*/*/????????????????.json")
    spoil(bundle)
    size = bundle.stat().st_size
    done = command_line("verify", "registry")
    assert (done.code, done.err) == (5, "")
    assert done.out.splitlines() == [
        f"problem: {registry}/0.7.4/nvidia-h200/{bundle.name}: size is {size} bytes, the manifest says {size + 1}; "
        "the file was changed; fetch it again or tell the publisher",
        f"{registry}: 3 files checked, 1 problem",
    ]
    document = command_line.json("verify", "registry", code=5)
    assert document["ok"] is False
    assert document["checked"][0]["problems"] == [done.out.splitlines()[0].removeprefix("problem: ")]


@pytest.mark.parametrize(
    ("path", "checked"),
    [
        pytest.param("h200-flashinfer-0.7.4/gemm-a.v1.json", "90 entries", id="a v1 file"),
        pytest.param("h200-flashinfer-0.7.4/managed-store", "270 entries", id="a store"),
        pytest.param("h200-flashinfer-0.7.4/managed-store/v2/429deefd17fea974", "90 entries", id="one environment"),
    ],
)
def test_a_file_or_a_store(command_line: CommandLine, path: str, checked: str) -> None:
    assert command_line.output("verify", DATA / path) == f"{DATA / path}: {checked} checked, 0 problems\n"


def test_a_pulled_file(filled: CommandLine, registry: Path) -> None:
    filled.output("pull", "--like", "0.7.4/nvidia-h200", "--registry", registry, "--to", "tuned.json")
    assert filled.output("verify", "tuned.json") == "tuned.json: 1 entry checked, 0 problems\n"


def test_a_file_with_problems(command_line: CommandLine) -> None:
    Path("tuned.json").write_text("""{"('mm', 'MmRunner', ((1, 2),))": ["MmRunner", 0]}""")
    done = command_line("verify", "tuned.json")
    assert (done.code, done.err) == (5, "")
    assert done.out.splitlines() == [
        "problem: no _metadata: FlashInfer accepts the file blindly, on any GPU and any version",
        "problem: 1 key without extras: no lookup of FlashInfer 0.6.13 or newer can hit a key without extras",
        "tuned.json: 1 entry checked, 2 problems",
    ]


def test_a_file_that_can_not_be_read_is_a_problem(command_line: CommandLine) -> None:
    Path("tuned.json").touch()
    done = command_line("verify", "tuned.json")
    assert (done.code, done.err) == (5, "")
    assert done.out.splitlines()[1] == "tuned.json: 1 file checked, 1 problem"


def test_a_file_called_cache_is_named_with_its_folder(command_line: CommandLine) -> None:
    Path("cache").write_text('{"_metadata": {}}')
    assert command_line("verify", "./cache").out.endswith("./cache: 0 entries checked, 1 problem\n")


@pytest.mark.parametrize(
    ("target", "line"),
    [
        pytest.param(
            "none.json", "none.json does not exist; name a v1 file, a store, a bundle or a bundled module", id="nothing"
        ),
        pytest.param(
            "folder",
            "folder is not a managed store of FlashInfer, and no registry: it has no registry.json; check the path",
            id="a folder that is neither",
        ),
    ],
)
def test_what_can_not_be_verified(command_line: CommandLine, target: str, line: str) -> None:
    Path("folder").mkdir()
    assert command_line.fault(2, "verify", target).replace(f"{command_line.folder}/", "") == line


def test_the_cache(filled: CommandLine) -> None:
    assert filled.output("verify", "cache") == f"{filled.cache}: 2 files checked, 0 problems\n"


def test_a_damaged_cache_is_told_and_left_as_it_is(filled: CommandLine) -> None:
    (bundle,) = (filled.cache / "bundles").iterdir()
    spoil(bundle)
    before = snapshot(filled.cache)
    for _ in range(2):
        done = filled("verify", "cache")
        assert (done.code, done.err) == (5, "")
        assert done.out.splitlines() == [
            f"problem: {bundle}: the file was changed; the next pull sets it aside and makes it again",
            f"{filled.cache}: 2 files checked, 1 problem",
        ]
    assert snapshot(filled.cache) == before


def test_no_cache_at_all(command_line: CommandLine) -> None:
    assert command_line.output("verify", "cache") == f"{command_line.cache}: 0 files checked, 0 problems\n"
    assert command_line.output("cache", "list") == f"0 files, 0 bytes in {command_line.cache}\n"
    assert command_line.output("cache", "clear") == "0 files removed, 0 bytes\n"
    assert not command_line.cache.exists()


def test_where_the_cache_is(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command_line.output("cache", "dir") == f"{command_line.cache}\n"
    monkeypatch.setenv("FI_TUNECACHE_DIR", "~/tuned")
    monkeypatch.setenv("HOME", "/srv/operator")
    assert command_line.output("cache", "dir") == "/srv/operator/tuned\n"
    monkeypatch.delenv("FI_TUNECACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/srv/operator/xdg")
    assert command_line.output("cache", "dir") == "/srv/operator/xdg/fi-tunecache\n"


def test_what_the_cache_holds(filled: CommandLine) -> None:
    (bundle,) = (filled.cache / "bundles").iterdir()
    spoil(bundle)
    filled("resolve", "--like", "0.7.4/nvidia-h200", "--registry", "./registry")  # sets it aside
    lines = filled.output("cache", "list").splitlines()
    size = sum(path.stat().st_size for path in filled.cache.rglob("*.json*"))
    selection, reasons = sorted((filled.cache / "selections").iterdir(), key=lambda path: len(path.name))

    assert lines[0] == f"3 files, {size:,} bytes in {filled.cache}"
    assert lines[1].split() == ["kind", "name", "bytes", "changed", "(UTC)", "what"]
    rows = [line.split(maxsplit=5) for line in lines[2:]]
    assert [(row[0], row[1], row[2], row[5]) for row in rows] == [
        (
            "bundles",
            bundle.stem[:16],
            f"{bundle.with_name(bundle.name + '.corrupt').stat().st_size:,}",
            "damaged, set aside",
        ),
        (
            "selections",
            selection.stem[:16],
            f"{selection.stat().st_size:,}",
            f"1 entry for NVIDIA H200, flashinfer 0.7.4 (exact) from {filled.folder}/registry",
        ),
        ("selections", selection.stem[:16], f"{reasons.stat().st_size:,}", "its reasons"),
    ]
    assert reasons.name == f"{selection.stem}.resolution.json"


def test_a_damaged_selection_is_listed(filled: CommandLine) -> None:
    selection = min((filled.cache / "selections").iterdir(), key=lambda path: len(path.name))
    spoil(selection)
    assert filled.output("cache", "list").splitlines()[3].endswith("  damaged")


def test_files_of_others_are_neither_listed_nor_removed(filled: CommandLine) -> None:
    listed = filled.json("cache", "list")["files"]
    models = filled.folder / "models"
    models.mkdir()
    foreign = [filled.cache / "bundles" / "notes.json", filled.cache / "hub" / "blob", models / f"{'0' * 64}.json"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    (filled.cache / "selections" / f"{'0' * 32}.json").symlink_to(models / "weights")
    assert filled.json("cache", "list")["files"] == listed
    assert filled.json("cache", "clear")["removed"] == listed
    (filled.cache / "bundles").rename(filled.cache / "others")
    (filled.cache / "bundles").symlink_to(models)
    assert filled.output("cache", "clear") == "0 files removed, 0 bytes\n"
    assert all(path.exists() for path in (*foreign[1:], filled.cache / "others" / "notes.json"))


@pytest.mark.parametrize("command", [["cache", "list"], ["cache", "clear"], ["verify", "cache"]])
def test_a_cache_that_may_not_be_listed(
    command_line: CommandLine, shared_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    command_line.output(*command)  # imports what is needed
    bundles = shared_path / "bundles"
    bundles.mkdir(mode=0)
    monkeypatch.setenv("FI_TUNECACHE_DIR", str(shared_path))
    with unprivileged():
        done = command_line(*command)
    bundles.chmod(0o755)
    assert (done.code, done.out) == (2, "")
    assert only_line(done.err) == f"{bundles} can't be listed (Permission denied); fix its permissions"


def test_old_files_are_pruned(filled: CommandLine) -> None:
    (bundle,) = (filled.cache / "bundles").iterdir()
    old = time.time() - 40 * 86_400
    os.utime(bundle, (old, old))
    size = bundle.stat().st_size
    assert filled.output("cache", "prune", "--older-than", "50") == "0 files removed, 0 bytes\n"
    assert filled.output("cache", "prune") == f"1 file removed, {size:,} bytes\n"
    assert not bundle.exists()
    document = filled.json("cache", "prune", "--older-than", "0")
    assert [row["kind"] for row in document["removed"]] == ["selections", "selections"]


def test_the_cache_is_cleared(filled: CommandLine) -> None:
    document = filled.json("cache", "list")
    assert document["directory"] == str(filled.cache)
    assert filled.json("cache", "clear")["removed"] == document["files"]
    assert filled.json("cache", "list")["files"] == []


@pytest.mark.parametrize("command", ["list", "prune", "clear"])
def test_a_cache_that_is_a_file(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    Path("file").touch()
    monkeypatch.setenv("FI_TUNECACHE_DIR", str(command_line.folder / "file"))
    assert command_line.fault(2, "cache", command) == (
        f"{command_line.folder}/file is not a directory; set FI_TUNECACHE_DIR to one"
    )


def test_a_cache_that_may_not_be_emptied(
    command_line: CommandLine, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles = shared_path / "bundles"
    bundles.mkdir()
    bundle = bundles / f"{'0' * 64}.json"
    bundle.write_text("{}")
    bundles.chmod(0o555)
    monkeypatch.setenv("FI_TUNECACHE_DIR", str(shared_path))
    with unprivileged():
        done = command_line("cache", "clear")
    assert (done.code, done.out) == (2, "")
    assert only_line(done.err).startswith(f"{bundle} can't be removed (Permission denied)")
