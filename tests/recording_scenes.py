"""Scenes of a program that is recorded, played in a process of ``serving_driver.py``, where FlashInfer is the real one.

Each has an autotuner and a folder of its own, and tells what was recorded as rows: how often, the context (``tune``,
``race``: it races the default), the op, M of the profile, who served, runner, tactic, and the name of the reason.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from flashinfer import autotuner
from flashinfer.autotune_cache import MeasurementPolicy, autotune_v2, autotune_v2_reload
from flashinfer.autotuner import AutoTuner, DynamicTensorSpec, TunableRunner, TuningConfig, autotune

import fi_tunecache
from fi_tunecache.lookups import Lookups, record_lookups
from fi_tunecache.miss import Miss
from fi_tunecache.recorded_lookup import RecordedLookup, Served
from fi_tunecache.serving import disable, enable

SCENES: dict[str, Callable[[], Any]] = {}
HAS_STRICT_REPLAY = "strict_replay" in inspect.signature(autotune_v2).parameters
STOCK = {name: AutoTuner.__dict__[name] for name in ("choose_one", "search_cache", "rank_tactics")}


def scene(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENES[function.__name__.replace("_", " ")] = function
    return function


class Toy(TunableRunner):
    """``times`` are those of its tactics, in milliseconds; None fails. What is in ``refused`` its own check refuses."""

    times: dict[Any, float | None]
    extras: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()
    valid: Callable[[], None] = staticmethod(lambda: None)

    def get_valid_tactics(self, inputs: Any, profile: Any) -> list[Any]:
        self.valid()
        return list(self.times)

    def get_cache_key_extras(self, inputs: Any) -> tuple[Any, ...]:
        return self.extras

    def validate_tactic(self, inputs: Any, tactic: Any) -> bool:
        return tactic not in self.refused

    def forward(self, inputs: Any, tactic: Any = -1, do_preparation: bool = False, **_: Any) -> None:
        return None


def toy(name: str = "First", times: dict[Any, float | None] | None = None, **members: Any) -> Toy:
    made: Toy = type(name, (Toy,), {"times": {1: 2.0, 2: 1.0} if times is None else times, **members})()
    return made


def config(**options: Any) -> TuningConfig:
    """M is dynamic: 1, 2 or 4."""
    spec = DynamicTensorSpec(
        input_idx=(0,),
        dim_idx=(0,),
        gen_tuning_buckets=(1, 2, 4),
        map_to_tuning_buckets=bucket,
    )
    return TuningConfig(dynamic_tensor_specs=(spec,), **options)


def bucket(m: int) -> int:
    return 4 if m >= 4 else 2 if m >= 2 else 1


CONFIG = config()


def ask(m: int, *runners: Toy, op: str = "toy", config: TuningConfig = CONFIG, **options: Any) -> Any:
    return AutoTuner.get().choose_one(op, list(runners or [toy()]), config, inputs(m), **options)


def rank(m: int, runner: Toy, op: str = "ranked", k: int = 2) -> Any:
    return AutoTuner.get().rank_tactics(op, [runner], CONFIG, inputs(m), k)


def inputs(m: int) -> list[Any]:
    return [torch.empty(m, 8, device="meta")]


def profile(tuner: AutoTuner, runner: Toy, given: Any, tactic: Any, *_: Any, **__: Any) -> float:
    time = 3.0 if tactic == -1 else runner.times[tactic]
    if time is None:
        raise RuntimeError("this tactic fails")
    return time


def file_key(m: int, runner: str = "First", op: str = "toy", extras: str = "()") -> str:
    return f"('{op}', '{runner}', (({m}, 8),), {extras})"


def load(entries: dict[str, list[Any]]) -> None:
    Path("mine.json").write_text(json.dumps({"_metadata": autotuner._collect_metadata(), **entries}))
    AutoTuner.get().load_configs("mine.json")


def rows(lookups: Lookups) -> list[str]:
    return list(map(row, lookups.recorded()))


def row(lookup: RecordedLookup) -> str:
    mode = "tune " * lookup.tuning + "race " * lookup.raced
    reason = {str(miss): f" {miss.name}" for miss in Miss}.get(lookup.reason, lookup.reason and f" {lookup.reason}")
    asked = f"{mode}{lookup.custom_op} {lookup.profile[0][0]}"
    return f"{lookup.count} {asked}: {lookup.served.value} {lookup.runner} {lookup.tactic}{reason}"


@contextlib.contextmanager
def recorded(**options: Any) -> Iterator[list[str]]:
    """Gives the list in which the rows will be."""
    found: list[str] = []
    with record_lookups(**options) as lookups:
        yield found
    found.extend(rows(lookups))


# --- who has answered


@scene
def nothing_is_loaded() -> Any:
    with recorded() as found:
        for _ in range(3):
            ask(3)
    return found


@scene
def tuned_and_asked_again() -> Any:
    with recorded() as found:
        with autotune(True):
            ask(3)
            ask(3)
        ask(2)
    return found


@scene
def tuned_before() -> Any:
    with autotune(True):
        ask(1)
    with recorded() as found:
        ask(1)
    return found


@scene
def tuned_into_a_file() -> Any:
    with recorded() as found:
        with autotune(True, cache="user.json"):
            ask(1)
        ask(1)
    return found


@scene
def tuned_saved_and_tuned_on() -> Any:
    with recorded() as found:
        with autotune(True, cache="user.json"):
            ask(1)
        with autotune(True):
            ask(1, op="other")
        ask(1)
    return found


@scene
def the_faster_runner() -> Any:
    with recorded() as found, autotune(True):
        ask(1, toy("First"), toy("Second", {(8, 1): 0.5}))
    return found


@scene
def a_tactic_that_is_a_list() -> Any:
    class Unhashable(Toy):
        times: ClassVar = {}

        def get_valid_tactics(self, inputs: Any, profile: Any) -> list[Any]:
            return [[8, [1, 2]]]

    AutoTuner._profile_single_kernel = lambda *_, **__: 1.0
    with recorded() as found:
        with autotune(True):
            ask(1, Unhashable())
        ask(1, Unhashable())
        ask(1, Unhashable())
    return found


@scene
def no_tactic_works() -> Any:
    with recorded() as found, autotune(True):
        ask(1, toy(times={1: None}))
        ask(1, toy(times={}))
    return found


@scene
def out_of_memory() -> Any:
    def out() -> None:
        raise MemoryError

    torch.cuda.empty_cache = lambda: None
    with recorded() as found, autotune(True):
        ask(1, toy(valid=staticmethod(out)))
    return found


@scene
def tuning_raises() -> Any:
    def fail() -> None:
        raise KeyError("a fault of an op")

    with recorded() as found, autotune(True), contextlib.suppress(KeyError):
        ask(1, toy(valid=staticmethod(fail)))
    return found


@scene
def tuned_under_other_extras() -> Any:
    """As cuBLASLt's of 0.7.2, which names the call's own M: what is tuned is never found."""

    class Exact(Toy):
        times: ClassVar = {1: 1.0}

        def get_cache_key_extras(self, inputs: Any) -> tuple[Any, ...]:
            return (inputs[0].shape[0],)

    AutoTuner._prepare_input_tensors = lambda tuner, profile, given: [
        torch.empty(profile.get_opt_shapes()[0], device="meta")
    ]
    with recorded() as found:
        with autotune(True):
            ask(3, Exact())
        ask(3, Exact())
    return found


@scene
def a_loaded_file() -> Any:
    load({file_key(2): ["First", 7], file_key(2, "Second"): ["Second", [5, 1]], file_key(4): ["First", -1]})
    with recorded() as found:
        ask(2)
        ask(3, toy("Second"), toy("First"))
        ask(4)
        with autotune(True):
            ask(4)
    return found


@scene
def a_file_and_then_another() -> Any:
    load({file_key(1): ["First", 7]})
    with recorded() as found:
        ask(1)
        AutoTuner.get()._file_configs.clear()
        ask(1)
        load({file_key(1): ["First", 8]})
        ask(1)
    return found


@scene
def a_managed_store() -> Any:
    with recorded() as found:
        with autotune_v2(cache_root="store"):
            ask(1)
        ask(1)
    AutoTuner._instance = None
    with recorded() as again, autotune_v2("replay", cache_root="store"):
        ask(1, toy(refused=(2,)))
        ask(1)
        ask(1, op="other")
        ask(1, toy("Second"))
        ask(1, toy(refused=(2,)))
    return [found, again]


@scene
def a_store_that_can_not_be_written() -> Any:
    Path("store").write_bytes(b"")
    with recorded() as found:
        with autotune_v2(cache_root="store"):
            ask(1)
        ask(1)
    return found


@scene
def a_policy_without_a_store() -> Any:
    policy = MeasurementPolicy(execution_mode="eager")
    with recorded() as found, autotune_v2(persistent_cache=False, measurement_policy=policy):
        ask(1)
        ask(1)
    return found


@scene
def a_bundled_module() -> Any:
    module = types.ModuleType("flashinfer.tuning_configs.v0_1_trtllm_fused_moe_Toy_GPU")
    module.best_configs = {file_key(1): (0, 6)}  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    torch.cuda.get_device_name = lambda *_: "Toy GPU"
    os.environ["FLASHINFER_AUTOTUNER_LOAD_FROM_FILE"] = "1"
    try:
        with recorded() as found:
            ask(1)
            ask(2)
    finally:
        del os.environ["FLASHINFER_AUTOTUNER_LOAD_FROM_FILE"]
    return found


@scene
def search_cache_itself() -> Any:
    tuner = AutoTuner.get()
    load({file_key(2): ["First", 7]})
    with recorded() as found:
        tuner.search_cache("toy", [toy()], ((2, 8),), CONFIG, inputs(2))
        tuner.search_cache("toy", [toy()], ((2, 8),), CONFIG)
        tuner.search_cache("toy", [toy(extras=(1,))], ((2, 8),), CONFIG)
        tuner.search_cache(runners=[toy()], custom_op="toy", input_shapes=((1, 8),), tuning_config=CONFIG, inputs=[])
        tuner.search_cache("toy", [], ((1, 8),), CONFIG, inputs(1))
        with autotune(True):
            tuner.search_cache("toy", [toy()], ((4, 8),), CONFIG, inputs(4))
    return found


# --- why nobody has


@scene
def what_comes_nearest() -> Any:
    load({file_key(1): ["First", 7], file_key(2, "Second"): ["Second", 7], file_key(4): ["Third", 7]})
    with recorded() as found:
        ask(1, op="other")
        ask(2, toy("Third"))
        ask(2, toy("First"))
        ask(1, toy("First", extras=(torch.bfloat16, True)))
        ask(4, toy("First"))
        ask(4, toy("Second"))
        ask(1, toy("First", refused=(7,)))
    return found


@scene
def what_was_tuned_counts_as_known() -> Any:
    with autotune(True):
        ask(1, config=TuningConfig())
    with recorded() as found:
        ask(2)
    return found


@scene
def another_policy() -> Any:
    policy = ["cuda_graph_profile_replays", None, "l2_cache_policy", "cold"]
    load({file_key(1): ["First", 7, policy], file_key(2): ["First", 7], file_key(4): ["First", 7]})
    with recorded() as found:
        with autotune(True):
            ask(1)
        ask(1)
    return found


@scene
def a_winner_of_another_policy() -> Any:
    with autotune(True):
        ask(1)
    cold = config(use_cold_l2_cache=True)
    with recorded() as found:
        with autotune(True):
            ask(1, config=cold)
        ask(1, config=cold)
    return found


@scene
def a_store_without_policies() -> Any:
    """As it was written by FlashInfer 0.7.0: what is there is served in replay, and tuned again."""
    with autotune_v2(cache_root="store"):
        ask(1)
    for path in Path("store").rglob("entries/*.json"):
        entry = json.loads(path.read_text())
        del entry["profiling_policy"]
        path.write_text(json.dumps(entry))
    AutoTuner._instance = None
    with recorded() as found, autotune_v2(cache_root="store"):
        ask(1)
    return found


@scene
def what_flashinfer_has_discarded() -> Any:
    """As it does from 0.7.4 on, where it has tuned again: here under another policy, and forgets the winner."""
    cold = ["cuda_graph_profile_replays", None, "l2_cache_policy", "cold"]
    load({file_key(1): ["First", 7, cold]})
    policy = MeasurementPolicy(execution_mode="eager")
    with recorded() as found:
        with autotune_v2(persistent_cache=False, measurement_policy=policy):
            ask(1, config=TuningConfig())
        autotune_v2_reload()
        with autotune_v2("replay", persistent_cache=False, measurement_policy=policy):
            ask(1)
    return found


@scene
def skipped() -> Any:
    load({file_key(2): ["First", 7]})
    with recorded() as found:
        with autotune(False, skip_ops={"toy"}, tuning_buckets=(1, 2)):
            ask(3)
            ask(2)
            ask(2)
        with autotune(True, skip_ops={"toy", "ranked"}):
            ask(3)
            rank(1, toy())
    return found


@scene
def ranked() -> Any:
    load({file_key(m, op="ranked"): ["First", 9] for m in (1, 3)})
    with recorded() as found:
        with autotune(True):
            rank(1, toy())
            rank(1, toy())
            rank(2, toy(), k=1)
            rank(1, toy(times={}), op="nothing to rank")
        rank(1, toy())
    return found


@scene
def buckets_of_the_context() -> Any:
    with recorded() as found:
        with autotune(True, tuning_buckets=(1, 3)):
            ask(3)
            rank(3, toy())
        with autotune(False, tuning_buckets=(1, 3)):
            ask(3)
        ask(3)
    return found


@scene
def the_policy_of_the_context() -> Any:
    policy = MeasurementPolicy(execution_mode="cuda_graph")
    with record_lookups() as lookups, autotune_v2("replay", persistent_cache=False, measurement_policy=policy):
        ask(1)
        with autotune(False, skip_ops={"toy"}):
            ask(1, do_something=True)
    return [list(lookup.policy or ()) for lookup in lookups.recorded()]


# --- with entries of a registry: those of test_recording.py


def block(op: str, tactic: int) -> None:
    AutoTuner.get()._blocklist._invalid[f"{op}::First"] = {tactic}


@scene
def a_registry() -> Any:
    block("blocked", 71)
    load({file_key(1, "Second", op="own"): ["Second", 5]})
    enable()
    with record_lookups() as lookups:
        ask(1)
        ask(1)
        ask(4)
        ask(1, op="other")
        ask(1, toy("Second"))
        ask(1, toy(extras=(0,)))
        ask(1, toy(refused=(70,)))
        ask(1, op="blocked")
        ask(1, op="dropped")
        ask(1, op="own")
        ask(1, toy("First"), toy("Second"), op="own")
        ask(2)
        with autotune(True, cache="user.json"):
            ask(2)
        ask(2)
    return [*rows(lookups), [selection.entries for selection in lookups.report().selections]]


@scene
def a_registry_that_was_tuned_over() -> Any:
    enable()
    with recorded() as found:
        with autotune(True):
            ask(2, config=TuningConfig())
        autotune_v2_reload()
        ask(2)
    return found


@scene
def a_registry_without_its_reasons() -> Any:
    """The file beside the selection is damaged, or gone."""
    from fi_tunecache.user_cache import UserCache

    enable()
    ask(1)
    found = []
    (path,) = UserCache.locate().root.glob("selections/*.resolution.json")
    data = path.read_bytes()
    try:
        for damaged in (b"{", b"{}", None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with recorded() as each:
                ask(1, op="dropped")
            found.append(each)
    finally:
        path.write_bytes(data)
    return found


@scene
def a_registry_where_the_default_races() -> Any:
    enable()
    with recorded() as found:
        with autotune_v2(persistent_cache=False):
            ask(1, op="unraced", config=TuningConfig())
            ask(1, config=TuningConfig())
        with autotune_v2("replay", persistent_cache=False):
            ask(1, op="unraced two")
    return found


@scene
def a_registry_and_a_policy() -> Any:
    enable()
    policy = MeasurementPolicy(execution_mode="eager")
    with recorded() as found:
        ask(1)
        with autotune_v2("replay", persistent_cache=False, measurement_policy=policy):
            ask(1)
    return found


@scene
def a_store_that_is_seeded() -> Any:
    block("blocked", 71)
    enable()
    with recorded() as found:
        with autotune_v2("replay", cache_root="store"):
            ask(1)
            ask(1)
            ask(1, op="blocked")
            ask(1, op="dropped")
            ask(4)
        with autotune_v2(cache_root="store"):
            ask(1, op="mine", config=TuningConfig())
        ask(1, op="mine")
    return found


@scene
def what_has_not_raced_and_a_store() -> Any:
    enable()
    with recorded() as found:
        with autotune_v2("replay", cache_root="store"):
            ask(1, op="unraced")
        with autotune_v2(cache_root="store"):
            ask(1, op="unraced", config=TuningConfig())
        ask(1, op="unraced")
    return found


@scene
def a_store_that_is_seeded_too_late() -> Any:
    with recorded() as found, autotune_v2("replay", cache_root="store"):
        ask(1)
        enable()
        ask(1)
    return found


@scene
def enabled_and_disabled() -> Any:
    with recorded() as found:
        ask(1)
        enable()
        ask(1)
        disable()
        ask(1)
        AutoTuner.get().clear_cache()
        ask(1)
    return found


@scene
def observed() -> Any:
    os.environ["FI_TUNECACHE"] = "observe"
    try:
        block("blocked", 71)
        load({file_key(1, "Second", op="own"): ["Second", 5]})
        enable()
        with recorded(workload="observed") as found:
            for op in ("toy", "blocked", "own", "other", "unraced"):
                ask(1, op=op)
            ask(4)
            with autotune(True):
                ask(2, config=TuningConfig())
                ask(1, config=TuningConfig())
            with autotune_v2(persistent_cache=False):
                ask(1, op="unraced two", config=TuningConfig())
            with autotune_v2("replay", cache_root="store"):
                ask(1)
    finally:
        del os.environ["FI_TUNECACHE"]
    return found


@scene
def kept() -> Any:
    from fi_tunecache.inquiry import autotune_needed
    from fi_tunecache.user_cache import UserCache
    from fi_tunecache.workload_record import find_record

    enable()
    with record_lookups(workload={"model": "toy", "tp": "2"}) as lookups:
        ask(1)
        ask(4)
    (selection,) = lookups.report().selections
    record = find_record(UserCache.locate(), "model=toy,tp=2")
    assert record is not None
    assert record.selection is not None
    missing = autotune_needed("model=toy,tp=2", environment=record.environment)
    return [
        record.lookups == lookups.recorded(),
        record.selection.id == selection.id,
        record.environment.gpu,
        str(missing),
    ]


@scene
def not_kept() -> Any:
    from fi_tunecache.user_cache import UserCache
    from fi_tunecache.workload_record import find_record

    with contextlib.suppress(KeyError), record_lookups(workload="raises"):
        ask(1)
        raise KeyError
    with record_lookups(workload="asks nothing"):
        pass
    with record_lookups(workload="has a fault") as lookups:
        recorder = lookups._recorder
        assert recorder is not None
        recorder._look_into = None  # type: ignore[assignment, method-assign]
        ask(1)
    refused = []
    for name in ("a,b", {}):
        try:
            with record_lookups(workload=name):
                refused.append("goes on")
        except fi_tunecache.UsageError:
            refused.append("UsageError")
    names = ("raises", "asks nothing", "has a fault")
    return [refused, [find_record(UserCache.locate(), name) for name in names]]


# --- FlashInfer's own diagnostics (0.7.4)


@scene
def as_replay_coverage_says() -> Any:
    """Every kind of source, within one context."""
    try:
        from flashinfer.autotune_cache import ReplayCoverage
    except ImportError:
        return None
    with autotune_v2(cache_root="store"):
        ask(4, op="mine")
    AutoTuner._instance = None
    load({file_key(1, op="loaded"): ["First", 2]})
    with autotune(True):
        ask(2, op="remembered")
    enable()
    told = []
    for options in ({"persistent_cache": False}, {"cache_root": "store"}):
        coverage = ReplayCoverage(max_records=1000)
        with (
            record_lookups() as lookups,
            autotune_v2("replay", replay_report=coverage, skip_ops={"skipped"}, **options),
        ):
            for _ in range(2):
                for op in ("toy", "mine", "loaded", "other", "skipped", "remembered"):
                    for m in (1, 2, 3, 4):
                        ask(m, op=op)
        served = lookups.report().served
        counts = {each.value: count for each, count in served.items() if count}
        answers = sum(count for each, count in served.items() if each.answers)
        agrees = (answers, served[Served.DEFAULT], served[Served.SKIPPED]) == (
            coverage.hits,
            coverage.misses,
            coverage.skipped,
        )
        told.append([agrees, counts, pairs(coverage.records, lookups)])
    return told


def pairs(records: list[dict[str, Any]], lookups: Lookups) -> list[str]:
    """Which of FlashInfer's sources goes with whom of ours, by op and shape."""
    ours: dict[Any, set[str]] = {}
    for lookup in lookups.recorded():
        ours.setdefault((lookup.custom_op, lookup.profile[0][0]), set()).add(lookup.served.value)
    found = set()
    for record in records:
        key = (record["op"], bucket(record["input_shapes"][0][0]))
        assert len(ours[key]) == 1
        found.add(f"{record['source']}: {', '.join(ours[key])}")
    return sorted(found)


