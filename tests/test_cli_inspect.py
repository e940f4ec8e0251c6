"""``fi-tunecache inspect``: what is in a source, and in what two sources differ."""

from __future__ import annotations

import json
import os
from pathlib import Path

import made
import pytest
from command_line import LIKE, CommandLine
from msgspec import structs

from fi_tunecache.bundle import MARK, Workload, write_bundle
from fi_tunecache.flashinfer_json import CacheFile, write_cache_file

DATA = Path(__file__).parent / "data" / "h200-flashinfer-0.7.4"
V1 = DATA / "gemm-a.v1.json"
STORE = DATA / "managed-store"
DEFAULT = STORE / "v2" / "429deefd17fea974"
CUDA_GRAPH = STORE / "v2" / "a27045c5dbc185b2"
REDUCED = "nvidia-cutlass-dsl-libs-base==4.8.1;nvidia-cutlass-dsl-libs-core==4.8.1;nvidia-cutlass-dsl==4.8.1"
KEY = (
    "('bf16_gemm', 'CublasltBf16GemmRunner', ((1, 2048), (2048, 4096), (0,), (0,), (-1, 4096), (-1,)), "
    "(torch.bfloat16, torch.bfloat16, torch.bfloat16, True, True))"
)


def words(line: str) -> list[str]:
    return line.split()


def test_a_v1_file(command_line: CommandLine) -> None:
    lines = command_line.output("inspect", V1).splitlines()
    assert lines[:10] == [
        f"{V1}: FlashInfer v1 file",
        "",
        "  flashinfer_version: 0.7.4",
        "  cuda_version: 13.0",
        "  cublas_version: 13.1.0",
        "  cudnn_version: 91900",
        "  cudnn_frontend_version: 1.32.0",
        f"  cutlass_dsl_version: {REDUCED}",
        "  gpu: NVIDIA H200",
        "  90 entries",
    ]
    assert [words(line) for line in lines[10:16]] == [
        ["op", "runner", "entries", "shapes", "tactic", "-1", "time"],
        ["bf16_gemm", "CublasltBf16GemmRunner", "18", "18", "0", "8.3", "to", "17.3", "µs"],
        ["bf16_gemm", "CudnnBf16GemmRunner", "36", "36", "0", "8.0", "to", "49.0", "µs"],
        ["bf16_gemm", "TinyGemmBf16GemmRunner", "18", "18", "0", "9.9", "to", "203.8", "µs"],
        ["fp8_gemm", "CublasFp8GemmRunner", "8", "8", "0", "5.4", "to", "9.9", "µs"],
        ["fp8_gemm", "CudnnFp8GemmRunner", "10", "10", "0", "5.0", "to", "6.5", "µs"],
    ]
    assert lines[16:] == [
        "  measured with cuda_graph_profile_replays=1, l2_cache_policy=cold-chain:8: bf16_gemm",
        "  measured with cuda_graph_profile_replays=None, l2_cache_policy=hot: fp8_gemm",
    ]


def test_every_entry_with_its_shapes_tactic_and_time(command_line: CommandLine) -> None:
    lines = command_line.output("inspect", V1, "--all").splitlines()
    start = lines.index("bf16_gemm CublasltBf16GemmRunner (torch.bfloat16, torch.bfloat16, torch.bfloat16, True, True)")
    assert words(lines[start + 1]) == ["shapes", "tactic", "time"]
    assert lines[start + 2].startswith("((1, 2048), (2048, 4096), (0,), (0,), (-1, 4096), (-1,))  ")
    assert words(lines[start + 2])[-3:] == ["0", "8.4", "µs"]
    assert sum(line.startswith("((") for line in lines) == 90


def test_a_store_by_environment(command_line: CommandLine) -> None:
    lines = command_line.output("inspect", STORE).splitlines()
    assert lines[0] == f"{STORE}: FlashInfer managed store"
    assert [line for line in lines if line.startswith(("Environment", "  measurement"))] == [
        "Environment 429deefd17fea974",
        "  measurement policy: default",
        "Environment 645f715d598ccd4e",
        "  measurement policy: eager",
        "Environment a27045c5dbc185b2",
        "  measurement policy: cuda_graph",
    ]


def test_a_bundle_with_its_provenance(command_line: CommandLine) -> None:
    entry = made.entry(made.key(made.CUTLASS))
    bundle = made.bundle([entry], [made.lookup([made.CUTLASS], made.CUTLASS)], default_raced=None)
    provenance = structs.replace(
        bundle.provenance, tuning_seconds=58.8, driver="580.1", workload=Workload(model="llama", tensor_parallel=8)
    )
    Path("bundle.json").write_bytes(write_bundle(structs.replace(bundle, provenance=provenance))[0])
    lines = command_line.output("inspect", "bundle.json").splitlines()
    assert lines[0] == "bundle.json: bundle"
    assert lines[9:17] == [
        "  measurement policy: default",
        "  created: 2026-12-01",
        "  tuning_seconds: 58.8",
        "  driver: 580.1",
        "  workload model: llama",
        "  workload tensor_parallel: 8",
        "  default raced: not known",
        "  1 entry, 1 recorded lookup",
    ]


