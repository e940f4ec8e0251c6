"""What is in a source, and in what two sources differ."""

from __future__ import annotations

from pathlib import Path

import made
import pytest
from msgspec import structs

from fi_tunecache.bundle import MARK
from fi_tunecache.entry import LegacyEntry
from fi_tunecache.environment import Environment
from fi_tunecache.errors import UsageError
from fi_tunecache.inspection import FactPair, RunnerSummary, compare, group_entries, pulled_from, summarise
from fi_tunecache.measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from fi_tunecache.source import Section, Source, SourceKind, read_source

DATA = Path(__file__).parent / "data" / "h200-flashinfer-0.7.4"
V1 = DATA / "gemm-a.v1.json"
STORE = DATA / "managed-store" / "v2"
DEFAULT, EAGER, CUDA_GRAPH = (STORE / name for name in ("429deefd17fea974", "645f715d598ccd4e", "a27045c5dbc185b2"))
COLD = "cuda_graph_profile_replays=1, l2_cache_policy=cold-chain:8"
HOT = "cuda_graph_profile_replays=None, l2_cache_policy=hot"


def source(*entries: made.Entry, environment: Environment | None = made.H200) -> Source:
    return Source(Path("a.json"), SourceKind.CACHE_FILE, (Section(name="a", environment=environment, entries=entries),))


def test_the_summary_of_a_real_file() -> None:
    summary = summarise(read_source(V1).sections[0])
    rounded = [
        structs.replace(row, fastest_ms=round(row.fastest_ms or 0, 4), slowest_ms=round(row.slowest_ms or 0, 4))
        for row in summary
    ]
    assert rounded == [
        RunnerSummary("bf16_gemm", "CublasltBf16GemmRunner", 18, 18, 0, 0.0083, 0.0173, (COLD,)),
        RunnerSummary("bf16_gemm", "CudnnBf16GemmRunner", 36, 36, 0, 0.008, 0.049, (COLD,)),
        RunnerSummary("bf16_gemm", "TinyGemmBf16GemmRunner", 18, 18, 0, 0.0099, 0.2038, (COLD,)),
        RunnerSummary("fp8_gemm", "CublasFp8GemmRunner", 8, 8, 0, 0.0054, 0.0099, (HOT,)),
        RunnerSummary("fp8_gemm", "CudnnFp8GemmRunner", 10, 10, 0, 0.005, 0.0065, (HOT,)),
    ]


def test_a_store_records_no_times_and_may_name_the_default() -> None:
    summary = summarise(read_source(DEFAULT).sections[0])
    assert {row.fastest_ms for row in summary} == {None}
    assert {row.runner: row.defaults for row in summary} == {
        "CublasltBf16GemmRunner": 2,
        "CudnnBf16GemmRunner": 9,
        "TinyGemmBf16GemmRunner": 8,
        "CublasFp8GemmRunner": 4,
        "CudnnFp8GemmRunner": 0,
    }


def test_the_summary_counts_shapes_apart_from_entries() -> None:
    key = made.key(made.CUTLASS)
    twice = made.Key(key.custom_op, key.runner, key.profile, (made.Dtype("float16"), False))
    section = Section(
        name="a",
        environment=None,
        entries=(
            made.entry(key, -1, 0.5),
            made.entry(twice, True, 0.25),
            structs.replace(made.entry(key), policy=None),
        ),
    )
    (row,) = summarise(section)
    assert row == RunnerSummary(
        "bf16_gemm",
        made.CUTLASS,
        3,
        1,
        1,
        0.25,
        0.5,
        ("cuda_graph_profile_replays=1, l2_cache_policy=cold-chain:8", "not recorded"),
    )


def test_keys_without_extras_are_summarised_by_what_they_name() -> None:
    legacy = tuple(
        LegacyEntry(f"('trtllm::gemm', 'MoERunner', (({m}, 7168),))", 0, tactic) for m, tactic in ((1, 5), (2, -1))
    )
    assert summarise(Section(name="a", environment=None, legacy=legacy)) == (
        RunnerSummary("trtllm::gemm", "MoERunner", entries=2, shapes=2, defaults=1),
    )


def test_nothing_has_no_summary() -> None:
    assert summarise(Section(name="a", environment=None)) == ()


def test_entries_are_listed_by_runner_and_ordered_by_shape() -> None:
    entries = [made.entry(made.key(runner, m)) for m in (128, 2, 16) for runner in (made.TINY, made.CUTLASS)]
    groups = group_entries(Section(name="a", environment=None, entries=tuple(entries)))

    assert [(group.runner, group.extras) for group in groups] == [
        (made.CUTLASS, "(torch.bfloat16, True)"),
        (made.TINY, "(torch.bfloat16, True)"),
    ]
    assert [[entry.key.profile[0][0] for entry in group.entries] for group in groups] == [[2, 16, 128]] * 2


def test_every_entry_of_a_real_file_is_listed_once() -> None:
    section = read_source(V1).sections[0]
    listed = [entry for group in group_entries(section) for entry in group.entries]
    assert sorted(entry.key.text for entry in listed) == sorted(entry.key.text for entry in section.entries)


