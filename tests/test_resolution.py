"""Which entries are chosen, and why: cases by name, then the promise of consistency as a property."""

from __future__ import annotations

from pathlib import Path

import pytest
from first_runner import first_runner_with_an_entry
from hypothesis import given
from hypothesis import strategies as st
from made import (
    CUBLASLT,
    CUDNN,
    CUTLASS,
    H200,
    POLICY,
    TINY,
    UNKNOWN,
    bundle,
    candidate,
    entry,
    key,
    lookup,
    tactics,
)
from msgspec import structs

from fi_tunecache.bundle import Bundle, Provenance
from fi_tunecache.entry import Entry, Lookup
from fi_tunecache.environment import Environment
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import Yank
from fi_tunecache.match_level import MatchLevel
from fi_tunecache.publish.gather import gather
from fi_tunecache.publish.recorded_lookups import read_questions
from fi_tunecache.registry import open_registry
from fi_tunecache.resolution import choose
from fi_tunecache.source import read_source
from fi_tunecache.verdict import Candidate, Resolution

COMPATIBLE = MatchLevel.COMPATIBLE
DATA = Path(__file__).parent / "data" / "h200-flashinfer-0.7.4"
NEW_CUDNN = H200.with_facts({"cudnn_version": "92400"})
FP8 = ("CublasFp8GemmRunner", "CudnnFp8GemmRunner")


def resolve(
    *bundles: Bundle, here: Environment = H200, level: MatchLevel = COMPATIBLE, skip_ops: tuple[str, ...] = ()
) -> Resolution:
    return choose([candidate(item) for item in bundles], here, level, skip_ops=skip_ops)


def lines(resolution: Resolution) -> list[str]:
    return [str(item) for item in resolution.dropped]


def gemm_a(*, with_lookups: bool) -> Bundle:
    """90 entries of a real v1 file; 54 of them form 18 (op, profile) groups of three runners."""
    questions = read_questions((DATA / "gemm-a.lookups.json").read_bytes())
    source = read_source(DATA / "gemm-a.v1.json")
    (made,) = gather([source], Provenance(created="2026-12-01"), default_raced=False, questions=questions)
    assert made.bundle is not None
    return made.bundle if with_lookups else structs.replace(made.bundle, lookups=())


class TestAGroupIsTakenOrDroppedWhole:
    raced = bundle([entry(key(CUBLASLT), 3)], [lookup([CUDNN, CUBLASLT], CUBLASLT)])

    def test_taken_when_all_that_raced_are_valid(self) -> None:
        assert tactics(resolve(self.raced).chosen) == {(CUBLASLT, 1): 3}

    def test_dropped_when_a_loser_of_the_race_is_not(self) -> None:
        found = resolve(self.raced, here=NEW_CUDNN)
        assert not found.chosen
        assert lines(found) == [
            f"cudnn_version: registry 91900, here 92400: 1 entry of {CUBLASLT} dropped (rivals: {CUDNN})"
        ]

    def test_a_single_lookup_does_not_bring_back_what_a_dropped_race_must_miss(self) -> None:
        alone = bundle([entry(key(CUBLASLT), 4)], [lookup([CUBLASLT], CUBLASLT)], environment=NEW_CUDNN)
        found = resolve(self.raced, alone, here=NEW_CUDNN)
        assert not found.chosen
        assert lines(found)[1] == (
            f"a lookup that is not served would end on this runner instead of its winner: 1 entry of {CUBLASLT} dropped"
        )

    def test_a_runner_alone_stays_when_another_shape_is_dropped(self) -> None:
        two = bundle(
            [entry(key(CUDNN, 1), -1), entry(key(CUTLASS, 2))],
            [lookup([CUDNN], CUDNN, 1), lookup([CUTLASS], CUTLASS, 2)],
        )
        assert tactics(resolve(two, here=NEW_CUDNN).chosen) == {(CUTLASS, 2): 0}

    def test_a_mere_choice_is_not_left_over_where_its_rival_is_dropped(self) -> None:
        named = bundle([entry(key(CUDNN), (0, ())), entry(key(TINY))], [lookup([CUDNN], CUDNN), lookup([TINY], TINY)])
        assert set(tactics(resolve(named).chosen)) == {(CUDNN, 1), (TINY, 1)}
        found = resolve(named, here=NEW_CUDNN)
        assert not found.chosen
        assert lines(found)[1] == (
            "one more choice is not left over at a shape where its rivals are dropped: "
            f"1 entry of {TINY} dropped (rivals: {CUDNN})"
        )


