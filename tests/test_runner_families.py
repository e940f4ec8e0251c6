"""Which family each runner class of FlashInfer belongs to, and what follows from it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from fi_tunecache.environment import FACTS
from fi_tunecache.runner_families import (
    ALWAYS,
    RunnerFamily,
    checked_versions,
    families,
    family_of,
    is_never_taken,
    rules_version,
)

HERE = Path(__file__).parent
LISTS = HERE / "data" / "runner-classes"
VERSIONS = ("0.7.2", "0.7.2.post1", "0.7.4")

FAMILY_OF_LETTER = {
    "A": "cublaslt",
    "B": "cudnn",
    "B-ordinal": "cudnn_ordinal",
    "C": "cutlass",
    "C/E": "composite",
    "D": "trtllm_gen",
    "E": "cute_dsl",
    "E-int": "cute_dsl",
    "E(JIT)": "cutlass",
    "F": "choice_only",
    "G": "cutile",
    "-": "abstract",
}

OTHERWISE_THAN_ITS_LETTER = {
    # Compiled by nvcc from FlashInfer's sources; CuTe there is the C++ library.
    "Sm120MoeTunableRunner": "cutlass",
    "_CuteSm120Fp8MoeRunner": "cutlass",
    "_CuteSm120Mxfp8MoeRunner": "cutlass",
    # Inherits the split factors of the monolithic backend, which is "E-int".
    "_BatchMLAPagedAttentionCuteDslRubinMtpBackend": "cute_dsl",
    # CUDA sources, and never taken.
    "PcieIpcAllReduceRunner": "collective",
}

OPS = {
    # Where the class's name alone does not say which one it is: an op that it is looked up under.
    "fused_moe/backends/cudnn_frost/tuning.py": "cudnn_frost-bf16-moe-v2-fc1-frost-stage-heuristic-v12",
    "fused_moe/backends/trtllm/sm100_runner.py": "flashinfer::trtllm_fp8_block_scale_moe",
    "fused_moe/core.py": "trtllm::fused_moe::gemm1",
    "gemm/gemm_svdquant.py": "nvfp4_svdquant_gemm",
    "gemm/svdquant_sm120_cutlass.py": "nvfp4_svdquant_gemm_sm120_v3_r64",
    "mla/_swa.py": "mla_swa_sm90",
}


def rows(path: Path) -> list[dict[str, str]]:
    header, *lines = path.read_text("utf-8").splitlines()
    return [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]


def family_name(row: dict[str, str]) -> str:
    return family_of(OPS.get(row["source"].split(":")[0], "any_op"), row["class"]).name


def family(name: str) -> RunnerFamily:
    return next(family for family in families() if family.name == name)


def must(name: str, *, alone: bool = True) -> set[str]:
    return set(family(name).must_facts(alone, FACTS)) - set(ALWAYS)


def perf(name: str, *, alone: bool = True) -> set[str]:
    return set(family(name).perf_facts(alone, FACTS))


def test_every_class_of_0_7_4_has_the_family_that_its_letter_says() -> None:
    table = rows(HERE / "data" / "flashinfer-0.7.4-runners.tsv")
    expected = {
        row["source"]: OTHERWISE_THAN_ITS_LETTER.get(row["class"], FAMILY_OF_LETTER[row["family"]]) for row in table
    }
    actual = {row["source"]: family_name(row) for row in table}

    assert len(table) == 148
    assert actual == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_every_listed_class_is_known(version: str) -> None:
    listed = rows(LISTS / f"flashinfer-{version}.tsv")

    assert len(listed) > 100
    assert [(row["class"], row["source"]) for row in listed if family_name(row) == "unknown"] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_the_three_moe_runners_have_different_families_under_all_their_listed_ops(version: str) -> None:
    actual = {
        row["source"].split(":")[0]: {family_of(op, "MoERunner").name for op in row["custom_ops"].split(", ")}
        for row in rows(LISTS / f"flashinfer-{version}.tsv")
        if row["class"] == "MoERunner" and not row["source"].startswith("fused_moe/runners.py")
    }

    assert actual == {
        "fused_moe/core.py": {"cutlass"},
        "fused_moe/backends/trtllm/sm100_runner.py": {"trtllm_gen"},
    }


def test_versions_that_were_checked_are_the_ones_whose_lists_are_kept() -> None:
    kept = {path.name.removeprefix("flashinfer-").removesuffix(".tsv") for path in LISTS.iterdir()}

    assert set(checked_versions()) == kept == set(VERSIONS)


@pytest.mark.parametrize(
    ("custom_op", "runner", "expected"),
    [
        pytest.param("trtllm::fused_moe::gemm1", "MoERunner", "cutlass", id="MoERunner-cutlass-1"),
        pytest.param("trtllm::fused_moe::gemm2", "MoERunner", "cutlass", id="MoERunner-cutlass-2"),
        pytest.param("moe_cutlass_bf16_sm90_gemm2", "MoERunner", "cutlass", id="MoERunner-cutlass-ranked"),
        pytest.param("flashinfer::trtllm_bf16_moe", "MoERunner", "trtllm_gen", id="MoERunner-trtllm"),
        pytest.param("moe_cutlass_bf16", "MoERunner", "abstract", id="MoERunner-abstract"),
        pytest.param("FLASHINFER::TRTLLM_BF16_MOE", "MoERunner", "abstract", id="an-op-in-capitals-is-another-op"),
        pytest.param("nvfp4_svdquant_gemm", "Nvfp4SvdquantGemmRunner", "cutlass", id="svdquant-sm100"),
        pytest.param("nvfp4_svdquant_gemm_sm120_v3", "Nvfp4SvdquantGemmRunner", "composite", id="svdquant-sm120"),
        pytest.param("nvfp4_svdquant_gemm_sm130", "Nvfp4SvdquantGemmRunner", "unknown", id="svdquant-elsewhere"),
        pytest.param("mla_swa_sm90", "_Runner", "cutlass", id="_Runner"),
        pytest.param("something_new", "_Runner", "unknown", id="_Runner-elsewhere"),
        pytest.param("something_new", "_StageRunner", "unknown", id="_StageRunner-elsewhere"),
        pytest.param("bf16_gemm", "CuteDSLCublasltFallbackBf16Runner", "cublaslt", id="cublaslt-by-another-name"),
        pytest.param("moe_cudnn_frost_bf16", "CudnnFrostBf16MoeRunner", "cute_dsl", id="cudnn-in-name-only"),
        pytest.param("bf16_gemm", "CublasltBf16GemmRunner2", "unknown", id="a-similar-name-is-another-class"),
        pytest.param("bf16_gemm", "cublasltbf16gemmrunner", "unknown", id="case-counts"),
    ],
)
def test_a_class_is_what_it_is_under_its_op(custom_op: str, runner: str, expected: str) -> None:
    assert family_of(custom_op, runner).name == expected


@pytest.mark.parametrize(
    ("name", "must_match", "may_differ"),
    [
        pytest.param("cublaslt", {"cublas_version"}, {"cuda_version"}, id="cublaslt"),
        pytest.param("cudnn", {"cudnn_version"}, {"cudnn_frontend_version", "cublas_version"}, id="cudnn"),
        pytest.param(
            "cudnn_ordinal", {"cudnn_version", "cudnn_frontend_version", "cublas_version"}, set(), id="cudnn_ordinal"
        ),
        pytest.param("cutlass", set(), set(), id="cutlass"),
        pytest.param("trtllm_gen", set(), set(), id="trtllm_gen"),
        pytest.param("cute_dsl", {"cutlass_dsl_version"}, set(), id="cute_dsl"),
        pytest.param("composite", {"cutlass_dsl_version", "cublas_version"}, {"cuda_version"}, id="composite"),
        pytest.param("cutile", set(FACTS) - set(ALWAYS), set(), id="cutile"),
        pytest.param("collective", set(FACTS) - set(ALWAYS), set(), id="collective"),
        pytest.param("abstract", set(FACTS) - set(ALWAYS), set(), id="abstract"),
        pytest.param("unknown", set(FACTS) - set(ALWAYS), set(), id="unknown"),
    ],
)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "raced"])
def test_what_a_family_depends_on(name: str, must_match: set[str], may_differ: set[str], alone: bool) -> None:
    assert must(name, alone=alone) == must_match
    assert perf(name, alone=alone) == may_differ


def test_a_mere_choice_depends_on_everything_where_there_was_one() -> None:
    everything = set(FACTS) - set(ALWAYS)

    assert must("choice_only", alone=False) == everything
    assert perf("choice_only", alone=False) == set()
    assert must("choice_only", alone=True) == set()
    assert perf("choice_only", alone=True) == everything


def test_a_composite_depends_on_whatever_its_parts_depend_on() -> None:
    assert must("composite") == must("cutlass") | must("cute_dsl") | must("cublaslt")


@pytest.mark.parametrize("name", [family.name for family in families()])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "raced"])
def test_flashinfer_gpu_and_facts_nobody_has_read_about_always_matter(name: str, alone: bool) -> None:
    facts = (*FACTS, "nccl_version")

    assert {"flashinfer_version", "gpu", "nccl_version"} <= family(name).must_facts(alone, facts)
    assert {"flashinfer_version", "gpu", "nccl_version"}.isdisjoint(family(name).perf_facts(alone, facts))


@pytest.mark.parametrize("name", [family.name for family in families()])
def test_a_family_says_what_its_tactic_is_and_how_that_is_known(name: str) -> None:
    assert family(name).title
    assert family(name).tactic
    assert len(family(name).evidence) > 20


def test_facts_named_in_the_data_are_real_and_named_once() -> None:
    named = {
        family.name: [*family.must, *family.must_when_raced, *family.perf]
        for family in families()
        if "all" not in (family.must, family.must_when_raced, family.perf)
    }

    assert {name: facts for name, facts in named.items() if not set(facts) <= set(FACTS) - set(ALWAYS)} == {}
    assert {name: facts for name, facts in named.items() if len(facts) != len(set(facts))} == {}


def test_collective_ops_are_never_taken() -> None:
    reason = is_never_taken("flashinfer::pcie_ipc_all_reduce")

    assert reason is not None
    assert "ranks" in reason
    assert is_never_taken("bf16_gemm") is None


def test_the_version_of_the_rules_is_a_digest_of_the_data() -> None:
    data = files("fi_tunecache").joinpath("runner_families.json").read_bytes()

    assert rules_version() == hashlib.sha256(data).hexdigest()[:16]


def test_the_page_names_every_family_and_what_it_depends_on() -> None:
    page = (HERE.parent / "docs" / "runner-families.md").read_text("utf-8")
    lines = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}

    assert set(lines) == {family.name for family in families()}
    for one in families():
        columns = [column.strip() for column in lines[one.name].split("|")]
        assert columns[3] == shown(one.must, one.must_when_raced), one.name
        assert columns[4] == shown(one.perf), one.name


def shown(facts: str | tuple[str, ...], when_raced: str | tuple[str, ...] = ()) -> str:
    if when_raced:
        return "all, where several runners raced"
    return facts if isinstance(facts, str) else ", ".join(fact.removesuffix("_version") for fact in facts)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_kept_list_is_what_the_real_package_holds(version: str) -> None:
    """``FI_TUNECACHE_TEST_FLASHINFER`` names a folder with one installation of FlashInfer per version."""
    folder = os.environ.get("FI_TUNECACHE_TEST_FLASHINFER")
    assert folder, "set FI_TUNECACHE_TEST_FLASHINFER to a folder that holds 0.7.2/flashinfer, 0.7.4/flashinfer, ..."

    script = HERE.parent / "scripts" / "list_runner_classes.py"
    listed = subprocess.run(
        [sys.executable, script, Path(folder, version)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout

    assert listed == (LISTS / f"flashinfer-{version}.tsv").read_text("utf-8")
