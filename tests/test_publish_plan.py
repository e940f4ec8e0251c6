"""The plan: what is new, what changes, what stays as it is published, and what a commit gets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import made
import made_sources
import msgspec
import pytest
from made_sources import PROVENANCE, gathered, lines, published, source

from fi_tunecache.bundle import Bundle, read_bundle, write_bundle
from fi_tunecache.entry import DEFAULT_TACTIC, Entry, Lookup, Tactic
from fi_tunecache.errors import UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import Yank
from fi_tunecache.measurement_policy import MeasurementPolicy
from fi_tunecache.publish.comparison import Comparison, compare
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.publish.gather import gather
from fi_tunecache.publish.left_out import NEAR_TIE, Reason
from fi_tunecache.publish.plan import OpCounts, Plan, PlannedBundle, Status, make_plan
from fi_tunecache.publish.published import Published, read_published
from fi_tunecache.publish.recorded_lookups import read_questions
from fi_tunecache.registry import open_registry
from fi_tunecache.registry_tree import EMBEDDED
from fi_tunecache.resolution import choose
from fi_tunecache.source import read_source
from fi_tunecache.verdict import Rule

DATA = Path(__file__).parent / "data"
OF_0_7_4 = DATA / "h200-flashinfer-0.7.4"
H200 = Folder("0.7.4", "nvidia-h200")
EAGER = MeasurementPolicy.from_execution_mode("eager")


def at(runner: str, tactic: Tactic, time_ms: float | None = None, m: int = 1) -> Entry:
    return made.entry(made.key(runner, m), (tactic, ()) if runner == made.CUDNN else tactic, time_ms)


def compared(ours: Bundle, *theirs: Bundle) -> Comparison:
    return compare(ours, published(*theirs).comparable(ours.environment, ours.policy))


def kept(entry: Entry) -> tuple[str, int, Tactic]:
    return entry.runner, entry.key.profile[0][0], entry.tactic


# --- new, changed, unchanged


@pytest.mark.parametrize(
    ("theirs", "status"),
    [
        pytest.param([], "new", id="nothing is published"),
        pytest.param([made.bundle([at(made.CUTLASS, 1, m=2)])], "new", id="other keys are"),
        pytest.param([made.bundle([at(made.CUTLASS, 2)])], "changed", id="another tactic"),
        pytest.param([made.bundle([at(made.CUTLASS, 1)])], "unchanged", id="just so"),
        pytest.param([made.bundle([at(made.CUTLASS, 1, 0.5)])], "unchanged", id="just so, with a time"),
        pytest.param(
            [made.bundle([at(made.CUTLASS, 1)], environment=made.H200.with_facts({"cudnn_version": "1"}))],
            "new",
            id="in another environment",
        ),
        pytest.param([made.bundle([at(made.CUTLASS, 1)], policy=EAGER)], "new", id="under another policy"),
        pytest.param(
            [
                made.bundle(
                    [at(made.CUTLASS, 1)],
                    environment=made.H200.with_facts({"cutlass_dsl_version": "nvidia-cutlass-dsl==4.8.1"}),
                )
            ],
            "unchanged",
            id="in an environment that is compared as the same",
        ),
        pytest.param(
            [made.bundle([at(made.CUTLASS, 2)], created="2026-12-02"), made.bundle([at(made.CUTLASS, 1)])],
            "unchanged",
            id="just so in a bundle that has all of it",
        ),
    ],
)
def test_an_entry_compared(theirs: list[Bundle], status: str) -> None:
    comparison = compared(made.bundle([at(made.CUTLASS, 1)]), *theirs)

    assert {name: len(getattr(comparison, name)) for name in ("new", "changed", "unchanged")} == {
        "new": 0,
        "changed": 0,
        "unchanged": 0,
        status: 1,
    }
    assert comparison.adds is (status != "unchanged")


def test_of_several_bundles_the_one_that_a_client_takes_first_counts() -> None:
    ours = made.bundle([at(made.CUTLASS, 1), at(made.CUTLASS, 9, m=2)])
    theirs = [
        made.bundle([at(made.CUTLASS, 1)], created="2026-12-01", default_raced=None),
        made.bundle([at(made.CUTLASS, 2)], created="2026-12-03", default_raced=None),
        made.bundle([at(made.CUTLASS, 3)], created="2026-12-02", default_raced=True),
    ]
    first = compared(ours, *theirs).changed
    assert [entry.tactic for entry in first] == [1]
    for number, raced_first in ((2, theirs[:2]), (3, theirs)):
        served = choose([made.candidate(bundle) for bundle in raced_first], made.H200).chosen
        assert made.tactics(served) == {(made.CUTLASS, 1): number}
        again = made.bundle([at(made.CUTLASS, number), at(made.CUTLASS, 9, m=2)])
        assert [entry.tactic for entry in compared(again, *raced_first).unchanged] == [number]


def test_lookups_that_are_not_published_are_news() -> None:
    entries = [at(made.CUTLASS, 1)]
    ours = made.bundle(entries, [made.lookup([made.CUTLASS, made.TINY], made.CUTLASS)])

    comparison = compared(ours, made.bundle(entries))
    assert (comparison.new_lookups, len(comparison.unchanged), comparison.adds) == (1, 1, True)
    assert compared(ours, ours).adds is False


# --- near ties


FAST = 1.0
SLOWER = FAST * (1 + NEAR_TIE) - 1e-6


@pytest.mark.parametrize(
    ("theirs", "ours", "stays"),
    [
        pytest.param(SLOWER, FAST, True, id="faster by less than the tolerance"),
        pytest.param(FAST * (1 + NEAR_TIE), FAST, False, id="faster by the tolerance"),
        pytest.param(FAST, FAST, True, id="as fast"),
        pytest.param(FAST, 2.0, True, id="slower"),
        pytest.param(None, FAST, False, id="no published time"),
        pytest.param(FAST, None, False, id="no time of ours"),
    ],
)
@pytest.mark.parametrize("recorded", [False, True], ids=["no lookups", "lookups"])
def test_a_near_tie_keeps_what_is_published(
    theirs: float | None, ours: float | None, stays: bool, recorded: bool
) -> None:
    lookups = [made.lookup([made.CUTLASS], made.CUTLASS)] if recorded else []
    there = made.bundle([at(made.CUTLASS, 1, theirs)], lookups)
    comparison = compared(made.bundle([at(made.CUTLASS, 2, ours)], lookups), there)

    assert [item.cause for item in comparison.left_out] == ([Reason.NEAR_TIE] if stays else [])
    assert [entry.tactic for entry in comparison.changed] == ([] if stays else [2])
    assert comparison.adds is not stays


def test_times_under_different_policies_can_not_be_compared() -> None:
    hot = msgspec.structs.replace(at(made.CUTLASS, 2, FAST), policy=("x", 1))
    assert compared(made.bundle([hot]), made.bundle([at(made.CUTLASS, 1, FAST)])).adds


def test_the_rest_is_published() -> None:
    there = made.bundle([at(made.CUTLASS, 1, FAST), at(made.CUTLASS, 1, 2.0, m=2), at(made.CUTLASS, 1, m=4)])
    ours = made.bundle(
        [at(made.CUTLASS, 2, FAST), at(made.CUTLASS, 2, FAST, m=2), at(made.CUTLASS, 1, m=4), at(made.CUTLASS, 1, m=8)]
    )
    comparison = compared(ours, there)

    assert [kept(entry)[1] for entry in comparison.changed] == [2]
    assert [kept(entry)[1] for entry in comparison.unchanged] == [4]
    assert [kept(entry)[1] for entry in comparison.new] == [8]
    assert sorted(map(kept, comparison.bundle.entries.values())) == [
        (made.CUTLASS, 2, 2),
        (made.CUTLASS, 4, 1),
        (made.CUTLASS, 8, 1),
    ]
    served = choose([made.candidate(there), made.candidate(comparison.bundle)], made.H200).chosen
    assert made.tactics(served) == {(made.CUTLASS, m): tactic for m, tactic in ((1, 1), (2, 2), (4, 1), (8, 1))}


A_B, B = [made.CUBLASLT, made.CUDNN], [made.CUDNN]


@pytest.mark.parametrize(
    ("theirs", "ours", "remaining"),
    [
        pytest.param(
            ([at(made.CUBLASLT, 1, FAST)], [made.lookup(A_B, made.CUBLASLT)]),
            ([at(made.CUDNN, 1, FAST)], [made.lookup(A_B, made.CUDNN)]),
            [],
            id="the lookup's other runner is as fast",
        ),
        pytest.param(
            ([at(made.CUBLASLT, 1, 2.0)], [made.lookup(A_B, made.CUBLASLT)]),
            ([at(made.CUDNN, 1, FAST)], [made.lookup(A_B, made.CUDNN)]),
            [made.CUDNN],
            id="the lookup's other runner is slower",
        ),
        pytest.param(
            ([at(made.CUBLASLT, 1, FAST)], [made.lookup(A_B, made.CUBLASLT)]),
            ([at(made.CUBLASLT, 2, FAST), at(made.CUDNN, 1)], [made.lookup(A_B, made.CUBLASLT)]),
            [],
            id="a loser does not remain alone",
        ),
        pytest.param(
            ([at(made.CUBLASLT, 1, FAST)], [made.lookup(A_B, made.CUBLASLT)]),
            (
                [at(made.CUBLASLT, 2, FAST), at(made.CUDNN, 1)],
                [made.lookup(A_B, made.CUBLASLT), made.lookup(B, made.CUDNN)],
            ),
            [made.CUDNN],
            id="another lookup remains",
        ),
        pytest.param(
            ([at(made.CUBLASLT, 1, FAST)], [made.lookup(A_B, made.CUBLASLT)]),
            (
                [at(made.CUBLASLT, 2, FAST)],
                [made.lookup(A_B, made.CUBLASLT), made.lookup([made.CUBLASLT], made.CUBLASLT)],
            ),
            [made.CUBLASLT],
            id="it wins a lookup that is not published",
        ),
        pytest.param(
            ([at(made.CUBLASLT, 1, FAST)], []),
            ([at(made.CUBLASLT, 2, FAST)], [made.lookup(A_B, made.CUBLASLT)]),
            [made.CUBLASLT],
            id="no lookups are published",
        ),
        pytest.param(
            ([at(made.CUBLASLT, 1, FAST)], [made.lookup(A_B, made.CUBLASLT)]),
            ([at(made.CUBLASLT, 2, FAST)], []),
            [],
            id="lookups are published, ours has none",
        ),
    ],
)
def test_near_ties_of_lookups(
    theirs: tuple[Sequence[Entry], Sequence[Lookup]],
    ours: tuple[Sequence[Entry], Sequence[Lookup]],
    remaining: list[str],
) -> None:
    there = made.bundle(*theirs)
    comparison = compared(made.bundle(*ours), there)

    assert [entry.runner for entry in comparison.bundle.entries.values()] == remaining
    assert all(lookup.winning_key.text in comparison.bundle.entries for lookup in comparison.bundle.lookups)
    if not remaining:
        assert not comparison.adds
        return
    assert read_bundle(write_bundle(comparison.bundle)[0]) == comparison.bundle
    before = choose([made.candidate(there)], made.H200)
    after = choose([made.candidate(comparison.bundle), made.candidate(there)], made.H200)
    assert {lookup.runners for lookup in before.lookups} <= {lookup.runners for lookup in after.lookups}


@pytest.mark.parametrize(
    ("theirs", "ours", "cause"),
    [
        pytest.param(at(made.CUDNN, 1, FAST), at(made.TINY, 1, 2.0), Reason.NEAR_TIE, id="slower"),
        pytest.param(at(made.CUDNN, 1, SLOWER), at(made.TINY, 1, FAST), Reason.NEAR_TIE, id="as fast"),
        pytest.param(at(made.CUDNN, 1, 2.0), at(made.TINY, 1, FAST), None, id="faster"),
        pytest.param(at(made.CUDNN, 1), at(made.TINY, 1, FAST), Rule.NO_TIMES, id="no published time"),
        pytest.param(at(made.CUDNN, 1, FAST), at(made.TINY, 1), Rule.NO_TIMES, id="no time of ours"),
    ],
)
def test_a_shape_without_lookups_that_another_runner_class_has(
    theirs: Entry, ours: Entry, cause: Rule | Reason | None
) -> None:
    """A client keeps only the fastest class there, and none without times: publishing both would take it away."""
    there, new = made.bundle([theirs]), made.bundle([ours])
    comparison = compared(new, there)

    assert [(item.cause, item.rivals) for item in comparison.left_out] == ([(cause, (made.CUDNN,))] if cause else [])
    assert comparison.adds is (cause is None)
    served = choose([made.candidate(new), made.candidate(there)], made.H200).chosen
    assert bool(served) is (cause is not Rule.NO_TIMES)  # this is why
    if cause is None:
        assert made.tactics(served) == {(made.TINY, 1): 1}


def test_rivals_that_are_published_already_are_unchanged() -> None:
    theirs = [made.bundle([at(made.CUDNN, 1, FAST)]), made.bundle([at(made.TINY, 1, 2.0), at(made.TINY, 1, m=2)])]
    comparison = compared(made.bundle([at(made.TINY, 1, 2.0), at(made.TINY, 1, m=4)]), *theirs)

    assert [kept(entry)[1] for entry in comparison.unchanged] == [1]
    assert [kept(entry)[1] for entry in comparison.new] == [4]


def test_what_remains_may_be_published_already() -> None:
    """Where a part had stayed out as a near tie, and another bundle has come since."""
    old = made.bundle([at(made.CUTLASS, 1, FAST)], created="2026-12-01", default_raced=None)
    first = made.bundle([at(made.CUTLASS, 2, FAST), at(made.CUTLASS, 2, m=2)], default_raced=None)
    without = compared(first, old).bundle
    since = made.bundle([at(made.CUTLASS, 3, m=2)], created="2026-12-02", default_raced=None)
    comparison = compared(first, old, without, since)

    assert (comparison.adds, len(comparison.unchanged), len(comparison.left_out)) == (False, 1, 1)


X_Y, Y_Z = [made.TINY, made.CUBLASLT], [made.CUDNN, made.TINY]


def contradictory() -> tuple[Bundle, Bundle]:
    """One lookup misses TinyGemm's entry and gets cuBLASLt's, the other wants TinyGemm's."""
    theirs = made.bundle([at(made.CUBLASLT, 1)], [made.lookup(X_Y, made.CUBLASLT)])
    ours = [at(made.TINY, 1), at(made.TINY, 1, m=2)]
    return theirs, made.bundle(ours, [made.lookup(Y_Z, made.TINY)], created="2026-12-02")