class TestTheCallersOrderDecides:
    def test_an_entry_of_an_earlier_runner_must_not_hide_the_winner(self) -> None:
        made = bundle(
            [entry(key(CUDNN), (0, ())), entry(key(CUBLASLT), 3)],
            [lookup([CUDNN, CUBLASLT], CUBLASLT), lookup([CUDNN], CUDNN)],
        )
        found = resolve(made)
        assert tactics(found.chosen) == {(CUBLASLT, 1): 3}
        assert lines(found) == [
            f"a lookup with more runners, or a better bundle, wants another entry: 1 entry of {CUDNN} dropped"
        ]

    def test_an_entry_of_a_later_runner_may_stay(self) -> None:
        made = bundle(
            [entry(key(CUDNN), (0, ())), entry(key(CUBLASLT), 3)],
            [lookup([CUDNN, CUBLASLT], CUDNN), lookup([CUBLASLT], CUBLASLT)],
        )
        assert tactics(resolve(made).chosen) == {(CUDNN, 1): (0, ()), (CUBLASLT, 1): 3}

    def test_races_that_contradict_each_other_are_all_dropped(self) -> None:
        made = bundle(
            [entry(key(CUDNN), (0, ())), entry(key(CUBLASLT), 3)],
            [lookup([CUDNN, CUBLASLT, TINY], CUBLASLT), lookup([CUBLASLT, CUDNN], CUDNN)],
        )
        assert not resolve(made).chosen


class TestWithoutRecordedLookups:
    def test_only_the_fastest_runner_of_a_shape_is_kept(self) -> None:
        found = resolve(
            bundle([entry(key(CUDNN), (0, ()), 0.009), entry(key(CUBLASLT), 3, 0.008), entry(key(TINY), 0, 0.05)])
        )
        assert tactics(found.chosen) == {(CUBLASLT, 1): 3}
        assert len(lines(found)) == 2
        assert lines(found)[0].startswith("no recorded lookup tells the caller's order, so only the fastest runner")

    def test_without_times_none_is(self) -> None:
        found = resolve(bundle([entry(key(CUDNN), (0, ()), 0.009), entry(key(CUBLASLT), 3)]))
        assert not found.chosen
        assert all("times are missing" in line for line in lines(found))

    def test_a_single_runner_of_a_shape_needs_no_times(self) -> None:
        assert tactics(resolve(bundle([entry(key(CUDNN, m), (0, ())) for m in (1, 2)])).chosen) == {
            (CUDNN, 1): (0, ()),
            (CUDNN, 2): (0, ()),
        }

    def test_the_fastest_is_dropped_where_a_slower_rival_is_not_valid(self) -> None:
        made = bundle([entry(key(CUDNN), (0, ()), 0.009), entry(key(CUBLASLT), 3, 0.008)])
        assert not resolve(made, here=NEW_CUDNN).chosen

    def test_of_several_bundles_together_too(self) -> None:
        """One bundle a runner class must give no more than one bundle with all of them."""
        named = {CUDNN: ((0, ()), 0.009), CUBLASLT: (3, 0.008), TINY: (0, 0.05)}
        found = resolve(*(bundle([entry(key(runner), *answer)]) for runner, answer in named.items()))
        assert tactics(found.chosen) == {(CUBLASLT, 1): 3}

    def test_none_is_kept_at_a_shape_that_a_recorded_lookup_has(self) -> None:
        recorded = bundle([entry(key(CUTLASS), 1)], [lookup([CUTLASS], CUTLASS)])
        found = resolve(recorded, bundle([entry(key(CUBLASLT), 3, 0.001)]))
        assert tactics(found.chosen) == {(CUTLASS, 1): 1}
        assert lines(found) == [f"recorded lookups of the same shape did not choose it: 1 entry of {CUBLASLT} dropped"]

    def test_nobody_knows_whether_a_lone_mere_choice_raced_alone(self) -> None:
        alone = [entry(key(TINY))]
        assert tactics(resolve(bundle(alone, [lookup([TINY], TINY)]), here=NEW_CUDNN).chosen) == {(TINY, 1): 0}
        assert not resolve(bundle(alone), here=NEW_CUDNN).chosen

    def test_entries_that_no_recorded_lookup_chose_are_judged_by_shape(self) -> None:
        made = bundle(
            [entry(key(CUTLASS, 1)), entry(key(CUDNN, 2), (0, ()), 2.0), entry(key(CUBLASLT, 2), 1, 1.0)],
            [lookup([CUTLASS], CUTLASS, 1)],
        )
        assert tactics(resolve(made).chosen) == {(CUTLASS, 1): 0, (CUBLASLT, 2): 1}