@pytest.mark.parametrize(
    ("mark", "name"),
    [
        pytest.param("3d1350e7978426ba", "3d1350e7978426ba", id="a bundle"),
        pytest.param(["a"], "['a']", id="a list"),
        pytest.param("x" * 200, "x" * 80, id="a long text"),
    ],
)
def test_entries_that_bear_our_mark_are_counted_by_bundle(mark: object, name: str) -> None:
    entries = [made.entry(made.key(made.CUTLASS, m)) for m in (1, 2, 4)]
    marked = tuple(structs.replace(entry, selection={MARK: mark}) for entry in entries[:2])
    section = Section(name="a", environment=None, entries=(*marked, entries[2]))
    assert pulled_from(section) == {name: 2}


def test_a_source_does_not_differ_from_itself() -> None:
    comparison = compare(read_source(V1), read_source(V1))
    assert (comparison.same, comparison.remeasured) == (90, 0)
    assert comparison.facts == comparison.changed == comparison.only_first == comparison.only_second == ()
    assert comparison.policies == (DEFAULT_POLICY, DEFAULT_POLICY)


@pytest.mark.parametrize(
    ("first", "second", "same", "changed", "only"),
    [
        pytest.param(V1, DEFAULT, 50, 38, 2, id="v1 and the default store"),
        pytest.param(DEFAULT, V1, 50, 38, 2, id="the default store and v1"),
        pytest.param(V1, CUDA_GRAPH, 49, 40, 1, id="v1 and the CUDA graph store"),
    ],
)
def test_two_tunes_of_the_same_questions(first: Path, second: Path, same: int, changed: int, only: int) -> None:
    """The same 90 questions were asked; with several runners the winner's key may be another one."""
    comparison = compare(read_source(first), read_source(second))
    assert comparison.facts == ()
    assert (comparison.same, len(comparison.changed)) == (same, changed)
    assert (len(comparison.only_first), len(comparison.only_second)) == (only, only)
    assert all(item.first.key == item.second.key for item in comparison.changed)
    assert all(item.first.tactic != item.second.tactic for item in comparison.changed)


def test_another_policy_of_the_single_entry_is_no_other_answer() -> None:
    comparison = compare(read_source(V1), read_source(EAGER))
    assert comparison.policies == (DEFAULT_POLICY, MeasurementPolicy.from_execution_mode("eager"))
    assert comparison.same + len(comparison.changed) + len(comparison.only_first) == 90
    assert comparison.same > 0
    # fp8_gemm is measured alike under both; bf16_gemm is not.
    first = {entry.key.text: entry for entry in read_source(V1).sections[0].entries}
    alike = [
        entry
        for entry in read_source(EAGER).sections[0].entries
        if entry.key.text in first and first[entry.key.text].tactic == entry.tactic
    ]
    remeasured = [entry for entry in alike if first[entry.key.text].policy != entry.policy]
    assert (len(alike), len(remeasured)) == (comparison.same, comparison.remeasured)
    assert {entry.key.custom_op for entry in remeasured} == {"bf16_gemm"}


def test_another_runner_in_the_value_is_another_answer() -> None:
    entry = made.entry(made.key(made.CUTLASS))
    comparison = compare(source(entry), source(structs.replace(entry, runner=made.TINY)))
    assert len(comparison.changed) == 1


@pytest.mark.parametrize(
    ("change", "pair"),
    [
        pytest.param(
            {"cudnn_version": "92400"}, FactPair("cudnn_version", "91900", "92400", alike=False), id="another version"
        ),
        pytest.param(
            {"cutlass_dsl_version": "cpython-312;nvidia-cutlass-dsl==4.8.1:ff;torch==2.11.0:bb"},
            FactPair(
                "cutlass_dsl_version",
                "cpython-312;nvidia-cutlass-dsl==4.8.1:aa;torch==2.11.0:bb",
                "cpython-312;nvidia-cutlass-dsl==4.8.1:ff;torch==2.11.0:bb",
                alike=True,
            ),
            id="another path in the fingerprint",
        ),
    ],
)
def test_facts_that_differ_for_flashinfer(change: dict[str, str], pair: FactPair) -> None:
    entry = made.entry(made.key(made.CUTLASS))
    assert compare(source(entry), source(entry, environment=made.H200.with_facts(change))).facts == (pair,)


def test_a_fact_that_only_one_has() -> None:
    entry = made.entry(made.key(made.CUTLASS))
    newer = Environment.from_metadata({**made.H200.metadata(), "driver_version": "580.1"})
    assert compare(source(entry), source(entry, environment=newer)).facts == (
        FactPair("driver_version", None, "580.1", alike=False),
    )


def test_a_source_without_an_environment_differs_in_every_fact() -> None:
    entry = made.entry(made.key(made.CUTLASS))
    facts = compare(source(entry, environment=None), source(entry)).facts
    assert [(pair.fact, pair.first, pair.second) for pair in facts] == [
        (name, None, value) for name, value in made.H200.metadata().items()
    ]


def test_of_a_store_one_environment_must_be_named() -> None:
    store = read_source(DATA / "managed-store")
    for pair in ((store, read_source(V1)), (read_source(V1), store)):
        with pytest.raises(UsageError) as caught:
            compare(*pair)
        assert str(caught.value) == (
            f"{DATA / 'managed-store'} has 3 environments: 429deefd17fea974, 645f715d598ccd4e, a27045c5dbc185b2; "
            "name the folder of one of them"
        )


def test_a_store_that_is_empty_has_none() -> None:
    with pytest.raises(UsageError, match="has 0 environments: none; name the folder of one of them"):
        compare(Source(Path("store"), SourceKind.STORE, ()), read_source(V1))