@scene
def a_strict_replay() -> Any:
    try:
        from flashinfer.autotune_cache import ReplayCoverage
    except ImportError:
        return None
    with autotune_v2(cache_root="store"):
        ask(1)
    coverage = ReplayCoverage()
    refused = 0
    with recorded() as found:
        context = autotune_v2(
            "replay", cache_root="store", cache_scope="context", replay_report=coverage, strict_replay=True
        )
        with context:
            ask(1)
            for _ in range(2):
                try:
                    ask(1, op="other")
                except RuntimeError:
                    refused += 1
    return [found, refused, coverage.hits, coverage.misses]


# --- calls within calls, and threads


@scene
def a_runner_that_asks() -> Any:
    def asks() -> None:
        ask(1, toy("Inner"), op="inner", config=TuningConfig())
        AutoTuner.get().search_cache("inner", [toy("Inner")], ((1, 8),), TuningConfig(), inputs(1))
        rank(1, toy("Ranked"))

    with recorded() as found, autotune(True):
        ask(1, toy("Outer", valid=staticmethod(asks)), op="outer", config=TuningConfig())
    return found


@scene
def many_threads() -> Any:
    """Some tune, one after the other; some ask, directly and by ``choose_one``; some skip."""
    load({file_key(1): ["First", 7]})
    tuner = AutoTuner.get()
    start = threading.Barrier(12)

    def work(number: int) -> None:
        start.wait()
        for _ in range(200):
            if number % 3 == 0:
                ask(1)
            elif number % 3 == 1:
                tuner.search_cache("toy", [toy()], ((1, 8),), CONFIG, inputs(1))
            else:
                with autotune(False, skip_ops={"skipped"}):
                    ask(1, op="skipped")
                ask(1, op=f"tuned {number}")

    with record_lookups() as lookups, autotune(True):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    total: dict[str, int] = {}
    for lookup in lookups.recorded():
        name = f"{lookup.custom_op.split()[0]} {lookup.profile[0][0]} {lookup.served.value}"
        total[name] = total.get(name, 0) + lookup.count
    return total