@pytest.mark.parametrize(
    ("made", "line"),
    [
        pytest.param(
            bundle([entry(key(CUDNN), 7)]), "a cuDNN tactic that is a plan's position", id="legacy cuDNN tactic"
        ),
        pytest.param(
            bundle([entry(key("PcieIpcAllReduceRunner", op="flashinfer::pcie_ipc_all_reduce"))]),
            "the op is collective",
            id="collective op",
        ),
        pytest.param(bundle([entry(key(CUTLASS, op="skipped_op"))]), "the op is in the skip list", id="skip list"),
    ],
)
def test_never_taken(made: Bundle, line: str) -> None:
    found = resolve(made, level=MatchLevel.EXACT, skip_ops=("skipped_op",))
    assert not found.chosen
    assert lines(found)[0].startswith(line)


class TestSeveralBundles:
    def test_the_first_that_has_a_lookup_provides_it(self) -> None:
        first = bundle([entry(key(CUTLASS, 1), 1)], created="2026-12-02")
        second = bundle([entry(key(CUTLASS, 1), 9), entry(key(CUTLASS, 2), 9)], created="2026-12-01")
        found = resolve(second, first)
        assert tactics(found.chosen) == {(CUTLASS, 1): 1, (CUTLASS, 2): 9}
        assert [(verdict.taken, verdict.elsewhere) for verdict in found.verdicts] == [(1, 0), (1, 1)]

    @pytest.mark.parametrize(
        ("better", "worse"),
        [
            pytest.param(
                {}, {"environment": H200.with_facts({"cuda_version": "12.9"}), "created": "2027-01-01"}, id="exact"
            ),
            pytest.param(
                {"environment": H200.with_facts({"cuda_version": "12.9"})},
                {
                    "environment": H200.with_facts({"cuda_version": "12.9", "cublas_version": "12.9"}),
                    "created": "2027-01-01",
                },
                id="fewest differing facts",
            ),
            pytest.param(
                {"default_raced": True}, {"default_raced": False, "created": "2027-01-01"}, id="default raced"
            ),
            pytest.param(
                {"default_raced": True}, {"default_raced": None, "created": "2027-01-01"}, id="not known to have raced"
            ),
            pytest.param({"created": "2026-12-02"}, {"created": "2026-12-01"}, id="newest"),
        ],
    )
    def test_order(self, better: dict[str, object], worse: dict[str, object]) -> None:
        ours = bundle([entry(key(CUTLASS), 1)], **better)  # type: ignore[arg-type]
        other = bundle([entry(key(CUTLASS), 2)], **worse)  # type: ignore[arg-type]
        for order in ((ours, other), (other, ours)):
            assert tactics(resolve(*order).chosen) == {(CUTLASS, 1): 1}

    def test_of_one_day_what_was_published_last_goes_first(self) -> None:
        earlier, later = bundle([entry(key(CUTLASS), 1)]), bundle([entry(key(CUTLASS), 2)])
        assert tactics(resolve(earlier, later).chosen) == {(CUTLASS, 1): 2}

    def test_a_registry_of_higher_precedence_goes_first_among_equals(self) -> None:
        near = candidate(bundle([entry(key(CUTLASS), 1)], created="2026-01-01"), precedence=0)
        far = candidate(bundle([entry(key(CUTLASS), 2)], created="2026-12-01"), precedence=1)
        assert tactics(choose([far, near], H200).chosen) == {(CUTLASS, 1): 1}

    def test_a_dropped_race_of_one_bundle_is_provided_by_another(self) -> None:
        raced = lookup([CUDNN, CUBLASLT], CUBLASLT)
        old = bundle([entry(key(CUBLASLT), 3)], [raced])
        new = bundle([entry(key(CUBLASLT), 4)], [raced], environment=NEW_CUDNN)
        assert tactics(resolve(old, new, here=NEW_CUDNN).chosen) == {(CUBLASLT, 1): 4}

    def test_another_winner_of_a_lookup_that_is_answered_counts_as_answered(self) -> None:
        first = bundle([entry(key(CUBLASLT), 3)], [lookup([CUDNN, CUBLASLT], CUBLASLT)], created="2026-12-02")
        second = bundle([entry(key(CUDNN), (0, ()))], [lookup([CUDNN, CUBLASLT], CUDNN)])
        found = resolve(first, second)
        assert tactics(found.chosen) == {(CUBLASLT, 1): 3}
        assert [(verdict.taken, verdict.elsewhere) for verdict in found.verdicts] == [(1, 0), (0, 1)]
        assert not found.dropped

    def test_the_order_of_arguments_does_not_matter(self) -> None:
        some = [
            bundle([entry(key(CUTLASS, m), m + i) for m in range(i, 4)], created=f"2026-12-0{i + 1}") for i in range(3)
        ]
        assert resolve(*some) == resolve(*reversed(some))


