"""``fi-tunecache list`` and ``env``: what a registry holds, and what this machine is."""

from __future__ import annotations

import json
from pathlib import Path

import made
import pytest
from command_line import LIKE, CommandLine, only_line
from msgspec import structs

from fi_tunecache.environment import FACTS
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import (
    Manifest,
    RegistryDescriptor,
    Yank,
    read_manifest,
    write_descriptor,
    write_manifest,
)
from fi_tunecache.publish.directory import add_bundles

FOLDER = "0.7.4/nvidia-h200"


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """Two versions; of the second a bundle that is yanked and one whose benefit was measured."""
    root = tmp_path / "registry"
    older = made.H200.with_facts({"flashinfer_version": "0.7.2"})
    entries = [made.entry(made.key(made.CUTLASS)), made.entry(made.key(made.CUDNN, op="fp8_gemm"), -1)]
    add_bundles(
        root,
        "made",
        [
            made.bundle(entries[:1], environment=older, default_raced=None),
            made.bundle(entries, created="2026-12-02"),
            made.bundle(entries[:1], default_raced=False),
        ],
    )
    manifest = root / FOLDER / "manifest.json"
    first, second = read_manifest(manifest.read_bytes(), Folder.parse(FOLDER)).bundles
    first = structs.replace(first, benefit={"bf16_gemm": 0.984, "fp8_gemm": 1.0})
    second = structs.replace(second, yanked=Yank("wrong clocks", "2026-12-04"))
    manifest.write_bytes(write_manifest(Manifest((first, second))))
    return root


def test_what_is_printed(command_line: CommandLine, registry: Path) -> None:
    documents = command_line.json("list", "--registry", registry)["bundles"]
    old, first, second = (row["bundle"] for row in documents)
    lines = command_line.output("list", "--registry", registry).splitlines()
    assert lines == [
        f"3 bundles in {registry}",
        "",
        "0.7.2/nvidia-h200 (NVIDIA H200)",
        "bundle            entries  policy   default raced  created     ops",
        f"{old}        1  default  not known      2026-12-01  bf16_gemm",
        "",
        "0.7.4/nvidia-h200 (NVIDIA H200)",
        "bundle            entries  policy   default raced  created     ops",
        f"{first}        2  default  yes            2026-12-02  bf16_gemm, fp8_gemm",
        f"{second}        1  default  no             2026-12-01  bf16_gemm",
        f"{first}: bf16_gemm takes 0.98 times the default's time",
        f"{first}: fp8_gemm takes 1.00 times the default's time",
        f"{second}: yanked on 2026-12-04, never used: wrong clocks",
    ]


@pytest.mark.parametrize("folder", [FOLDER, "0.7.4/NVIDIA H200"])
def test_one_folder(command_line: CommandLine, registry: Path, folder: str) -> None:
    lines = command_line.output("list", folder, "--registry", registry).splitlines()
    assert lines[0] == f"2 bundles in {registry}"
    assert [line for line in lines if line.endswith("(NVIDIA H200)")] == ["0.7.4/nvidia-h200 (NVIDIA H200)"]


def test_a_folder_that_is_not_there(command_line: CommandLine, registry: Path) -> None:
    arguments = ["list", "0.7.4/nvidia-h100", "--registry", str(registry)]
    assert command_line.fault(3, *arguments) == (
        f"no bundles for 0.7.4/nvidia-h100 in {registry}; see all with `fi-tunecache list`"
    )
    assert command_line.json(*arguments, code=3) == {"registries": [str(registry)], "bundles": []}


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        pytest.param(
            "0.7.4", "'0.7.4' does not name a version and a device; write it like 0.7.4/nvidia-h200", id="no device"
        ),
        pytest.param(
            "../x", "'..' can't be the folder of a FlashInfer version; write a version like 0.7.4", id="a path"
        ),
    ],
)
def test_a_folder_that_can_not_be(command_line: CommandLine, folder: str, line: str) -> None:
    assert command_line.fault(2, "list", folder) == line


def test_an_empty_registry(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "registry.json").write_bytes(write_descriptor(RegistryDescriptor("empty")))
    assert command_line.output("list", "--registry", "./empty") == f"0 bundles in {tmp_path}/empty\n"


def test_a_folder_without_bundles(command_line: CommandLine, registry: Path) -> None:
    (registry / FOLDER / "manifest.json").write_bytes(write_manifest(Manifest()))
    lines = command_line.output("list", FOLDER, "--registry", registry).splitlines()
    assert lines[:3] == [f"0 bundles in {registry}", "", "0.7.4/nvidia-h200 (no bundles)"]