# --- the recording itself


@scene
def plain_again() -> Any:
    before = {name: AutoTuner.__dict__[name] for name in STOCK}
    with record_lookups():
        during = {name: AutoTuner.__dict__[name] for name in STOCK}
        signatures = [inspect.signature(during[name]) == inspect.signature(STOCK[name]) for name in STOCK]
    after = {name: AutoTuner.__dict__[name] for name in STOCK}
    changed = [name for name in STOCK if during[name] is not STOCK[name]]
    return [before == STOCK, sorted(changed), signatures, after == STOCK]


@scene
def two_recordings() -> Any:
    with record_lookups() as outer:
        ask(1)
        with record_lookups() as inner:
            ask(1)
        ask(2)
    return [rows(outer), rows(inner), AutoTuner.__dict__["choose_one"] is STOCK["choose_one"]]


@scene
def somebody_else_wraps_too() -> Any:
    """What is below theirs can't be taken away; it counts nothing any more."""
    passed = []

    def theirs(name: str) -> Callable[..., Any]:
        ours = AutoTuner.__dict__[name]

        @functools.wraps(ours)
        def function(*given: Any, **options: Any) -> Any:
            passed.append(name)
            return ours(*given, **options)

        return function

    def ask_all() -> None:
        ask(1, flag=True)
        with autotune(True, skip_ops={"skipped"}):
            ask(1, op="skipped")
            rank(1, toy())

    with record_lookups() as first:
        for name in STOCK:
            setattr(AutoTuner, name, theirs(name))
        mine = {name: AutoTuner.__dict__[name] for name in STOCK}
        ask_all()
    ask_all()
    with record_lookups() as second:
        ask_all()
    return [rows(first), rows(second), len(passed), mine == {name: AutoTuner.__dict__[name] for name in STOCK}]