class TestVerdicts:
    def test_a_machine_that_differs_in_one_fact_is_told_fact_entries_and_nearest_bundle(self) -> None:
        found = resolve(bundle([entry(key(CUDNN, m), (0, ())) for m in (1, 2)]), here=NEW_CUDNN, level=MatchLevel.EXACT)
        (verdict,) = found.verdicts
        assert str(verdict) == (
            f"bundle {verdict.bundle_id}: rejected: cudnn_version: registry 91900, here 92400: 2 entries lost"
        )
        assert found.nearest == verdict

    def test_the_nearest_is_the_unused_bundle_with_the_fewest_differences(self) -> None:
        far = bundle([entry(key(CUDNN))], environment=H200.with_facts({"cudnn_version": "1", "cuda_version": "1"}))
        near = bundle([entry(key(CUDNN))], environment=H200.with_facts({"cudnn_version": "1"}))
        found = resolve(far, near, level=MatchLevel.EXACT)
        assert found.nearest is not None
        assert len(found.nearest.differing) == 1

    def test_a_bundle_used_despite_a_difference_says_so(self) -> None:
        found = resolve(bundle([entry(key(CUTLASS))]), here=NEW_CUDNN)
        assert str(found.verdicts[0]).endswith("1 of 1 entries (differs in cudnn_version: registry 91900, here 92400)")

    def test_a_difference_that_may_cost_speed_says_so(self) -> None:
        old_frontend = H200.with_facts({"cudnn_frontend_version": "1.31.0"})
        found = resolve(bundle([entry(key(CUDNN), (0, ())), entry(key(CUTLASS, 2))]), here=old_frontend)
        (verdict,) = found.verdicts
        assert verdict.may_cost_speed == ("cudnn_frontend_version",)
        assert str(verdict).endswith("here 1.31.0; cudnn_frontend_version may cost speed)")

    def test_yanked_says_why(self) -> None:
        item = candidate(bundle([entry(key(CUTLASS))]), yanked=Yank("tuned at a lower clock", "2026-12-03"))
        (verdict,) = choose([item], H200).verdicts
        assert "rejected: yanked on 2026-12-03: tuned at a lower clock" in str(verdict)

    def test_a_row_that_is_needed_must_have_been_fetched(self) -> None:
        item = candidate(bundle([entry(key(CUTLASS))]))
        with pytest.raises(ValueError, match="not rejected and was not fetched"):
            choose([Candidate("test", item.row)], H200)