def test_lookups_that_can_not_be_served_together() -> None:
    """A client would serve neither, so what is published stays."""
    theirs, ours = contradictory()
    together = choose([made.candidate(bundle) for bundle in (theirs, ours)], made.H200)
    assert made.tactics(together.chosen) == {(made.TINY, 2): 1}

    comparison = compared(ours, theirs)
    assert [(item.cause, kept(item.entry)) for item in comparison.left_out] == [(Rule.CONTRADICTED, (made.TINY, 1, 1))]
    assert [kept(entry) for entry in comparison.new] == [(made.TINY, 2, 1)]
    served = choose([made.candidate(bundle) for bundle in (theirs, comparison.bundle)], made.H200)
    assert made.tactics(served.chosen) == {(made.CUBLASLT, 1): 1, (made.TINY, 2): 1}


def test_what_a_client_makes_of_it_is_told() -> None:
    theirs, ours = contradictory()
    whole = compare(ours, published(theirs).bundles, as_it_is=True)
    assert whole.bundle == ours
    assert whole.verdict is not None
    assert (whole.verdict.taken, whole.verdict.entries) == (1, 2)

    raced = made.bundle([at(made.CUTLASS, 1)])
    ours = made.bundle([at(made.CUTLASS, 2)], created="2026-12-09", default_raced=None)
    comparison = compared(ours, raced)
    assert comparison.adds
    assert str(comparison.verdict).endswith(": 0 of 1 entries, 1 answered by another bundle")