@scene
def the_end_while_a_call_runs() -> Any:
    recording = Lookups()
    recording.start()
    with autotune(True):
        chosen = ask(1, toy(valid=staticmethod(recording.stop)))
    return [type(chosen[0]).__name__, chosen[1], rows(recording)]


@scene
def too_many() -> Any:
    from fi_tunecache.autotuner import outcome

    outcome.MAX_OUTCOMES = 2
    try:
        with record_lookups(workload="toy") as lookups:
            for m in (1, 2, 4, 4, 1):
                ask(m)
            ask(1, toy(), toy("Second"))
            with autotune(False, tuning_buckets=(1, 2, 4)):
                ask(1)
    finally:
        outcome.MAX_OUTCOMES = 100_000
    return [rows(lookups), list(lookups.report().notes)]


@scene
def a_small_table() -> Any:
    """What is remembered of one key is forgotten for another, and found again."""
    from fi_tunecache.autotuner import recording

    recording._MAX_HOT = 2
    try:
        with recorded() as found:
            for m in (1, 2, 4) * 10:
                ask(m)
    finally:
        recording._MAX_HOT = 50_000
    return found


@scene
def a_configuration_for_each_call() -> Any:
    with record_lookups() as lookups:
        for _ in range(100):
            ask(1, config=TuningConfig())
        recorder = lookups._recorder
        assert recorder is not None
        kept = [len(recorder._hot), len(recorder._configs)]
    return [rows(lookups), *kept]