class TestRealResults:
    """The 90 entries that an H200 gave, and what is left of them elsewhere."""

    def test_all_recorded_lookups_are_served_where_they_were_tuned(self) -> None:
        made = gemm_a(with_lookups=True)
        found = resolve(made, here=made.environment, level=MatchLevel.EXACT)
        assert len(found.chosen) == len(found.lookups) == 90

    def test_without_lookups_54_of_90_are_kept(self) -> None:
        made = gemm_a(with_lookups=False)
        found = resolve(made, here=made.environment)
        assert len(found.chosen) == 54
        assert sum(item.entries for item in found.dropped) == 36

    @pytest.mark.parametrize(
        ("fact", "value", "kept"),
        [
            pytest.param("cudnn_frontend_version", "1.31.0", 90, id="cuDNN frontend: performance only"),
            pytest.param("cuda_version", "13.1", 90, id="CUDA: performance only"),
            pytest.param("cudnn_version", "92400", 18, id="cuDNN: its groups, and what would be left over, go"),
            pytest.param("cublas_version", "13.2.0", 36, id="cuBLAS: likewise"),
            pytest.param("cutlass_dsl_version", "nvidia-cutlass-dsl==4.9.0:00", 90, id="CuTe-DSL: not used here"),
            pytest.param("gpu", "NVIDIA H200 NVL", 0, id="another GPU"),
            pytest.param("flashinfer_version", "0.7.5", 0, id="another FlashInfer"),
        ],
    )
    def test_one_fact_differs(self, fact: str, value: str, kept: int) -> None:
        made = gemm_a(with_lookups=True)
        here = made.environment.with_facts({fact: value})
        assert len(resolve(made, here=here).chosen) == kept
        assert not resolve(made, here=here, level=MatchLevel.EXACT).chosen

    def test_with_another_cudnn_no_group_with_a_cudnn_runner_is_left(self) -> None:
        made = gemm_a(with_lookups=True)
        found = resolve(made, here=made.environment.with_facts({"cudnn_version": "92400"}))
        for item in made.lookups:
            if any(runner.startswith("Cudnn") for runner in item.runners):
                assert first_runner_with_an_entry([k.text for k in item.keys], found.chosen) is None
        assert "36 entries of CudnnBf16GemmRunner dropped" in lines(found)[0]

    def test_the_embedded_bundles_together(self) -> None:
        registry, folder = open_registry("embedded"), Folder.parse("0.7.4/nvidia-h200")
        rows = registry.manifest(folder).bundles
        found = choose([Candidate("embedded", row, registry.bundle(folder, row)) for row in rows], rows[0].tuned_in)
        assert [verdict.taken for verdict in found.verdicts if not verdict.rejected] == [90, 75, 0]


# The promise, on random registries: six runners of several families, three shapes, a few bundles
# tuned here and elsewhere, with lookups recorded or not.
RUNNERS = [CUDNN, CUBLASLT, TINY, CUTLASS, UNKNOWN, "CuteDSLSplitKBf16Runner"]
ENVIRONMENTS = [
    H200,
    NEW_CUDNN,
    H200.with_facts({"cublas_version": "13.2.0"}),
    H200.with_facts({"cudnn_frontend_version": "1.31.0"}),
    Environment.from_metadata({**H200.metadata(), "cudnn_version": "unknown"}),
]
PROPERTY_TACTICS: dict[str, list[object]] = {CUDNN: [(0, ()), (1, ((12, 0),)), -1]}


