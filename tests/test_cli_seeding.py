"""``pull --to flashinfer`` and ``cache clear --to flashinfer``: what is said, and where it goes."""

from __future__ import annotations

import json
from pathlib import Path

import made
import pytest
from command_line import LIKE, CommandLine, only_line, snapshot
from test_cli_pull import make_registry

from fi_tunecache.bundle import MARK
from fi_tunecache.flashinfer_json import read_cache_file
from fi_tunecache.managed_entry import entry_file
from fi_tunecache.managed_store import environment_folder
from fi_tunecache.measurement_policy import DEFAULT_POLICY
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.source import read_source


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return make_registry(tmp_path / "registry")


@pytest.fixture
def arguments(registry: Path) -> list[str]:
    Path("facts.json").write_text(json.dumps(made.H200.metadata()), "utf-8")
    return ["pull", "--environment", "facts.json", "--registry", str(registry)]


@pytest.fixture
def default_root(command_line: CommandLine) -> Path:
    return command_line.folder / "flashinfer" / ".cache" / "flashinfer" / "autotune"


def folder(root: Path) -> Path:
    return environment_folder(root, made.H200, DEFAULT_POLICY)


def tune(root: Path, runner: str, m: int) -> Path:
    """Have FlashInfer's own winner there."""
    name, data = entry_file(made.entry(made.key(runner, m), 77), None)
    path = folder(root) / "entries" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


WHERE = [
    "They are found only where FlashInfer computes the same facts (from facts.json).",
    "For flashinfer 0.7.4 they contain that machine's torch and virtual environment path: "
    "to serve elsewhere, pull there.",
]


def seeding_lines(out: str) -> list[str]:
    """What is said after the line of the selection."""
    lines = out.splitlines()
    return lines[[line.startswith("Selection: ") for line in lines].index(True) + 1 :]


def test_the_main_job(command_line: CommandLine, default_root: Path) -> None:
    """``--like`` takes the facts of the published environment."""
    out = command_line.output("pull", *LIKE, "--to", "flashinfer")
    (section,) = read_source(default_root).sections
    seeded = f"Seeded {len(section.entries)} entries into {default_root / 'v2' / section.name}"
    assert seeding_lines(out)[0] == f"{seeded}, where flashinfer.autotune_v2 looks"
    assert out.startswith(f"{len(section.entries)} entries for NVIDIA H200, flashinfer 0.7.4 (exact) from embedded@")
    assert all(MARK in (entry.selection or {}) for entry in section.entries)
    assert command_line.output("cache", "clear", "--to", "flashinfer") == (
        f"{len(section.entries)} entries removed from 1 environment of {default_root}\n"
    )


def test_what_is_printed(command_line: CommandLine, arguments: list[str]) -> None:
    there = tune(Path("store"), made.CUBLASLT, 4)
    (folder(Path("store")) / "entries" / "0123456789abcdef01234567.json").touch()
    command = [*arguments, "--to", "flashinfer:store"]
    damaged = "  1 problem in that folder, e.g. store/v2/"

    first = seeding_lines(command_line.output(*command))
    assert first[0] == f"Seeded 2 entries into {folder(Path('store'))}, where flashinfer.autotune_v2 looks"
    assert first[1] == "  1 kept: what FlashInfer has tuned itself for their op and shape stays"
    assert first[2].startswith(damaged)
    assert first[3:] == WHERE

    second = seeding_lines(command_line.output(*command))
    assert second[0] == first[0].replace("2 entries", "0 entries")
    assert second[1] == first[1]
    assert second[2] == "  2 skipped: seeded before"
    assert second[3].startswith(damaged)
    assert there.exists()