# --- the plan


def plan_of(*names: str, target: Path | str | None = None, **how: object) -> Plan:
    sources = [read_source(OF_0_7_4 / name) for name in names]
    known = read_published(None if target is None else open_registry(str(target)), sources, None)
    return make_plan(gather(sources, PROVENANCE, published=known, **how), known)  # type: ignore[arg-type]


QUESTIONS = read_questions((OF_0_7_4 / "gemm-a.lookups.json").read_bytes())


def test_the_first_publication() -> None:
    plan = plan_of("gemm-a.v1.json", questions=QUESTIONS)

    (planned,) = plan.bundles
    assert (planned.folder, planned.status) == (H200, Status.NEW)
    assert planned.ops == (OpCounts("bf16_gemm", new=72), OpCounts("fp8_gemm", new=18))
    assert (planned.new_lookups, planned.left_out, planned.conflicts, planned.held_by) == (90, (), (), ())
    assert planned.row is not None
    assert plan.rows == {H200: (planned.row,)}
    assert plan.files == {f"{H200}/{planned.row.file}": planned.data}
    bundle = read_bundle(plan.files[f"{H200}/{planned.row.file}"])
    assert (len(bundle.entries), len(bundle.lookups)) == (90, 90)


def publish(plan: Plan, root: Path) -> None:
    add_bundles(root, "ours", [read_bundle(data) for data in plan.files.values()])