@st.composite
def bundles(draw: st.DrawFn) -> Bundle:
    entries: dict[str, Entry] = {}
    lookups: dict[tuple[str, ...], Lookup] = {}
    for _ in range(draw(st.integers(1, 6))):
        order = draw(st.lists(st.sampled_from(RUNNERS), min_size=1, max_size=4, unique=True))
        made = lookup(order, draw(st.sampled_from(order)), draw(st.sampled_from([1, 2, 4])))
        won = made.winning_key
        tactic = draw(st.sampled_from(PROPERTY_TACTICS.get(won.runner, [0, 1, -1])))
        time = draw(st.none() | st.floats(0.001, 1.0))
        entries.setdefault(
            won.text, Entry(won, won.runner, tactic, POLICY, None if time is None else {"time_ms": time})
        )  # type: ignore[arg-type]
        lookups[tuple(k.text for k in made.keys)] = made
    return bundle(
        entries.values(),
        lookups.values() if draw(st.booleans()) else (),
        environment=draw(st.sampled_from([e for e in ENVIRONMENTS if not e.undetermined()])),
        created=f"2026-12-0{draw(st.integers(1, 9))}",
        default_raced=draw(st.sampled_from([True, False, None])),
    )


@given(
    made=st.lists(bundles(), min_size=1, max_size=4),
    here=st.sampled_from(ENVIRONMENTS),
    level=st.sampled_from(MatchLevel),
)
def test_every_recorded_lookup_gives_its_winner_or_misses(
    made: list[Bundle], here: Environment, level: MatchLevel
) -> None:
    found = resolve(*made, here=here, level=level)
    considered = {verdict.bundle_id for verdict in found.verdicts if not verdict.rejected}
    allowed: dict[tuple[str, ...], set[tuple[str, object]]] = {}
    for item in made:
        for recorded in item.lookups if candidate(item).row.bundle_id in considered else ():
            answer = (recorded.winning_key.text, item.entries[recorded.winning_key.text].tactic)
            allowed.setdefault(tuple(k.text for k in recorded.keys), set()).add(answer)
    served = {tuple(k.text for k in item.keys) for item in found.lookups}
    for texts, answers in allowed.items():
        hit = first_runner_with_an_entry(texts, found.chosen)
        if hit is None:
            assert texts not in served
            continue
        given_now = (hit, found.chosen[hit].entry.tactic)
        # A lookup with a single runner may be overruled in its tactic by one with several, never in its runner.
        assert given_now in answers or (len(texts) == 1 and texts not in served)


@given(made=st.lists(bundles(), min_size=1, max_size=4), here=st.sampled_from(ENVIRONMENTS))
def test_exact_takes_nothing_that_compatible_would_not(made: list[Bundle], here: Environment) -> None:
    exact, compatible = (resolve(*made, here=here, level=level) for level in MatchLevel)
    used = {verdict.bundle_id for verdict in exact.used}
    assert used <= {verdict.bundle_id for verdict in compatible.verdicts if not verdict.rejected}
    assert all(not verdict.differing for verdict in exact.used)


@given(
    made=st.lists(bundles(), min_size=1, max_size=3),
    here=st.sampled_from(ENVIRONMENTS),
    level=st.sampled_from(MatchLevel),
)
def test_nothing_is_lost_without_a_line(made: list[Bundle], here: Environment, level: MatchLevel) -> None:
    """Each entry of each bundle is taken, provided elsewhere, rejected with its bundle, or in one dropped line."""
    found = resolve(*made, here=here, level=level)
    for verdict in found.verdicts:
        if not verdict.rejected:
            explained = sum(item.entries for item in found.dropped if item.bundle_id == verdict.bundle_id)
            assert verdict.taken + verdict.elsewhere + explained == verdict.entries