def test_what_was_seeded_from_other_bundles_is_told(
    command_line: CommandLine, arguments: list[str], registry: Path
) -> None:
    destination = "flashinfer:my store"
    command_line.output(*arguments, "--to", destination)
    add_bundles(registry, "made", [made.bundle([made.entry(made.key(made.CUTLASS, 1), 9)], created="2027-01-01")])
    lines = seeding_lines(command_line.output(*arguments, "--to", destination))
    assert lines[1:3] == [
        "  3 skipped: seeded before",
        "  1 entry seeded before and not in this selection: `fi-tunecache cache clear --to 'flashinfer:my store'` "
        "removes all that was seeded, then pull again",
    ]
    assert command_line.output("cache", "clear", "--to", destination).startswith("3 entries removed from 1 environment")
    assert command_line.json(*arguments, "--to", destination)["store"]["outdated"] == 0


def test_the_report_for_machines(command_line: CommandLine, arguments: list[str]) -> None:
    tune(Path("store"), made.CUTLASS, 1)
    document = command_line.json(*arguments, "--to", "flashinfer:store")
    path = str(folder(Path("store")))
    counts = {"seeded": 2, "kept": 1, "skipped": 0, "outdated": 0, "left_out": 0}
    assert document["store"] == {"path": path, **counts, "problems": []}
    assert document["file"] is None
    assert command_line.json(*arguments)["store"] is None


def test_a_second_pull_writes_nothing(command_line: CommandLine, arguments: list[str]) -> None:
    command_line.output(*arguments, "--to", "flashinfer:store")
    before = snapshot(command_line.folder)
    assert command_line.output(*arguments, "--to", "flashinfer:store").splitlines()[0].endswith("(cached)")
    assert snapshot(command_line.folder) == before


def test_each_policy_goes_to_its_folder(command_line: CommandLine, arguments: list[str]) -> None:
    command = ["pull", *LIKE, "--to", "flashinfer:store"]
    modes = ("auto", "eager", "cuda_graph")
    folders = {command_line.json(*command, "--execution-mode", mode)["store"]["path"] for mode in modes}
    assert len(folders) == 3
    report = command_line.json("cache", "clear", "--to", "flashinfer:store")
    assert {str(Path(item["path"]).relative_to(command_line.folder)) for item in report["environments"]} == folders
    assert report["entries"] == sum(item["removed"] for item in report["environments"]) > 165
    assert command_line.json("cache", "clear", "--to", "flashinfer:store")["environments"] == []