@pytest.mark.parametrize("name", ["gemm-a.v1.json", "fp8-8k.v1.json", "managed-store"])
def test_the_same_again_is_nothing(name: str, tmp_path: Path) -> None:
    publish(plan_of(name), tmp_path)
    again = plan_of(name, target=tmp_path)

    assert {item.status for item in again.bundles} == {Status.UNCHANGED}
    assert (again.rows, again.files, again.new) == ({}, {}, ())
    assert all(item.row is item.data is None for item in again.bundles)
    assert all(len(item.held_by) == 1 for item in again.bundles)
    assert {(counts.new, counts.changed) for item in again.bundles for counts in item.ops} == {(0, 0)}


def test_what_the_embedded_registry_has() -> None:
    plan = plan_of("gemm-a.v1.json", target=EMBEDDED, questions=QUESTIONS)
    assert [(item.status, item.held_by) for item in plan.bundles] == [(Status.UNCHANGED, ("92e3198da296966e",))]


def test_lookups_that_come_later_are_published(tmp_path: Path) -> None:
    publish(plan_of("gemm-a.v1.json"), tmp_path)
    (planned,) = plan_of("gemm-a.v1.json", target=tmp_path, questions=QUESTIONS).bundles

    assert planned.status is Status.NEW
    assert planned.ops == (OpCounts("bf16_gemm", new=36, unchanged=36), OpCounts("fp8_gemm", unchanged=18))
    assert planned.new_lookups == 90