def test_several_registries_are_told_apart(command_line: CommandLine, registry: Path) -> None:
    lines = command_line.output("list", FOLDER, "--registry", registry, "--registry", "embedded").splitlines()
    assert lines[0].endswith(f" bundles in {registry}, embedded")
    assert f"{registry}: 0.7.4/nvidia-h200 (NVIDIA H200)" in lines
    assert "embedded: 0.7.4/nvidia-h200 (NVIDIA H200)" in lines


@pytest.mark.parametrize("separator", [",", " ", ", "])
def test_registries_of_the_environment(
    command_line: CommandLine, registry: Path, monkeypatch: pytest.MonkeyPatch, separator: str
) -> None:
    monkeypatch.setenv("FI_TUNECACHE_REGISTRY", f"{registry}{separator}embedded")
    assert command_line.json("list")["registries"] == [str(registry), "embedded"]
    assert command_line.json("list", "--registry", "embedded")["registries"] == ["embedded"]


def announce(registry: Path, *notices: str) -> None:
    """In the manifest of its one folder."""
    path = registry / "0.7.4/nvidia-h200/manifest.json"
    manifest = read_manifest(path.read_bytes(), Folder.parse("0.7.4/nvidia-h200"))
    path.write_bytes(write_manifest(structs.replace(manifest, notices=notices)))


@pytest.mark.parametrize("command", [["list"], ["resolve", *LIKE], ["pull", *LIKE]])
def test_notices_of_a_folder_are_told(command_line: CommandLine, registry: Path, command: list[str]) -> None:
    announce(registry, "moves to another place in May", "see the card")
    done = command_line(*command, "--registry", registry)
    assert done.code == 0
    assert done.err == (
        f"fi-tunecache: {registry}: moves to another place in May\nfi-tunecache: {registry}: see the card\n"
    )


def test_notices_of_a_registry_are_told_to_who_lists_it(command_line: CommandLine, registry: Path) -> None:
    descriptor = RegistryDescriptor("made", notices=("moves to another place in May",))
    (registry / "registry.json").write_bytes(write_descriptor(descriptor))
    announce(registry, "moves to another place in May", "see the card")
    done = command_line("list", "--registry", registry)
    assert done.err == (
        f"fi-tunecache: {registry}: moves to another place in May\nfi-tunecache: {registry}: see the card\n"
    )
    assert command_line("pull", *LIKE, "--registry", registry).code == 0


def test_a_hit_tells_no_notices(command_line: CommandLine, registry: Path) -> None:
    announce(registry, "moves to another place in May")
    assert command_line("pull", *LIKE, "--registry", registry).err
    assert command_line.output("pull", *LIKE, "--registry", registry).splitlines()[0].endswith("(cached)")