@scene
def what_was_kept_is_let_go() -> Any:
    """A configuration may hold tensors."""
    with record_lookups() as lookups:
        for m in (1, 2):
            ask(m, config=TuningConfig())
    recorder = lookups._recorder
    assert recorder is not None
    return [len(lookups.recorded()), len(recorder._hot), len(recorder._configs)]


@scene
def arguments_named_like_ours() -> Any:
    """``choose_one`` hands them on to the runners."""
    with recorded() as found:
        ask(1, tuner=5, inner=6)
    return found


@scene
def a_policys_winner_is_not_saved() -> Any:
    """Nor is it by whoever saves something else later."""
    policy = MeasurementPolicy(execution_mode="eager")
    with recorded() as found:
        with autotune_v2(persistent_cache=False, measurement_policy=policy):
            ask(1)
            ask(1)
        with autotune(True, cache="else.json"):
            ask(2)
    return [row for row in found if "race" in row and "tuned" not in row]


@scene
def a_configuration_without_a_hash() -> Any:
    with recorded() as found:
        ask(1, config=TuningConfig(tensor_initializers=[]))
        ask(1, config=TuningConfig(tensor_initializers=[]))
    return found


@scene
def keys_that_no_file_can_hold() -> Any:
    with record_lookups(workload="toy") as lookups:
        ask(1, toy(extras=(object,)))
    saved = None
    try:
        lookups.save("lookups.json")
    except fi_tunecache.FormatError as error:
        saved = type(error).__name__
    (lookup,) = lookups.recorded()
    return [lookup.custom_op, lookup.served.value, lookup.keys[0].text, saved, Path("lookups.json").exists()]