def test_a_second_tune_keeps_near_ties(tmp_path: Path) -> None:
    """Real results, and the same with the runner-up in the place of every winner that it nearly ties with."""
    file = read_source(OF_0_7_4 / "fp8-8k.v1.json")
    entries, near = [], 0
    for entry in file.sections[0].entries:
        assert entry.selection is not None
        runner_up = {**entry.selection, "time_ms": entry.selection["runner_up_ms"]}
        entries.append(msgspec.structs.replace(entry, tactic=(DEFAULT_TACTIC, ()), selection=runner_up))
        near += entry.selection["runner_up_ms"] * (1 + NEAR_TIE) <= entry.selection["time_ms"]
    publish(plan_of("fp8-8k.v1.json"), tmp_path)
    second = source("second", entries, environment=file.sections[0].environment or made.H200)
    known = read_published(open_registry(str(tmp_path)), [second], None)
    (planned,) = make_plan([gathered(second)], known).bundles

    assert planned.ops == (OpCounts("fp8_gemm", changed=near, left_out=84 - near),)
    assert planned.status is (Status.NEW if near else Status.UNCHANGED)
    assert {line.cause for line in planned.left_out} == {Reason.NEAR_TIE}
    assert str(planned.left_out[0]).startswith("what is published is as fast, within 2%, or faster: ")