def test_a_path_means_the_same_in_every_directory(
    command_line: CommandLine, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A selection is kept under it."""
    command_line.output("pull", *LIKE, "--registry", f"./{registry.name}")
    document = command_line.json("pull", *LIKE, "--registry", registry)
    assert document["hit"]
    assert document["registries"][0]["name"] == str(registry)
    monkeypatch.chdir("/")
    assert command_line.fault(4, "pull", *LIKE, "--registry", f"./{registry.name}") == (
        f"/{registry.name} {NO_REGISTRY}"
    )


HERE = Path("HERE/at")
"""Stands for the working directory in what is expected."""
NO_REGISTRY = "is not a registry: it has no registry.json; check the path"


def expand(line: str, folder: Path) -> str:
    return line.replace(str(HERE), str(folder)).replace(str(HERE.parent), str(folder.parent))


@pytest.mark.parametrize("command", [["list"], ["resolve", *LIKE], ["pull", *LIKE], ["env", *LIKE]])
@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        pytest.param(
            "made",
            2,
            "'made' is not the name of a registry; use hf://datasets/organisation/name, a path that starts with "
            "/ or ./, or 'embedded'",
            id="a bare word, though there is such a folder",
        ),
        pytest.param(
            "hf://org/name",
            2,
            "'hf://org/name' does not name a dataset repository; write it like hf://datasets/organisation/name",
            id="no dataset of a Hub",
        ),
        pytest.param("./none", 4, f"{HERE}/none {NO_REGISTRY}", id="not there"),
        pytest.param("./plain", 4, f"{HERE}/plain {NO_REGISTRY}", id="a plain folder"),
        pytest.param("../none", 4, f"{HERE.parent}/none {NO_REGISTRY}", id="beside this one"),
    ],
)
def test_what_is_no_registry(command_line: CommandLine, command: list[str], name: str, code: int, line: str) -> None:
    Path("made").mkdir()
    Path("plain").mkdir()
    Path("made", "registry.json").write_bytes(write_descriptor(RegistryDescriptor("made")))
    assert command_line.fault(code, *command, "--registry", name) == expand(line, command_line.folder)


def test_the_facts_of_a_bundle(command_line: CommandLine) -> None:
    lines = command_line.output("env", *LIKE).splitlines()
    assert lines[0].startswith("Facts like 0.7.4/nvidia-h200/")
    assert [line.split()[0] for line in lines[2:9]] == list(FACTS)
    assert lines[2].split() == ["flashinfer_version", "0.7.4"]
    assert lines[7].split() == [
        "cutlass_dsl_version",
        "nvidia-cutlass-dsl-libs-base==4.8.1;nvidia-cutlass-dsl-libs-core==4.8.1;nvidia-cutlass-dsl==4.8.1",
    ]
    assert lines[9] == "All facts are known: `fi-tunecache resolve` shows what fits."


def test_facts_that_are_missing(command_line: CommandLine) -> None:
    Path("facts.json").write_text('{"gpu": "NVIDIA H200", "cublas_version": "cuda-toolkit-13.0"}')
    lines = command_line.output("env", "--environment", "facts.json").splitlines()
    assert lines == [
        "Facts from facts.json",
        "fact                    value",
        "flashinfer_version      undetermined: not given",
        "cuda_version            undetermined: not given",
        "cublas_version          undetermined: cuda-toolkit-13.0 is what FlashInfer guesses",
        "cudnn_version           undetermined: not given",
        "cudnn_frontend_version  undetermined: not given",
        "cutlass_dsl_version     undetermined: not given",
        "gpu                     NVIDIA H200",
        "What is undetermined matches nothing: give it with --fact, or all with --environment or --like.",
    ]


@pytest.mark.parametrize("facts", [(), ("--fact", "cudnn_version=92400"), ("--device", "NVIDIA H100")])
def test_a_saved_environment_gives_the_same_selection(command_line: CommandLine, facts: tuple[str, ...]) -> None:
    """``env --json > FILE`` and ``--environment FILE`` are inverse."""
    saved = command_line.output("env", *LIKE, *facts, "--json")
    Path("facts.json").write_text(saved, "utf-8")
    again = command_line.json("env", "--environment", "facts.json")
    assert again["environment"] == json.loads(saved)["environment"]
    ids = {
        json.loads(command_line("resolve", *source, "--json").out)["selection"]
        for source in ((*LIKE, *facts), ("--environment", "facts.json"))
    }
    assert len(ids) == 1


def test_this_machine(command_line: CommandLine) -> None:
    """Whatever it is: every fact has a value or a reason."""
    document = command_line.json("env", "--probe", "light")
    assert document["origin"] == "of this machine"
    assert {name for name, value in document["environment"].items() if value is None} == set(document["undetermined"])
    assert all(document["undetermined"].values())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(
            ["--fact", "gpu"], "--fact 'gpu' is not NAME=VALUE; write it like --fact cudnn_version=91900", id="no value"
        ),
        pytest.param(
            ["--fact", "gpu="],
            "--fact 'gpu=' is not NAME=VALUE; write it like --fact cudnn_version=91900",
            id="an empty value",
        ),
        pytest.param(
            ["--fact", "cudnn_version=1", "--fact", "cudnn_version=2"],
            "--fact gives two values for cudnn_version; give one",
            id="two values",
        ),
        pytest.param(
            ["--fact", "driver=580"],
            f"'driver' is not a fact; the facts are {', '.join(FACTS)}",
            id="an unknown fact",
        ),
        pytest.param(
            ["--like", "nonsense"],
            "'nonsense/' does not name a version and a device; write it like 0.7.4/nvidia-h200",
            id="--like",
        ),
        pytest.param(
            ["--environment", "none.json"],
            "none.json can't be read (No such file or directory); make it with `fi-tunecache env --json`",
            id="--environment",
        ),
    ],
)
@pytest.mark.parametrize("command", ["env", "resolve", "pull"])
def test_wrong_facts(command_line: CommandLine, command: str, arguments: list[str], line: str) -> None:
    assert command_line.fault(2, command, *arguments) == line


def test_the_same_fact_twice_is_no_contradiction(command_line: CommandLine) -> None:
    arguments = ["env", *LIKE, "--fact", "cudnn_version=1", "--fact", " cudnn_version = 1 "]
    assert command_line.json(*arguments)["environment"]["cudnn_version"] == "1"


def test_a_damaged_descriptor(command_line: CommandLine, registry: Path) -> None:
    (registry / "registry.json").write_bytes(b'{"format":2,"name":"made"}')
    done = command_line("list", "--registry", registry)
    assert (done.code, done.out) == (5, "")
    assert only_line(done.err) == f"{registry}/registry.json: registry format 2 is newer than 1; upgrade fi-tunecache"