@pytest.mark.parametrize(
    ("destination", "variables", "root"),
    [
        pytest.param("flashinfer", {}, "flashinfer/.cache/flashinfer/autotune", id="FlashInfer's default"),
        pytest.param("flashinfer", {"FLASHINFER_AUTOTUNE_CACHE_DIR": "own"}, "own", id="FlashInfer's variable"),
        pytest.param("vllm", {"FLASHINFER_AUTOTUNE_CACHE_DIR": "own"}, "own", id="vLLM, without its own"),
        pytest.param("vllm", {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "vllm"}, "vllm", id="vLLM's variable"),
        pytest.param("flashinfer:./named", {"FLASHINFER_AUTOTUNE_CACHE_DIR": "own"}, "named", id="named"),
    ],
)
def test_where_it_goes_and_is_removed_again(
    command_line: CommandLine,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    destination: str,
    variables: dict[str, str],
    root: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command_line.output(*arguments, "--to", destination)
    assert len(read_source(Path(root)).sections[0].entries) == 3
    report = command_line.json("cache", "clear", "--to", destination)
    assert (report["root"], report["entries"]) == (str(command_line.folder / root), 3)
    assert [path.name for path in Path(root).rglob("*") if path.is_file()] == ["manifest.json"]


def test_a_file_may_be_named_like_it(command_line: CommandLine, arguments: list[str]) -> None:
    command_line.output(*arguments, "--to", "./flashinfer")
    assert len(read_cache_file(Path("flashinfer").read_bytes()).entries) == 3


@pytest.mark.parametrize(
    ("options", "line"),
    [
        pytest.param(
            ["--to", "sglang"],
            "SGLang (0.5.23) reads no managed store, but a file for each rank, which must not be placed by hand; "
            "use --to FILE to look at the entries",
            id="SGLang",
        ),
        pytest.param(
            ["--to", "flashinfer", "--force"],
            "--force replaces a FILE; in a managed store nothing is replaced; leave it out",
            id="by force",
        ),
        pytest.param(
            ["--to", "vllm", "--execution-mode", "eager"],
            "vLLM looks for entries of FlashInfer's default policy; leave --execution-mode out",
            id="a policy that vLLM does not have",
        ),
        pytest.param(
            ["--to", "flashinfer", "--fact", "gpu=NVIDIA H200", "--fact", "cudnn_version=unknown"],
            "FlashInfer would not look into a folder of its store that lacks a fact (cudnn_version: not given); "
            "give it with --fact cudnn_version=VALUE, or all with --environment FILE or --like",
            id="a fact that is not known",
        ),
        pytest.param(
            ["--to", "flashinfer", "--fact", "cutlass_dsl_version=nvidia-cutlass-dsl==4.8.1"],
            "cutlass_dsl_version is not what FlashInfer 0.7.4 stamps, which has hashes; "
            "take it from `fi-tunecache env --json` on the machine that serves",
            id="a fingerprint in its short form",
        ),
        pytest.param(
            ["--to", "flashinfer:file"],
            "file/v2/FOLDER can't be written: Not a directory; "
            "free space, check the permissions, or name another folder",
            id="a root that is a file",
        ),
    ],
)
def test_what_is_refused(command_line: CommandLine, arguments: list[str], options: list[str], line: str) -> None:
    Path("file").touch()
    command_line.output(*arguments)  # the selection is stored, whatever becomes of it then
    assert command_line.fault(2, *arguments, *options) == line.replace("FOLDER", f"{folder(Path()).name}/entries")


def test_without_a_cache_it_is_still_seeded(
    command_line: CommandLine, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").touch()
    monkeypatch.setenv("FI_TUNECACHE_DIR", str(command_line.folder / "file"))
    done = command_line(*arguments, "--to", "flashinfer:store")
    assert done.code == 0
    assert only_line(done.err).startswith("not kept in the cache: ")
    assert "Seeded 3 entries into " in done.out


# --- cache clear


def test_there_is_nothing_to_remove(command_line: CommandLine) -> None:
    root = command_line.folder / "none"
    command = ["cache", "clear", "--to", "flashinfer:none"]
    assert command_line.output(*command) == f"0 entries removed: there is no managed store in {root}\n"
    assert command_line.json(*command) == {"root": str(root), "entries": 0, "environments": [], "problems": []}
    tune(root, made.CUTLASS, 1)
    assert command_line.output(*command) == f"0 entries removed from 0 environments of {root}\n"


def test_a_folder_that_is_passed_over_is_told(command_line: CommandLine, arguments: list[str]) -> None:
    command_line.output(*arguments, "--to", "flashinfer:elsewhere")
    Path("store").mkdir()
    Path("store", "v2").symlink_to(command_line.folder / "elsewhere" / "v2")
    root = command_line.folder / "store"
    problem = f"{folder(root) / 'entries'} leads out of the store by a link, which is not followed"
    command = ["cache", "clear", "--to", "flashinfer:store"]
    assert command_line.output(*command).splitlines() == [
        f"0 entries removed from 0 environments of {root}",
        f"  {problem}",
    ]
    assert command_line.json(*command)["problems"] == [problem]


def test_the_user_cache_stays(command_line: CommandLine, arguments: list[str]) -> None:
    command_line.output(*arguments, "--to", "flashinfer:store")
    before = snapshot(command_line.cache)
    command_line.output("cache", "clear", "--to", "flashinfer:store")
    assert snapshot(command_line.cache) == before
    command_line.output(*arguments, "--to", "flashinfer:store")
    store = snapshot(Path("store"))
    assert "3 files removed" in command_line.output("cache", "clear", "--to", "cache")
    assert snapshot(Path("store")) == store


@pytest.mark.parametrize("destination", ["tuned.json", "", "./flashinfer"])
def test_what_is_no_store_is_not_cleared(command_line: CommandLine, destination: str) -> None:
    assert command_line.fault(2, "cache", "clear", "--to", destination) == (
        f"--to {destination!r} names no managed store; a file is yours to remove; see --help"
    )