@scene
def a_file_for_publish() -> Any:
    from fi_tunecache.publish.recorded_lookups import questions_at
    from fi_tunecache.recorded_lookup import read_lookups

    with record_lookups() as lookups:
        ask(1, toy("First", extras=(torch.bfloat16, None)), toy("Second"))
        with autotune(True):
            ask(1, toy("First"))
    lookups.save("lookups.json")
    read = read_lookups(Path("lookups.json").read_bytes())
    return [read == lookups.recorded(), len(questions_at(Path("lookups.json")))]


@scene
def a_report_while_it_goes_on() -> Any:
    from fi_tunecache.lookups import report

    with record_lookups():
        before = report().lookups
        ask(1)
        during = report().lookups
        ask(1)
    ask(1)
    return [before, during, report().lookups]


def work() -> Any:
    """All that is recorded, in one program."""
    told: list[Any] = []

    def nested() -> None:
        told.append(ask(1, toy("Inner"), op="inner")[1])

    load({file_key(1, op="loaded"): ["First", 7]})
    with autotune(True, skip_ops={"skipped"}):
        told.append(ask(3, toy(), toy("Second", {5: 0.5}, valid=staticmethod(nested)))[1])
        told.append(rank(1, toy()))
        told.append(rank(1, toy()))
        told.append(rank(1, toy(times={}), op="nothing to rank"))
        told.append(ask(1, op="skipped")[1])
        told.append(rank(1, toy(), op="skipped"))
        told.append(ask(1, toy(times={1: None}), op="hopeless")[1])
    told.append(ask(1, op="loaded")[1])
    told.append(ask(1, op="unknown")[1])
    told.append(ask(3)[1])
    with autotune_v2(cache_root="store"):
        told.append(ask(1, op="stored")[1])
    told.append(ask(1, op="stored")[1])
    if HAS_STRICT_REPLAY:
        with autotune_v2("replay", cache_root="store", cache_scope="context", strict_replay=True):
            for op in ("stored", "unknown"):
                try:
                    told.append(ask(1, op=op)[1])
                except RuntimeError as error:
                    told.append(str(error))
    return told