CUTLASS_1 = [at(made.CUTLASS, 1)]
YANK = Yank("tuned while throttled", "2026-12-05")


def yank_refusal(found: object, known: Published) -> str:
    with pytest.raises(UsageError) as caught:
        make_plan([found], known)  # type: ignore[list-item]
    assert caught.value.next_step == "tune again, and leave this source out"
    return caught.value.problem


def test_what_was_yanked_does_not_come_back(tmp_path: Path) -> None:
    file, more = source("a.json", CUTLASS_1), source("b.json", [at(made.CUTLASS, 1, m=2)])
    bundle = gathered(file).bundle
    assert bundle is not None
    known = published(bundle, yanked=YANK)
    bundle_id = known.bundles[0].bundle_id

    said = f"bundle {bundle_id}, which was yanked on 2026-12-05: tuned while throttled"
    assert yank_refusal(gathered(file), known) == f"a.json can't be published: it went into {said}"
    assert yank_refusal(gathered(file, more), known) == f"a.json and 1 more can't be published: it went into {said}"
    (tmp_path / "bundle.json").write_bytes(write_bundle(bundle)[0])
    assert said in yank_refusal(gathered(read_source(tmp_path / "bundle.json")), known)


def test_what_is_yanked_is_not_published() -> None:
    known = published(made.bundle(CUTLASS_1), yanked=YANK)
    (planned,) = make_plan([gathered(source("a.json", CUTLASS_1))], known).bundles

    assert planned.ops == (OpCounts(made.key(made.CUTLASS).custom_op, new=1),)


def test_a_bundle_is_published_as_it_is(tmp_path: Path) -> None:
    (path,) = (Path(__file__).parent.parent / "manifests" / "0.7.4" / "nvidia-h200").glob("92e3198da296966e.json")
    source = read_source(path)
    plan = make_plan([gathered(source)], Published())

    assert plan.files == {f"{H200}/{path.name}": path.read_bytes()}
    publish(plan, tmp_path)
    known = read_published(open_registry(str(tmp_path)), [source], None)
    (again,) = make_plan([gathered(source)], known).bundles
    assert (again.status, again.held_by) == (Status.UNCHANGED, ("92e3198da296966e",))