def test_a_pulled_file_names_the_bundles(command_line: CommandLine) -> None:
    document = command_line.json("pull", *LIKE, "--to", "tuned.json")
    lines = command_line.output("inspect", "tuned.json").splitlines()
    assert lines[0] == "tuned.json: v1 file made by fi-tunecache"
    assert [line for line in lines if "pulled from" in line] == [
        f"  {row['entries']} entries pulled from bundle {row['bundle']}"
        for row in sorted(document["bundles"], key=lambda row: row["bundle"])
    ]


def test_a_module_bundled_with_flashinfer(command_line: CommandLine) -> None:
    Path("v0_1.py").write_text("""best_configs = {"('op', 'MoERunner', ((1, 2),))": (0, -1)}""")
    lines = command_line.output("inspect", "v0_1.py").splitlines()
    assert lines[0] == "v0_1.py: module bundled with FlashInfer"
    assert lines[2] == "  1 entry"
    assert words(lines[4]) == ["op", "MoERunner", "1", "1", "1", "not", "recorded"]
    assert lines[5:] == [
        "  problem: 1 key without extras: no lookup of FlashInfer 0.6.13 or newer can hit a key without extras"
    ]


def test_problems_are_shown_and_no_failure(command_line: CommandLine) -> None:
    Path("tuned.json").write_text('{"_records": {"a": 1}}')
    assert command_line.output("inspect", "tuned.json").splitlines() == [
        "tuned.json: FlashInfer v1 file",
        "",
        "  0 entries, 1 record of operations that tune themselves",
        "  problem: no _metadata: FlashInfer accepts the file blindly, on any GPU and any version",
    ]


def test_a_fact_that_is_not_known(command_line: CommandLine) -> None:
    Path("tuned.json").write_text('{"_metadata": {"gpu": "NVIDIA H200", "cublas_version": "cuda-toolkit-13.0"}}')
    lines = command_line.output("inspect", "tuned.json").splitlines()
    assert "  cudnn_version: unknown" in lines
    assert "  cublas_version: cuda-toolkit-13.0" in lines


