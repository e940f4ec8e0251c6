"""``fi-tunecache pull``: into the cache, into a file, again, and without what it needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import made
import pytest
from command_line import LIKE, CommandLine, only_line, snapshot
from unprivileged import unprivileged

from fi_tunecache.bundle import MARK
from fi_tunecache.environment import Environment
from fi_tunecache.flashinfer_json import read_cache_file
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.selection import read_selection

NEXT_WAY = "give it with --fact cudnn_version=VALUE, or all with --environment FILE or --like"


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return make_registry(tmp_path / "registry")


def make_registry(root: Path) -> Path:
    """One bundle: two CUTLASS entries, one cuDNN entry."""
    entries = [
        made.entry(made.key(made.CUTLASS, 1), 3, 0.5),
        made.entry(made.key(made.CUTLASS, 2), -1, 0.25),
        made.entry(made.key(made.CUDNN, 4), (0, ()), 0.5),
    ]
    add_bundles(root, "made", [made.bundle(entries)])
    return root


@pytest.fixture
def arguments(registry: Path) -> list[str]:
    return ["pull", *LIKE, "--registry", str(registry)]


def selections(command_line: CommandLine) -> list[Path]:
    return [path for path in (command_line.cache / "selections").iterdir() if path.suffixes == [".json"]]


def test_the_main_job_needs_no_gpu_network_or_account(command_line: CommandLine) -> None:
    out = command_line.output("pull", *LIKE, "--to", "tuned.json")

    first, *_, wrote, only, besides = out.splitlines()
    assert "entries for NVIDIA H200, flashinfer 0.7.4 (exact) from embedded@" in first
    assert wrote == 'Wrote tuned.json; load it with flashinfer.autotune(False, cache="tuned.json")'
    assert only.startswith("It loads only where FlashInfer computes the same facts (like 0.7.4/nvidia-h200/")
    assert besides == (
        "For flashinfer 0.7.4 they contain that machine's torch and virtual environment path: "
        "to serve elsewhere, pull there."
    )
    file = read_cache_file(Path("tuned.json").read_bytes())
    assert file.environment().gpu == "NVIDIA H200"
    assert first.startswith(f"{len(file.entries)} entries ")


def test_what_is_printed(command_line: CommandLine, arguments: list[str], registry: Path) -> None:
    lines = command_line.output(*arguments).splitlines()
    (bundle,) = registry.glob("*/*/????????????????.json")
    (selection,) = selections(command_line)
    assert lines[0].startswith(f"3 entries for NVIDIA H200, flashinfer 0.7.4 (exact) from {registry}@")
    assert lines[0].endswith(" ms")
    assert lines[1:] == [
        f"  bundle {bundle.stem}: 3 entries (FlashInfer's default raced)",
        "--match compatible would give the same number of entries.",
        f"Selection: {selection}",
    ]


def test_at_level_compatible_what_is_dropped_is_told(command_line: CommandLine, arguments: list[str]) -> None:
    for _ in range(2):  # the second time it comes from the cache
        lines = command_line.output(*arguments, "--match", "compatible", "--fact", "cudnn_version=92400").splitlines()
        assert lines[2:4] == [
            f"    cudnn_version: registry 91900, here 92400: 1 entry of {made.CUDNN} dropped",
            "--match exact would give nothing.",
        ]
    assert lines[0].endswith(" ms (cached)")


def test_bundles_that_are_not_used_are_counted(command_line: CommandLine, arguments: list[str], registry: Path) -> None:
    older = made.H200.with_facts({"cuda_version": "12.9"})
    add_bundles(registry, "made", [made.bundle([made.entry(made.key(made.CUTLASS))], environment=older)])
    for _ in range(2):
        lines = command_line.output(*arguments, "--fact", "cuda_version=13.0").splitlines()
        assert lines[2] == "  1 other bundle not used: `fi-tunecache resolve` tells why."


def test_a_hit_writes_nothing(command_line: CommandLine, arguments: list[str]) -> None:
    assert not command_line.output(*arguments).splitlines()[0].endswith("(cached)")
    before = snapshot(command_line.folder)
    assert command_line.output(*arguments).splitlines()[0].endswith("(cached)")
    assert snapshot(command_line.folder) == before


def test_a_hit_works_in_a_cache_that_can_not_be_written(
    shared_path: Path, registry: Path, command_line: CommandLine, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = shared_path / "cache"
    monkeypatch.setenv("FI_TUNECACHE_DIR", str(cache))
    command_line.output(*arguments, "--offline")
    facts = shared_path / "facts.json"
    facts.write_text(json.dumps(made.H200.metadata()), "utf-8")
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    with unprivileged():
        offline = ["pull", "--environment", str(facts), "--registry", str(registry), "--offline"]
        assert command_line.output(*offline).splitlines()[0].endswith("(cached)")


def test_a_registry_that_changed_is_read_again(command_line: CommandLine, arguments: list[str], registry: Path) -> None:
    command_line.output(*arguments)
    add_bundles(registry, "made", [made.bundle([made.entry(made.key(made.CUTLASS, 8), 1)])])
    first = command_line.output(*arguments).splitlines()[0]
    assert first.startswith("4 entries ")
    assert not first.endswith("(cached)")


def test_offline_takes_what_is_cached(command_line: CommandLine, registry: Path, arguments: list[str]) -> None:
    facts = Path("facts.json")
    facts.write_text(json.dumps(made.H200.metadata()), "utf-8")
    command = ["pull", "--environment", str(facts), "--registry", str(registry)]
    command_line.output(*command)
    registry.rename("moved")

    assert command_line.output(*command, "--offline").splitlines()[0].endswith("(cached)")
    assert command_line.fault(4, *command) == (f"{registry} is not a registry: it has no registry.json; check the path")


def test_the_file_is_stamped_for_the_environment(command_line: CommandLine, arguments: list[str]) -> None:
    command_line.output(*arguments, "--to", "sub/tuned.json")
    file = read_cache_file(Path("sub", "tuned.json").read_bytes())
    assert file.environment() == made.H200
    assert len(file.entries) == 3
    assert all(MARK in (entry.selection or {}) for entry in file.entries)


def test_a_file_that_pull_made_is_replaced_and_a_link_followed(
    command_line: CommandLine, arguments: list[str], registry: Path
) -> None:
    Path("link.json").symlink_to("real.json")
    command_line.output(*arguments, "--to", "link.json")
    add_bundles(registry, "made", [made.bundle([made.entry(made.key(made.CUTLASS, 8), 1)])])
    command_line.output(*arguments, "--to", "link.json")
    assert Path("link.json").is_symlink()
    assert len(read_cache_file(Path("real.json").read_bytes()).entries) == 4


def changed_by_flashinfer(pulled: bytes) -> bytes:
    """Its own save keeps our metadata and adds ``_generation``."""
    return json.dumps({**json.loads(pulled), "_generation": "0" * 32}).encode()


def saved_by_flashinfer(pulled: bytes) -> bytes:
    document = json.loads(pulled)
    document["_metadata"].pop(MARK)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(changed_by_flashinfer, id="FlashInfer has added to it"),
        pytest.param(saved_by_flashinfer, id="FlashInfer's own"),
        pytest.param(lambda _: b"my notes", id="no JSON"),
        pytest.param(lambda _: b"", id="empty"),
        pytest.param(lambda _: b"[" * 100_000, id="deep"),
        pytest.param(lambda _: b'{"_metadata": {"fi_tunecache": {}}}', id="another file of ours"),
    ],
)
def test_a_file_that_pull_did_not_make_is_replaced_only_by_force(
    command_line: CommandLine, arguments: list[str], change: Callable[[bytes], bytes]
) -> None:
    command_line.output(*arguments, "--to", "tuned.json")
    pulled = Path("tuned.json").read_bytes()
    Path("tuned.json").write_bytes(change(pulled))
    assert command_line.fault(2, *arguments, "--to", "tuned.json") == (
        "tuned.json is there and holds something else than an unchanged file of ours; "
        "name another file, or replace it with --force"
    )
    command_line.output(*arguments, "--to", "tuned.json", "--force")
    assert Path("tuned.json").read_bytes() == pulled


SHORT = "nvidia-cutlass-dsl-libs-base==4.8.1;nvidia-cutlass-dsl==4.8.1"


@pytest.mark.parametrize("command", [[], ["--force"]])
def test_a_fingerprint_as_env_shows_it_is_not_what_0_7_4_stamps(
    command_line: CommandLine, arguments: list[str], command: list[str]
) -> None:
    short = ["--fact", f"cutlass_dsl_version={SHORT}"]
    assert command_line.fault(2, *arguments, *short, "--to", "tuned.json", *command) == (
        "cutlass_dsl_version is not what FlashInfer 0.7.4 stamps, which has hashes; "
        "take it from `fi-tunecache env --json` on the machine that serves"
    )
    assert command_line(*arguments, *short, "--match", "compatible").code == 0, "to be asked about it suffices"


@pytest.mark.parametrize(
    ("version", "fingerprint", "besides"),
    [
        pytest.param("0.7.4", made.H200.metadata()["cutlass_dsl_version"], 1, id="0.7.4 with hashes"),
        pytest.param("0.7.2.post1", SHORT, 0, id="0.7.2.post1, whose whole form it is"),
    ],
)
def test_a_fingerprint_that_is_whole_is_stamped(
    command_line: CommandLine, tmp_path: Path, version: str, fingerprint: str, besides: int
) -> None:
    here = made.H200.with_facts({"flashinfer_version": version, "cutlass_dsl_version": fingerprint})
    add_bundles(tmp_path / "other", "made", [made.bundle([made.entry(made.key(made.CUTLASS))], environment=here)])
    Path("facts.json").write_text(json.dumps(here.metadata()), "utf-8")
    pull = ["pull", "--environment", "facts.json", "--registry", tmp_path / "other", "--to", "tuned.json"]
    lines = command_line.output(*pull).splitlines()
    assert read_cache_file(Path("tuned.json").read_bytes()).environment() == here
    assert sum(line.startswith(f"For flashinfer {version} they contain ") for line in lines) == besides


@pytest.mark.parametrize(
    ("destination", "line"),
    [
        pytest.param("", "--to '' names no file; use --to FILE, such as --to tuned.json", id="no name"),
        pytest.param("folder", "folder is there and not a file; name a new file, such as tuned.json", id="a folder"),
        pytest.param(
            "/dev/null", "/dev/null is there and not a file; name a new file, such as tuned.json", id="a device"
        ),
    ],
)
def test_a_destination_that_is_no_file(
    command_line: CommandLine, arguments: list[str], destination: str, line: str
) -> None:
    Path("folder").mkdir()
    assert command_line.fault(2, *arguments, "--to", destination) == line
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    ("destination", "reason"),
    [
        pytest.param("file/tuned.json", "Not a directory", id="below a file"),
        pytest.param("x" * 300, "File name too long", id="a long name"),
    ],
)
def test_a_destination_that_can_not_be(
    command_line: CommandLine, arguments: list[str], destination: str, reason: str
) -> None:
    Path("file").touch()
    line = command_line.fault(2, *arguments, "--to", destination)
    assert line == f"{destination} can't be written ({reason}); choose another file with --to"


def test_a_file_that_lacks_a_fact_is_not_made(command_line: CommandLine, arguments: list[str]) -> None:
    line = command_line.fault(2, *arguments, "--fact", "cudnn_version=unknown", "--to", "tuned.json")
    assert line == f"FlashInfer would ignore a file that lacks a fact (cudnn_version: not given); {NEXT_WAY}"


def test_the_reason_for_the_fact_is_that_of_the_probe(
    command_line: CommandLine, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command_line.output("env", "--probe", "light")  # imports what it needs
    monkeypatch.setattr(sys, "path", [])  # so that nothing is installed
    facts = [
        item
        for name, value in made.H200.metadata().items()
        if name != "cudnn_frontend_version"
        for item in ("--fact", f"{name}={value}")
    ]
    line = command_line.fault(2, "pull", "--probe", "light", *facts, "--registry", str(registry), "--to", "t.json")
    assert line == (
        "FlashInfer would ignore a file that lacks a fact (cudnn_frontend_version: nvidia-cudnn-frontend is not "
        "installed); give it with --fact cudnn_frontend_version=VALUE, or all with --environment FILE or --like"
    )


def spoil_selection(command_line: CommandLine) -> Path:
    (path,) = selections(command_line)
    path.write_bytes(path.read_bytes().replace(b"91900", b"91901"))
    return path


def spoil_bundle(command_line: CommandLine) -> Path:
    (path,) = (command_line.cache / "bundles").iterdir()
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    return path


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        pytest.param(spoil_selection, "its digest is wrong: the file was changed", id="selection"),
        pytest.param(spoil_bundle, "its sha256 is not its name", id="bundle"),
    ],
)
def test_a_damaged_file_of_the_cache_is_set_aside_and_made_again(
    command_line: CommandLine, arguments: list[str], spoil: Callable[[CommandLine], Path], problem: str
) -> None:
    command_line.output(*arguments)
    path = spoil(command_line)
    (selection,) = selections(command_line)
    if path != selection:  # a bundle is looked at only where the selection is made
        selection.unlink()

    done = command_line(*arguments)
    assert done.code == 0
    assert done.out.startswith("3 entries ")
    assert path.with_name(f"{path.name}.corrupt").is_file()
    assert path.is_file()
    assert only_line(done.err) == f"{path} was damaged ({problem}); it is set aside as {path.name}.corrupt"
    assert command_line.output(*arguments).splitlines()[0].endswith("(cached)")


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"bundles": 3}'])
def test_a_hit_without_its_reasons(command_line: CommandLine, arguments: list[str], content: bytes | None) -> None:
    command_line.output(*arguments)
    (selection,) = selections(command_line)
    reasons = selection.with_name(f"{selection.stem}.resolution.json")
    reasons.unlink()
    if content is not None:
        reasons.write_bytes(content)
    out = command_line.output(*arguments)
    assert ("tells it." in out) == (content != b"{}")
    assert command_line.json(*arguments)["entries"] == 3


def test_a_cache_directory_that_is_relative(
    command_line: CommandLine, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FI_TUNECACHE_DIR", "cache")
    line = command_line.fault(2, *arguments)
    assert line.startswith("FI_TUNECACHE_DIR=cache is not an absolute path")
    assert line.endswith("; set FI_TUNECACHE_DIR to one")


@pytest.mark.parametrize("directory", ["file", "file/below"])
def test_a_cache_where_a_file_is(
    command_line: CommandLine, arguments: list[str], registry: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    Path("file").touch()
    root = command_line.folder / directory
    (bundle,) = command_line.json("list", "--registry", registry)["bundles"]
    monkeypatch.setenv("FI_TUNECACHE_DIR", str(root))
    assert command_line.fault(2, *arguments) == (
        f"{root}/bundles/{bundle['sha256']}.json can't be written (Not a directory: {root}/bundles); free space or fix "
        "its permissions, or set FI_TUNECACHE_DIR to a writable directory; or write a file with --to FILE"
    )


def test_without_a_cache_a_file_is_still_written(
    command_line: CommandLine, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").touch()
    monkeypatch.setenv("FI_TUNECACHE_DIR", str(command_line.folder / "file"))
    done = command_line(*arguments, "--to", "tuned.json")
    assert done.code == 0
    assert done.err.startswith(f"fi-tunecache: not kept in the cache: {command_line.folder}/file/bundles/")
    assert "Selection: " not in done.out
    assert len(read_cache_file(Path("tuned.json").read_bytes()).entries) == 3


def test_a_cache_that_may_not_be_written(
    shared_path: Path, command_line: CommandLine, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command_line.output(*arguments)  # imports what is needed
    facts, cache = shared_path / "facts.json", shared_path / "cache"
    facts.write_text(json.dumps(made.H200.metadata()), "utf-8")
    cache.mkdir(mode=0o555)
    monkeypatch.setenv("FI_TUNECACHE_DIR", str(cache))
    registry = make_registry(shared_path / "registry")
    with unprivileged():
        done = command_line("pull", "--environment", facts, "--registry", registry)
    assert (done.code, done.out) == (2, "")
    assert only_line(done.err).startswith(f"{cache}/bundles/")
    assert "can't be written (Permission denied: " in done.err
    assert list(cache.iterdir()) == []


def test_the_selection_in_the_cache_is_whole(command_line: CommandLine, arguments: list[str]) -> None:
    document = command_line.json(*arguments)
    selection = read_selection(Path(document["path"]).read_bytes())
    assert (selection.id, selection.entries) == (document["selection"], 3)
    facts = read_cache_file(Path(document["path"]).read_bytes()).metadata or {}
    assert Environment.from_metadata(facts).identity() == made.H200.identity()


@pytest.mark.parametrize("command", ["pull", "resolve"])
def test_a_match_level_of_the_environment_that_is_none(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("FI_TUNECACHE_MATCH", "fuzzy")
    assert command_line.fault(2, command, *LIKE) == (
        "FI_TUNECACHE_MATCH: match level 'fuzzy' is not known; use exact or compatible"
    )
    assert command_line(command, *LIKE, "--match", "exact").code == 0


def test_the_match_level_of_the_environment_counts_where_none_is_given(
    command_line: CommandLine, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FI_TUNECACHE_MATCH", "compatible")
    assert command_line.json(*arguments)["match"] == "compatible"
    assert command_line.json(*arguments, "--match", "exact")["match"] == "exact"
    monkeypatch.setenv("FI_TUNECACHE_MATCH", "")
    assert command_line.json(*arguments)["match"] == "exact"


def test_an_op_that_is_skipped(command_line: CommandLine, arguments: list[str]) -> None:
    line = command_line.fault(3, *arguments, "--skip-op", "bf16_gemm")
    assert line.startswith("nothing in ")


def test_another_execution_mode(command_line: CommandLine, registry: Path, arguments: list[str]) -> None:
    line = command_line.fault(3, *arguments, "--execution-mode", "eager")
    assert "measurement policy: registry default, asked for eager" in line