def test_a_bundle_is_no_near_tie(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_bytes(write_bundle(made.bundle([at(made.CUTLASS, 2, FAST)]))[0])
    known = published(made.bundle([at(made.CUTLASS, 1, FAST)]))
    (planned,) = make_plan([gathered(read_source(tmp_path / "bundle.json"))], known).bundles

    assert (planned.status, planned.left_out) == (Status.NEW, ())
    assert planned.ops == (OpCounts("bf16_gemm", changed=1),)


def test_nothing_remains_of_a_source() -> None:
    found = gathered(source("a.json", [at(made.CUDNN, 1), at(made.TINY, 1)]))
    (planned,) = make_plan([found], Published()).bundles

    assert (planned.status, planned.row, planned.ops) == (Status.UNCHANGED, None, (OpCounts("bf16_gemm", left_out=2),))
    assert lines(planned.left_out) == [(Rule.NO_TIMES, made.CUDNN, 1), (Rule.NO_TIMES, made.TINY, 1)]


def test_several_environments() -> None:
    h100 = made.H200.with_facts({"gpu": "NVIDIA H100"})
    old = made_sources.OF_0_7_2
    sources = [source(str(number), CUTLASS_1, environment=item) for number, item in enumerate((made.H200, h100, old))]
    sources.append(source("eager", CUTLASS_1, policy=EAGER))
    plan = make_plan(gather(sources, PROVENANCE), Published())

    assert {str(folder): len(rows) for folder, rows in plan.rows.items()} == {
        "0.7.2.post1/nvidia-h200": 1,
        "0.7.4/nvidia-h100": 1,
        "0.7.4/nvidia-h200": 2,
    }
    assert len(plan.files) == 4


def test_a_gpu_that_no_folder_can_have() -> None:
    environment = made.H200.with_facts({"gpu": "§"})
    with pytest.raises(UsageError):
        make_plan([gathered(source("a", CUTLASS_1, environment=environment))], Published())


def test_what_checked_it_is_written_into_the_rows() -> None:
    plan = make_plan(
        gather([source("a", CUTLASS_1), source("b", CUTLASS_1, policy=EAGER)], PROVENANCE),
        published(made.bundle(CUTLASS_1)),
    )
    (path,) = plan.files
    checked = plan.checked({path: "flashinfer 0.7.4"})

    assert [row.round_trip for rows in checked.rows.values() for row in rows] == ["flashinfer 0.7.4"]
    assert checked.files == plan.files
    with pytest.raises(KeyError):
        plan.checked({})


def test_the_plan_in_json() -> None:
    known = published(made.bundle([at(made.CUTLASS, 1), at(made.CUTLASS, 1, FAST, m=2)]))
    entries = [at(made.CUTLASS, 1), at(made.CUTLASS, 2, FAST, m=2), at(made.CUTLASS, 1, m=4)]
    plan = make_plan(
        gather(
            [source("a", entries), source("b", [*entries[:1]], records=2), source("c", CUTLASS_1, policy=EAGER)],
            PROVENANCE,
        ),
        known,
    )
    eager, planned = plan.bundles  # in the order of a managed store's folders
    assert isinstance(planned, PlannedBundle)
    assert planned.row is not None
    assert eager.row is not None
    records, near_tie = planned.left_out

    document = plan.builtins()
    assert json.loads(json.dumps(document)) == document
    assert {name: value for name, value in document.items() if name != "bundles"} == {
        "new": 2,
        "unchanged": 0,
        "entries": 3,
        "bytes": planned.row.size + eager.row.size,
    }
    assert document["bundles"][1] == {
        "folder": "0.7.4/nvidia-h200",
        "status": "new",
        "environment": made.H200.metadata(),
        "policy": {},
        "sources": ["a", "b"],
        "file": planned.row.file,
        "sha256": planned.row.sha256,
        "bytes": planned.row.size,
        "entries": 2,
        "lookups": 0,
        "default_raced": None,
        "round_trip": None,
        "client": {
            "taken": 1,
            "elsewhere": 1,
            "line": f"bundle {planned.row.bundle_id}: 1 of 2 entries, 1 answered by another bundle",
        },
        "ops": [{"custom_op": "bf16_gemm", "new": 1, "changed": 0, "unchanged": 1, "left_out": 1}],
        "new_lookups": 0,
        "same": 1,
        "held_by": [known.bundles[0].bundle_id],
        "left_out": [records.builtins(), near_tie.builtins()],
        "conflicts": [],
    }
    unchanged = make_plan([gathered(source("a", entries[:1]))], known).builtins()
    assert (unchanged["new"], unchanged["unchanged"], unchanged["bytes"]) == (0, 1, 0)
    assert [unchanged["bundles"][0][name] for name in ("file", "sha256", "bytes", "entries", "lookups")] == [
        None,
        None,
        0,
        0,
        0,
    ]