def functions_of(*modules: Any) -> Iterator[tuple[Any, str]]:
    for module in modules:
        for owner in (module, *(kind for kind in vars(module).values() if isinstance(kind, type))):
            if getattr(owner, "__module__", module.__name__) == module.__name__:
                for name, value in list(vars(owner).items()):
                    if isinstance(value, (types.FunctionType, classmethod, staticmethod, property)):
                        function = getattr(value, "__func__", getattr(value, "fget", value))
                        if getattr(function, "__module__", None) == module.__name__:
                            yield owner, name


@scene
def a_fault_in_each_function() -> Any:
    """Each of ours in turn raises. Left are the program's results, FlashInfer's own functions, and one warning."""
    from fi_tunecache import explanation, miss
    from fi_tunecache.autotuner import observation, outcome, recording

    AutoTuner._instance = None
    expected = work()
    called: set[Any] = set()
    found = {}
    for owner, name in functions_of(recording, observation, outcome, miss, explanation):
        path = f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
        if path == "Recorder._stop_for":
            continue  # who ends the recording where another fails
        original = vars(owner)[name]
        kind = type(original)

        def planted(*_: Any, path: str = path, **__: Any) -> Any:
            called.add(path)
            raise ZeroDivisionError("planted")

        setattr(owner, name, kind(planted) if kind in (classmethod, staticmethod, property) else planted)
        AutoTuner._instance = None
        LOG.clear()
        (scratch := Path(path)).mkdir()
        os.chdir(scratch)
        try:
            with record_lookups():
                told = work()
        finally:
            os.chdir("..")
            setattr(owner, name, original)
        plain = all(AutoTuner.__dict__[each] is STOCK[each] for each in STOCK)
        if told != expected or len(LOG) != (path in called) or plain is not (path != "Recorder.stop"):
            found[path] = [told, plain, *LOG]
        restore()
    assert len(called) > 50
    return found


def restore() -> None:
    for each, value in STOCK.items():
        setattr(AutoTuner, each, value)


LOG: list[str] = []


class _Log(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            LOG.append(record.getMessage())


def play(folder: str) -> dict[str, Any]:
    """All scenes; of one that raises the traceback."""
    AutoTuner._profile_single_kernel = profile
    logging.getLogger("fi_tunecache").addHandler(_Log())
    told = {}
    originals = {name: getattr(AutoTuner, name) for name in ("_profile_single_kernel", "_prepare_input_tensors")}
    for name, function in SCENES.items():
        AutoTuner._instance = None
        autotuner.autotuner.load_from_file.cache_clear()
        for each, value in originals.items():
            setattr(AutoTuner, each, value)
        LOG.clear()
        (here := Path(folder, "scenes", name)).mkdir(parents=True)
        os.chdir(here)
        try:
            told[name] = [function(), list(LOG)]
        except Exception:  # noqa: BLE001
            told[name] = [traceback.format_exc(), list(LOG)]
        disable()
        restore()
        os.chdir(folder)
    return told