def test_a_broken_folder_of_a_store(command_line: CommandLine) -> None:
    folder = Path("store", "v2", "0" * 16)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{")
    lines = command_line.output("inspect", "store").splitlines()
    assert lines[1].startswith("problem: ")
    assert "manifest.json: not a JSON document (" in lines[1]


def test_what_drives_a_terminal_is_printed_harmless(command_line: CommandLine) -> None:
    key = made.key(made.CUTLASS)
    evil = structs.replace(
        made.entry(key, "\x1b[2J"), runner="Runner\x07", policy=("\x1b", "\r"), selection={MARK: "\x1b]0;title"}
    )
    for file, entry in (("a.json", made.entry(key)), ("b.json", evil)):
        Path(file).write_bytes(write_cache_file(CacheFile((entry,), made.H200.metadata())))
    for arguments in (["b.json"], ["b.json", "--all"], ["a.json", "b.json"]):
        lines = command_line.output("inspect", *arguments).split("\n")
        assert any("\N{REPLACEMENT CHARACTER}" in line for line in lines)
        assert all(line.isprintable() for line in lines)


def test_two_sources_that_are_alike(command_line: CommandLine) -> None:
    assert command_line.output("inspect", V1, V1).splitlines() == [
        f"90 entries with the same answer, 0 with another, 0 only in {V1}, 0 only in {V1}"
    ]


def test_two_tunes_of_the_same_questions(command_line: CommandLine) -> None:
    lines = command_line.output("inspect", V1, DEFAULT).splitlines()
    assert lines[0] == f"50 entries with the same answer, 38 with another, 2 only in {V1}, 2 only in {DEFAULT}"
    assert lines[2:4] == [f"With another answer ({V1} -> {DEFAULT})", f"  {KEY}: 0 at 8.4 µs -> -1"]
    assert lines[13] == "  and 28 more; --all shows them"
    assert lines[15] == f"Only in {V1}"
    assert lines[19] == f"Only in {DEFAULT}"
    assert len(lines) == 22


def test_all_of_what_differs(command_line: CommandLine) -> None:
    lines = command_line.output("inspect", V1, DEFAULT, "--all").splitlines()
    assert sum(" -> " in line for line in lines[3:]) == 38
    assert not any("more; --all" in line for line in lines)


def test_policies_that_differ(command_line: CommandLine) -> None:
    lines = command_line.output("inspect", DEFAULT, CUDA_GRAPH).splitlines()
    assert lines[1].endswith("of the same answers were measured under another policy")
    assert lines[2] == f"  measurement policy: default in {DEFAULT}, cuda_graph in {CUDA_GRAPH}"


def test_facts_that_differ(command_line: CommandLine) -> None:
    entry = made.entry(made.key(made.CUTLASS))
    other = made.H200.with_facts(
        {"cudnn_version": "92400", "cutlass_dsl_version": "cpython-312;nvidia-cutlass-dsl==4.8.1:ff"}
    )
    Path("a.json").write_bytes(write_cache_file(CacheFile((entry,), made.H200.metadata())))
    other_runner = structs.replace(entry, runner=made.TINY)
    Path("b.json").write_bytes(write_cache_file(CacheFile((other_runner,), other.metadata())))
    Path("c.json").write_bytes(write_cache_file(CacheFile((), {"gpu": "NVIDIA H200"})))
    assert command_line.output("inspect", "a.json", "b.json").splitlines() == [
        "0 entries with the same answer, 1 with another, 0 only in a.json, 0 only in b.json",
        "  cudnn_version: 91900 in a.json, 92400 in b.json",
        "  cutlass_dsl_version: FlashInfer takes them for different; the versions in them are the same",
        "",
        "With another answer (a.json -> b.json)",
        f"  {entry.key}: 0 -> {made.TINY} 0",
    ]
    assert "  cudnn_version: 91900 in a.json, unknown in c.json" in command_line.output("inspect", "a.json", "c.json")


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        pytest.param(
            ["none.json"],
            2,
            "none.json does not exist; name a v1 file, a store, a bundle or a bundled module",
            id="none",
        ),
        pytest.param(
            [str(V1), "none.json"],
            2,
            "none.json does not exist; name a v1 file, a store, a bundle or a bundled module",
            id="second",
        ),
        pytest.param(
            [str(V1), str(STORE)],
            2,
            f"{STORE} has 3 environments: 429deefd17fea974, 645f715d598ccd4e, a27045c5dbc185b2; "
            "name the folder of one of them",
            id="several environments",
        ),
        pytest.param(
            ["empty.json"],
            5,
            "empty.json: the file is empty; remove it; whatever wrote it did not finish",
            id="an empty file",
        ),
        pytest.param(
            ["folder"],
            2,
            "folder is not a managed store of FlashInfer; give the folder that holds v2, or one environment's folder "
            "with its manifest.json",
            id="a folder",
        ),
    ],
)
def test_what_can_not_be_inspected(command_line: CommandLine, arguments: list[str], code: int, line: str) -> None:
    Path("empty.json").touch()
    Path("folder").mkdir()
    found = command_line.fault(code, "inspect", *arguments)
    assert found.replace(f"{command_line.folder}/folder", "folder") == line


def test_json_of_one_source(command_line: CommandLine) -> None:
    document = command_line.json("inspect", V1)
    assert (document["source"], document["kind"], document["problems"]) == (str(V1), "cache_file", [])
    (section,) = document["sections"]
    assert section["environment"] == {
        **json.loads(V1.read_text())["_metadata"],
    }
    assert (section["entries"], section["all"], section["policy"]) == (90, None, None)
    assert section["runners"][0]["runner"] == "CublasltBf16GemmRunner"


def test_json_of_every_entry(command_line: CommandLine) -> None:
    (section,) = command_line.json("inspect", DEFAULT, "--all")["sections"]
    assert section["policy"] == {}
    assert len(section["all"]) == 90
    found = {item["key"]: item for item in section["all"]}[KEY]
    assert found == {
        "key": KEY,
        "custom_op": "bf16_gemm",
        "runner": "CublasltBf16GemmRunner",
        "shapes": [[1, 2048], [2048, 4096], [0], [0], [-1, 4096], [-1]],
        "tactic": -1,
        "policy": ["cuda_graph_profile_replays", 1, "l2_cache_policy", "cold-chain:8"],
        "time_ms": None,
    }


def test_json_of_two_sources(command_line: CommandLine) -> None:
    document = command_line.json("inspect", V1, DEFAULT)
    assert (document["same"], document["remeasured"], len(document["changed"])) == (50, 0, 38)
    assert (len(document["only_first"]), len(document["only_second"])) == (2, 2)
    assert (document["facts"], document["policies"]) == ([], [{}, {}])
    changed = document["changed"][0]
    assert changed["first"]["key"] == changed["second"]["key"]
    assert (changed["first"]["tactic"], changed["second"]["tactic"]) == (0, -1)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_pipe_is_not_waited_for(command_line: CommandLine, command: str) -> None:
    os.mkfifo("pipe")
    assert command_line.fault(2, command, "pipe") == (
        "pipe is a pipe; name a v1 file, a store, a bundle or a bundled module"
    )
