"""May a result tuned there be used here?"""

from __future__ import annotations

import pytest
from made import CUBLASLT, CUDNN, CUTLASS, DSL, H200, TINY, UNKNOWN, bundle, candidate, entry, key

from fi_tunecache.compatibility import differences, must_facts, rejection
from fi_tunecache.environment import FACTS, Environment
from fi_tunecache.errors import UsageError
from fi_tunecache.manifest import Yank
from fi_tunecache.match_level import MatchLevel
from fi_tunecache.measurement_policy import DEFAULT_POLICY, MeasurementPolicy

EAGER = MeasurementPolicy.from_execution_mode("eager")


@pytest.mark.parametrize(
    ("there", "here", "lines"),
    [
        pytest.param({}, {}, [], id="equal"),
        pytest.param(
            {}, {"cudnn_version": "92400"}, ["cudnn_version: registry 91900, here 92400"], id="one fact differs"
        ),
        pytest.param(
            {},
            {"cutlass_dsl_version": "cpython-311;nvidia-cutlass-dsl==4.8.1:ff;torch==2.12.0:00"},
            [],
            id="fingerprint differs in paths, ABI and torch alone",
        ),
        pytest.param(
            {},
            {"cutlass_dsl_version": "nvidia-cutlass-dsl==4.9.0:aa"},
            ["cutlass_dsl_version: registry nvidia-cutlass-dsl==4.8.1, here nvidia-cutlass-dsl==4.9.0"],
            id="another CuTe-DSL",
        ),
        pytest.param(
            {}, {"gpu": "NVIDIA H200 NVL"}, ["gpu: registry NVIDIA H200, here NVIDIA H200 NVL"], id="a look-alike GPU"
        ),
        pytest.param(
            {"new_fact": "1"}, {}, ["new_fact: registry 1, here unknown"], id="a fact that only the registry knows"
        ),
        pytest.param(
            {}, {"new_fact": "1"}, ["new_fact: registry unknown, here 1"], id="a fact that only this machine knows"
        ),
        pytest.param(
            {},
            {"flashinfer_version": "0.7.4.post1", "cuda_version": "13.1"},
            [
                "flashinfer_version: registry 0.7.4, here 0.7.4.post1",
                "cuda_version: registry 13.0, here 13.1",
            ],
            id="two facts, in FlashInfer's order",
        ),
    ],
)
def test_differences_name_the_fact_and_both_values(
    there: dict[str, str], here: dict[str, str], lines: list[str]
) -> None:
    sides = [Environment.from_metadata({**H200.metadata(), **changes}) for changes in (there, here)]
    assert [str(difference) for difference in differences(*sides)] == lines


@pytest.mark.parametrize("fact", FACTS)
def test_an_undetermined_fact_equals_nothing_not_even_itself(fact: str) -> None:
    unknown = Environment.from_metadata({**H200.metadata(), fact: "unknown"})
    assert [item.fact for item in differences(H200, unknown)] == [fact]
    assert [item.fact for item in differences(unknown, H200)] == [fact]
    assert [item.fact for item in differences(unknown, unknown)] == [fact]


def test_a_cublas_version_guessed_from_the_toolkit_matches_nothing() -> None:
    guessed = H200.with_facts({"cublas_version": "cuda-toolkit-13.0"})
    assert [str(item) for item in differences(guessed, guessed)] == ["cublas_version: registry unknown, here unknown"]
    assert guessed.metadata()["cublas_version"] == "cuda-toolkit-13.0"


@pytest.mark.parametrize(
    ("changed", "level", "policy", "yanked", "reasons"),
    [
        pytest.param({}, "exact", DEFAULT_POLICY, None, [], id="same environment"),
        pytest.param({"cudnn_version": "1"}, "exact", DEFAULT_POLICY, None, ["cudnn_version"], id="exact: any fact"),
        pytest.param({"cudnn_version": "1"}, "compatible", DEFAULT_POLICY, None, [], id="compatible: judged by group"),
        pytest.param(
            {"flashinfer_version": "0.7.2"}, "compatible", DEFAULT_POLICY, None, ["flashinfer_version"], id="FlashInfer"
        ),
        pytest.param({"gpu": "NVIDIA H100"}, "compatible", DEFAULT_POLICY, None, ["gpu"], id="never another GPU"),
        pytest.param({}, "compatible", EAGER, None, ["registry default, asked for eager"], id="policy"),
        pytest.param(
            {},
            "exact",
            DEFAULT_POLICY,
            Yank("wrong numbers", "2026-12-02"),
            ["yanked on 2026-12-02: wrong"],
            id="yanked",
        ),
    ],
)
def test_a_manifest_row_is_rejected_with_reasons(
    changed: dict[str, str], level: str, policy: MeasurementPolicy, yanked: Yank | None, reasons: list[str]
) -> None:
    row = candidate(bundle([entry(key(CUDNN))]), yanked=yanked).row
    here = H200.with_facts(changed)
    found = rejection(row, differences(row.tuned_in, here), MatchLevel(level), policy)
    assert len(found) == len(reasons)
    assert all(wanted in str(reason) for wanted, reason in zip(reasons, found, strict=True))


@pytest.mark.parametrize(
    ("runners", "raced_alone", "must"),
    [
        pytest.param([CUTLASS], True, set(), id="a CUTLASS table index depends on nothing else"),
        pytest.param([CUBLASLT], True, {"cublas_version"}, id="cuBLASLt heuristics on cuBLAS"),
        pytest.param([CUDNN], True, {"cudnn_version"}, id="cuDNN engines on cuDNN"),
        pytest.param([DSL], True, {"cutlass_dsl_version"}, id="CuTe-DSL tiles on its compiler"),
        pytest.param([CUBLASLT, CUDNN], False, {"cublas_version", "cudnn_version"}, id="a race on all that raced"),
        pytest.param([TINY], True, set(), id="a mere choice, alone, on nothing"),
        pytest.param([TINY], False, set(FACTS), id="a mere choice among several on everything"),
        pytest.param([UNKNOWN], True, set(FACTS), id="an unknown class on everything"),
    ],
)
def test_must_facts_are_those_of_every_runner_that_raced(runners: list[str], raced_alone: bool, must: set[str]) -> None:
    found = must_facts("bf16_gemm", tuple(runners), FACTS, raced_alone)
    assert found == must | {"flashinfer_version", "gpu"}


def test_a_fact_we_do_not_know_is_a_must_for_everyone() -> None:
    assert "new_fact" in must_facts("bf16_gemm", (CUTLASS,), (*FACTS, "new_fact"), True)


def test_match_levels_have_names() -> None:
    assert MatchLevel.parse("compatible").other is MatchLevel.EXACT
    with pytest.raises(UsageError, match="match level 'fuzzy' is not known; use exact or compatible"):
        MatchLevel.parse("fuzzy")
