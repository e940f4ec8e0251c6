"""Whether a recorded workload needs autotuning: the decision as tables, and the inquiry with a real selection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import made
import pytest
from command_line import snapshot
from made_lookups import lookup
from msgspec import structs

from fi_tunecache.environment import Environment
from fi_tunecache.errors import UsageError
from fi_tunecache.flashinfer_json import read_cache_file
from fi_tunecache.folder import Folder
from fi_tunecache.inquiry import autotune_needed
from fi_tunecache.match_level import MatchLevel
from fi_tunecache.measurement_policy import MeasurementPolicy
from fi_tunecache.need import Need, judge
from fi_tunecache.recorded_lookup import RecordedLookup, Served
from fi_tunecache.registry import open_registry
from fi_tunecache.retrieval import Pulled, pull
from fi_tunecache.selection import OtherLevel, Request, Selection
from fi_tunecache.user_cache import UserCache
from fi_tunecache.workload import Workload
from fi_tunecache.workload_record import RecordedSelection, WorkloadRecord, keep_workload

SELECTION = Selection(
    format=1,
    id="1" * 32,
    tool="fi-tunecache 1",
    created="2026-12-01",
    gpu="NVIDIA H200",
    flashinfer_version="0.7.4",
    level=MatchLevel.EXACT,
    policy={},
    registries=(("embedded", "abc"),),
    bundles=(),
    entries=0,
    other_level=OtherLevel(MatchLevel.COMPATIBLE, 0, 0),
    digest="2" * 64,
)


def record(
    *lookups: RecordedLookup, environment: Environment = made.H200, selection: Selection | None = None
) -> WorkloadRecord:
    return WorkloadRecord(
        workload=Workload.of("llama"),
        tool="fi-tunecache 1",
        recorded="2026-12-01T08:30:00Z",
        environment=environment,
        selection=None if selection is None else RecordedSelection.of(selection),
        lookups=lookups,
    )


def decide(*lookups: RecordedLookup) -> Need:
    return judge(record(*lookups, selection=SELECTION), made.H200, SELECTION)


COLD, HOT = made.POLICY, ("hot",)
REGISTRY, FILE, STORE, BUNDLED, MEMORY, TUNED, DEFAULT, SKIPPED = (
    lookup(served)
    for served in (
        Served.REGISTRY,
        Served.FILE,
        Served.STORE,
        Served.BUNDLED,
        Served.MEMORY,
        Served.TUNED,
        Served.DEFAULT,
        Served.SKIPPED,
    )
)


# --- the outcomes of one question


@pytest.mark.parametrize(
    "outcomes",
    [
        pytest.param([REGISTRY], id="from a registry"),
        pytest.param([FILE], id="from the user's file"),
        pytest.param([STORE], id="from a store"),
        pytest.param([BUNDLED], id="from FlashInfer's module"),
        pytest.param([DEFAULT, REGISTRY], id="the default before the first download"),
        pytest.param([TUNED, STORE], id="tuned, then in the store"),
        pytest.param([TUNED, MEMORY, FILE], id="tuned, then in the file"),
        pytest.param([FILE, MEMORY], id="in a file, which another thread had not read"),
        pytest.param([SKIPPED, FILE], id="excluded from tuning, and in a file"),
    ],
)
def test_a_question_that_is_covered(outcomes: Sequence[RecordedLookup]) -> None:
    assert decide(*outcomes) == Need(needed=False, covered=1)


@pytest.mark.parametrize(
    ("outcomes", "told"),
    [
        pytest.param([DEFAULT], DEFAULT, id="the default"),
        pytest.param([TUNED], TUNED, id="tuned"),
        pytest.param([MEMORY], MEMORY, id="tuned before it was recorded"),
        pytest.param([DEFAULT, TUNED, MEMORY], DEFAULT, id="the default, then tuned"),
        pytest.param([REGISTRY, DEFAULT], DEFAULT, id="the default after it was switched off"),
        pytest.param([FILE, TUNED, MEMORY], TUNED, id="tuned in spite of the file"),
        pytest.param([SKIPPED, TUNED], TUNED, id="excluded in one context, tuned in another"),
        pytest.param([lookup(Served.STORE, raced=True), TUNED], TUNED, id="stored for whoever races the default"),
        pytest.param([lookup(Served.FILE, policy=HOT), TUNED], TUNED, id="in a file under another policy"),
        pytest.param([lookup(Served.FILE, [made.TINY]), TUNED], TUNED, id="in a file for another caller"),
        pytest.param([lookup(Served.FILE, [made.TINY, made.CUDNN]), TUNED], TUNED, id="in a file in another order"),
    ],
)
def test_a_question_that_is_missing(outcomes: Sequence[RecordedLookup], told: RecordedLookup) -> None:
    need = decide(*outcomes)

    assert need.needed is True
    assert need.missing == {"bf16_gemm": (told,)}


@pytest.mark.parametrize(
    "outcomes",
    [
        pytest.param([SKIPPED], id="skipped"),
        pytest.param([SKIPPED, DEFAULT], id="and asked again outside the context"),
        pytest.param([DEFAULT, SKIPPED], id="or before it"),
        pytest.param([SKIPPED, lookup(Served.DEFAULT, raced=True)], id="or in one that races the default"),
    ],
)
def test_a_question_that_the_operator_has_excluded(outcomes: Sequence[RecordedLookup]) -> None:
    need = decide(*outcomes)

    assert need.needed is False
    assert need.missing == {}
    assert need.skipped
    assert need.skipped[0] == outcomes[0]


# --- several


def test_what_is_missing_is_told_by_op() -> None:
    """A new op, and a new shape of an old one, without anybody declaring them."""
    shape = lookup(Served.DEFAULT, m=64, reason="op known, shape not")
    ops = [lookup(Served.TUNED, m=m, op="a_new_op", reason="no entry for the op") for m in (1, 2)]
    need = decide(REGISTRY, shape, *ops, lookup(Served.STORE, m=2), lookup(Served.SKIPPED, op="skipped_op"))

    assert need == Need(
        needed=True,
        missing={"a_new_op": tuple(ops), "bf16_gemm": (shape,)},
        covered=2,
        skipped=(lookup(Served.SKIPPED, op="skipped_op"),),
    )
    assert list(need.missing) == ["a_new_op", "bf16_gemm"]
    assert str(need) == "autotuning is needed: 3 lookups missing of a_new_op, bf16_gemm, 2 covered"


def test_a_registry_answered_and_nobody_knows_which() -> None:
    need = judge(record(REGISTRY), made.H200, None)

    assert need.needed is None
    assert need.why.startswith("entries of a registry answered, and it is not recorded which")


def test_nothing_is_missing() -> None:
    need = decide(REGISTRY, lookup(Served.FILE, m=2))

    assert str(need) == "autotuning is not needed: 0 lookups missing, 2 covered"


@pytest.mark.parametrize(
    ("outcomes", "gains_nothing"),
    [
        pytest.param([lookup(Served.REGISTRY, answer=(made.CUDNN, -1))], True, id="an entry that names the default"),
        pytest.param([lookup(Served.TUNED, answer=(made.CUDNN, -1))], True, id="a race that the default has won"),
        pytest.param([lookup(Served.REGISTRY, answer=(made.TINY, -1))], False, id="another runner, left to choose"),
        pytest.param([lookup(Served.REGISTRY, answer=(made.CUDNN, 0))], False, id="a tactic of the first runner"),
        pytest.param([DEFAULT], False, id="the default for want of an answer"),
        pytest.param([SKIPPED], False, id="the default since it was excluded"),
        pytest.param(
            [lookup(Served.TUNED, answer=(made.CUDNN, -1)), lookup(Served.FILE)],
            False,
            id="of two answers one is another",
        ),
    ],
)
def test_where_there_is_evidence_that_tuning_gains_nothing(
    outcomes: Sequence[RecordedLookup], gains_nothing: bool
) -> None:
    assert decide(*outcomes).gains_nothing == (tuple(outcomes) if gains_nothing else ())


def test_a_race_that_the_default_has_won_is_missing_all_the_same() -> None:
    """A new process would run it again."""
    assert decide(lookup(Served.TUNED, answer=(made.CUDNN, -1))).needed is True


# --- unknown

OTHER = structs.replace(SELECTION, id="3" * 32)
CHANGED = structs.replace(SELECTION, digest="3" * 64)
NO_GPU = structs.replace(made.H200, gpu=None)
ONE_MORE = structs.replace(made.H200, other=(("driver", "580"),))
ELSEWHERE = made.H200.with_facts({"cutlass_dsl_version": "cpython-312;nvidia-cutlass-dsl==4.8.1:cc;torch==2.11.0:dd"})


@pytest.mark.parametrize(
    ("recorded", "environment", "selection", "why"),
    [
        pytest.param(
            None,
            made.H200,
            None,
            "nothing is recorded for this workload; run it with record_lookups(workload=...)",
            id="not recorded",
        ),
        pytest.param(
            record(), made.H200, None, "no lookup was recorded; record it while it does what it will do", id="no lookup"
        ),
        pytest.param(
            record(FILE),
            made.H200.with_facts({"flashinfer_version": "0.7.5"}),
            None,
            "flashinfer_version: recorded 0.7.4, here 0.7.5; record the workload again",
            id="another FlashInfer",
        ),
        pytest.param(
            record(FILE),
            made.H200.with_facts({"gpu": "NVIDIA B200", "cudnn_version": "92400"}),
            None,
            "cudnn_version: recorded 91900, here 92400, and gpu: recorded NVIDIA H200, here NVIDIA B200; "
            "record the workload again",
            id="another GPU and cuDNN",
        ),
        pytest.param(
            record(FILE),
            NO_GPU,
            None,
            "gpu: not known here; ask where it serves, or bring all facts with --environment FILE or --like",
            id="a fact that is not known here",
        ),
        pytest.param(
            record(FILE, environment=NO_GPU),
            NO_GPU,
            None,
            "gpu: recorded not known, here not known; record the workload again",
            id="what is not known equals nothing",
        ),
        pytest.param(
            record(FILE),
            ONE_MORE,
            None,
            "driver: recorded not known, here 580; record the workload again",
            id="a fact that FlashInfer did not have",
        ),
        pytest.param(
            record(FILE),
            made.H200,
            SELECTION,
            "there was no selection when it was recorded, now there is one; record the workload again",
            id="a selection has come",
        ),
        pytest.param(
            record(FILE, selection=SELECTION),
            made.H200,
            None,
            "there was a selection when it was recorded, now there is none; record the workload again",
            id="the selection is gone",
        ),
        pytest.param(
            record(FILE, selection=SELECTION),
            made.H200,
            OTHER,
            "the selection is another one than when it was recorded; record the workload again",
            id="another selection",
        ),
        pytest.param(
            record(FILE, selection=SELECTION),
            made.H200,
            CHANGED,
            "the selection is another one than when it was recorded; record the workload again",
            id="a selection of other entries",
        ),
    ],
)
def test_where_nobody_knows(
    recorded: WorkloadRecord | None, environment: Environment, selection: Selection | None, why: str
) -> None:
    need = judge(recorded, environment, selection)

    assert need == Need(needed=None, why=why)
    assert str(need) == f"not known whether autotuning is needed: {why}"


@pytest.mark.parametrize(
    ("recorded", "environment", "selection"),
    [
        pytest.param(record(FILE), made.H200, None, id="the same"),
        pytest.param(record(FILE), ELSEWHERE, None, id="the same packages in another virtual environment"),
        pytest.param(record(FILE, selection=SELECTION), made.H200, SELECTION, id="the same selection"),
        pytest.param(record(FILE, environment=ONE_MORE), ONE_MORE, None, id="a fact that only a newer FlashInfer has"),
    ],
)
def test_where_nothing_has_changed(
    recorded: WorkloadRecord, environment: Environment, selection: Selection | None
) -> None:
    assert judge(recorded, environment, selection).needed is False


def test_a_need_is_true_unless_it_is_known_that_there_is_none() -> None:
    assert [bool(Need(needed=needed)) for needed in (True, None, False)] == [True, True, False]


# --- the inquiry

EMBEDDED = open_registry("embedded").manifest(Folder.parse("0.7.4/nvidia-h200")).bundles[0].tuned_in


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UserCache:
    for name in ("FI_TUNECACHE_REGISTRY", "FI_TUNECACHE_MATCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FI_TUNECACHE_DIR", str(tmp_path / "cache"))
    return UserCache(tmp_path / "cache")


def pulled(cache: UserCache, level: MatchLevel = MatchLevel.EXACT, policy: str = "auto") -> Pulled:
    return pull(
        Request(
            environment=EMBEDDED,
            registries=("embedded",),
            level=level,
            policy=MeasurementPolicy.from_execution_mode(policy),
        ),
        cache=cache,
    )


def served(found: Pulled) -> list[RecordedLookup]:
    """As if each entry of a selection had answered the caller that asks for it alone."""
    return [
        RecordedLookup(keys=(entry.key,), served=Served.REGISTRY, runner=entry.runner, tactic=entry.tactic)
        for entry in read_cache_file(found.data).entries
    ]


def keep(cache: UserCache, lookups: Sequence[RecordedLookup], selection: Selection | None) -> None:
    keep_workload("llama", lookups, environment=EMBEDDED, selection=selection, cache=cache)


def test_a_workload_that_a_real_selection_covers(cache: UserCache) -> None:
    found = pulled(cache)
    keep(cache, served(found), found.selection)
    before = snapshot(cache.root)
    need = autotune_needed("llama", environment=EMBEDDED)

    assert (need.needed, need.covered) == (False, 165)
    defaults = [item for item in served(found) if item.tactic == -1]
    assert need.gains_nothing == tuple(defaults)
    assert len(defaults) == 23
    assert snapshot(cache.root) == before


def test_an_op_that_nobody_declared(cache: UserCache) -> None:
    found = pulled(cache)
    new = lookup(Served.TUNED, op="toy_op", reason="no entry for the op")
    keep(cache, [*served(found), new], found.selection)
    need = autotune_needed({"name": "llama"}, cache=cache, environment=EMBEDDED)

    assert need.needed is True
    assert need.missing == {"toy_op": (new,)}
    assert need.covered == 165


def test_registry_level_and_policy_are_those_of_the_record(cache: UserCache) -> None:
    found = pulled(cache, MatchLevel.COMPATIBLE, "cuda_graph")
    keep(cache, served(found), found.selection)

    assert autotune_needed("llama", cache=cache, environment=EMBEDDED).needed is False


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("FI_TUNECACHE_REGISTRY", "/elsewhere", "there was a selection when it was recorded, now there is none"),
        ("FI_TUNECACHE_MATCH", "exact", "there was a selection when it was recorded, now there is none"),
        ("FI_TUNECACHE", "off", "FI_TUNECACHE=off: entries of a registry answered when it was recorded"),
        ("FI_TUNECACHE", "observe", "FI_TUNECACHE=observe: entries of a registry answered when it was recorded"),
    ],
)
def test_a_start_here_would_obey_the_variables(
    cache: UserCache, monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    found = pulled(cache, MatchLevel.COMPATIBLE, "cuda_graph")
    keep(cache, served(found), found.selection)
    monkeypatch.setenv(name, value)
    need = autotune_needed("llama", cache=cache, environment=EMBEDDED)
    assert need.needed is None
    assert need.why.startswith(why)


def test_what_is_given_counts(cache: UserCache) -> None:
    found = pulled(cache, MatchLevel.COMPATIBLE, "cuda_graph")
    pulled(cache)
    keep(cache, served(found), found.selection)
    default = MeasurementPolicy()

    def why(**given: object) -> str:
        return autotune_needed("llama", cache=cache, environment=EMBEDDED, **given).why  # type: ignore[arg-type]

    assert why(match="compatible", registry=["embedded"]) == ""
    assert why(match="exact", policy=default).startswith("the selection is another one")
    assert why(registry="/elsewhere").startswith("there was a selection when it was recorded, now there is none")
    with pytest.raises(UsageError, match="match level 'fuzzy' is not known"):
        why(match="fuzzy")


def test_a_selection_that_comes_goes_and_changes(cache: UserCache) -> None:
    found = pulled(cache)
    path = cache.selection_path(found.selection.id)
    covered = [structs.replace(lookup, served=Served.FILE) for lookup in served(found)]  # which was pulled, perhaps

    def why() -> str:
        return autotune_needed("llama", cache=cache, environment=EMBEDDED).why

    path.unlink()
    keep(cache, covered, None)
    assert why() == ""
    cache.store(path, found.data)
    assert why().startswith("there was no selection when it was recorded, now there is one")
    keep(cache, covered, None)
    assert why() == "", "the one that is there is noted, in use or not"
    path.write_bytes(found.data + b" ")
    assert why().startswith("there was a selection when it was recorded, now there is none")
    assert cache.notices == [
        f"{path} was damaged (its digest is wrong: the file was changed); it is set aside as {path.name}.corrupt"
    ]


def test_by_default_it_is_about_this_machine(cache: UserCache) -> None:
    """Which is none that the embedded registry knows."""
    found = pulled(cache)
    keep(cache, served(found), found.selection)
    need = autotune_needed("llama")

    assert need.needed is None
    assert "gpu" in need.why
    assert autotune_needed("another").why.startswith("nothing is recorded for this workload")
