"""What ``enable()`` leaves as it is, and when it acts: threads, forks, graphs, contexts, the program's own results."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hub_registry import REGISTRY
from hub_registry import publish as put
from hub_server import Fault, HubServer
from programs import Answer, Machine, Programs, bundles_of

from fi_tunecache.bundle import MARK, Bundle
from fi_tunecache.environment import Environment
from fi_tunecache.flashinfer_json import read_cache_file
from fi_tunecache.publish.directory import add_bundles

pytestmark = pytest.mark.slow

VERSIONS = ("0.7.4", "0.7.2.post1", "0.7.2")
Make = Callable[..., Machine]


@pytest.fixture
def machine(programs: Callable[[str], Programs], tmp_path: Path) -> Make:
    """A machine with a directory registry of bundles; by default those of 0.7.4 whose default raced."""

    def make(*bundles: Bundle, version: str = "0.7.4") -> Machine:
        chosen = bundles or tuple(bundles_of(version))
        add_bundles(tmp_path / "registry", "made", list(chosen))
        folder = tmp_path / "machine"
        folder.mkdir()
        return Machine(programs(version), folder, chosen, FI_TUNECACHE_REGISTRY=str(tmp_path / "registry"))

    return make


@pytest.fixture
def with_hub(machine: Make, hub: HubServer) -> Machine:
    """The same with a registry on the Hub."""
    here = machine()
    put(hub, *here.bundles)
    here.environ |= {"HF_ENDPOINT": hub.endpoint, "FI_TUNECACHE_REGISTRY": REGISTRY}
    hub.clear_log()
    return here


def plain(here: Machine, program: str) -> Answer:
    """The same program without us."""
    return here.run(program.replace("fi_tunecache.enable", "(lambda *_, **__: None)"))


LOOKUPS = "[ask(lookup) for lookup in given]"
STOCK = 'AutoTuner.__dict__["choose_one"] is STOCK["choose_one"]'


# --- when it acts


def test_many_threads_wait_for_one_download(with_hub: Machine, hub: HubServer) -> None:
    answer = with_hub.run("""
fi_tunecache.enable()
result, start = {}, threading.Barrier(16)
def work(number):
    start.wait()
    result[number] = ask(given[number])
threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
result = [result[number] for number in range(16)]
""")
    assert answer.result == with_hub.expected[:16]
    assert len(answer.lines("INFO")) == 1
    assert len(hub.requests()) <= 5


def test_threads_wait_no_longer_than_the_deadline(with_hub: Machine, hub: HubServer) -> None:
    hub.fault(Fault(hang=math.inf))
    answer = with_hub.run(f"""
fi_tunecache.enable(deadline=1.0)
result, took = {{}}, []
def work(number):
    started = time.perf_counter()
    result[number] = ask(given[number])
    took.append(time.perf_counter() - started)
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
result = [[result[number] for number in range(4)], max(took), {STOCK}]
""")
    chosen, longest, is_stock = answer.result
    assert chosen == plain(with_hub, f"given = given[:4]\nresult = {LOOKUPS}").result
    assert 0.5 < longest < 2.0
    assert is_stock
    assert len(answer.lines("WARNING")) == 1


def test_a_thread_that_holds_the_tuners_lock_is_let_through(machine: Make) -> None:
    """Others may be waiting for it; a runner that is being timed may ask for another op."""
    here = machine()
    answer = here.run(f"""
fi_tunecache.enable()
with tuner()._lock:
    first = ask(given[0])
result = [first, {STOCK}, ask(given[0]), {STOCK}]
""")
    assert answer.result == [plain(here, "result = ask(given[0])").result, False, here.expected[0], True]


def test_a_lock_that_another_thread_holds_and_waits(machine: Make) -> None:
    """It may wait for this thread, whose lookup needs no lock: the op is skipped."""
    here = machine()
    answer = here.run("""
fi_tunecache.enable(deadline=0.5)
held, finished = threading.Event(), threading.Event()
def hold():
    with tuner()._lock:
        held.set()
        finished.wait(10)
thread = threading.Thread(target=hold)
thread.start()
held.wait()
started = time.perf_counter()
stack = tuner()._get_skip_ops_stack()  # autotune(skip_ops=…) itself would wait for the lock
stack.append(frozenset({"bf16_gemm", "fp8_gemm"}))
skipped = ask(given[0])
stack.pop()
seconds = time.perf_counter() - started
finished.set()
thread.join()
result = [skipped, seconds, ask(given[0])]
""")
    skipped, seconds, served = answer.result
    assert skipped == [here.lookups[0]["runners"][0][0], -1]
    assert seconds < 2
    assert served == here.expected[0]
    assert answer.lines("WARNING") == []


def test_an_interrupt_of_the_first_lookup(machine: Make) -> None:
    """It goes through, and the next lookup does what this one did not."""
    here = machine()
    answer = here.run(f"""
from fi_tunecache import hook
collect = hook.collect_metadata
def interrupted():
    hook.collect_metadata = collect
    raise KeyboardInterrupt
hook.collect_metadata = interrupted
fi_tunecache.enable()
try:
    ask(given[0])
    raised = False
except KeyboardInterrupt:
    raised = True
result = [raised, {LOOKUPS}, {STOCK}]
""")
    assert answer.result == [True, here.expected, True]


def test_arguments_that_are_named_like_ours(machine: Make) -> None:
    """``choose_one`` hands whatever is named on to the runners."""
    here = machine()
    answer = here.run("""
import flashinfer_driver as driver
fi_tunecache.enable()
lookup = given[0]
runners = [driver.toy_runner(name, extras, {}) for name, extras in lookup["runners"]]
inputs = [None if shape == [0] else torch.empty(shape, device="meta") for shape in lookup["shapes"]]
config = driver.TUNING_CONFIGS[lookup["custom_op"]]
given = dict(tuner=1, inner=2, self_=3, around=4, runner=5)
result = type(tuner().choose_one(lookup["custom_op"], runners, config, inputs, **given)[0]).__name__
""")
    assert answer.result == here.expected[0][0]


def test_nothing_happens_while_a_graph_is_recorded(machine: Make) -> None:
    here = machine()
    answer = here.run(f"""
fi_tunecache.enable()
torch.cuda.is_initialized = torch.cuda.is_current_stream_capturing = lambda: True
captured = {LOOKUPS}
torch.cuda.is_current_stream_capturing = lambda: False
result = [captured, {LOOKUPS}]
""")
    assert answer.result == [plain(here, f"result = {LOOKUPS}").result, here.expected]


FORK = """
def in_child(work):
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, json.dumps(work()).encode())
        os._exit(0)
    os.close(writes)
    said = b"".join(iter(lambda: os.read(reads, 1 << 16), b""))
    os.waitpid(child, 0)
    return json.loads(said)
"""


def test_children_that_are_forked_before_the_first_lookup(machine: Make) -> None:
    here = machine()
    answer = here.run(f"""{FORK}
fi_tunecache.enable()
result = [in_child(lambda: {LOOKUPS}), in_child(lambda: {LOOKUPS}), {LOOKUPS}]
""")
    assert answer.result == [here.expected] * 3


def test_children_that_are_forked_after_it(machine: Make) -> None:
    here = machine()
    answer = here.run(f"""{FORK}
fi_tunecache.enable()
ask(given[0])
result = in_child(lambda: [{LOOKUPS}, {STOCK}])
""")
    assert answer.result == [here.expected, True]


def test_a_child_that_is_forked_while_another_thread_downloads(with_hub: Machine, hub: HubServer) -> None:
    """It does not wait for a thread that it does not have; here it downloads itself, once the Hub answers."""
    hub.fault(Fault(hang=math.inf, times=1))
    answer = with_hub.run(f"""{FORK}
fi_tunecache.enable(deadline=3.0)
thread = threading.Thread(target=lambda: ask(given[0]))
thread.start()
time.sleep(0.5)
result = in_child(lambda: {LOOKUPS})
thread.join()
""")
    assert answer.result == with_hub.expected


def test_flashinfer_is_imported_later(machine: Make, flashinfer_folder: Callable[[str], Path]) -> None:
    """``enable()`` imports neither FlashInfer nor torch, and what imports them finds nothing changed but the hook."""
    here = machine()
    code = f"""
import sys
import fi_tunecache
fi_tunecache.enable()
assert not {{"torch", "flashinfer", "huggingface_hub"}} & sys.modules.keys()
sys.path.insert(0, {str(flashinfer_folder("0.7.4"))!r})
from flashinfer import autotuner
assert type(autotuner.__loader__).__name__ == "SourceFileLoader"
assert autotuner.__spec__.loader is autotuner.__loader__
print(autotuner.AutoTuner.choose_one is not autotuner.AutoTuner.choose_one.__wrapped__)
fi_tunecache.disable()
print(hasattr(autotuner.AutoTuner.choose_one, "__wrapped__"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=here.environ, cwd=here.folder, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]


# --- variables


@pytest.mark.parametrize(
    ("value", "warning"),
    [
        pytest.param("off", [], id="off"),
        pytest.param("perhaps", ["FI_TUNECACHE=perhaps is not known; set it to off, observe or on"], id="not known"),
    ],
)
def test_the_variable_switches_it_off(machine: Make, value: str, warning: list[str]) -> None:
    here = machine()
    answer = here.run(f"fi_tunecache.enable()\nresult = [{STOCK}, {LOOKUPS}]", FI_TUNECACHE=value)
    assert answer.result == [True, plain(here, f"result = {LOOKUPS}").result]
    assert answer.lines("WARNING") == [f"fi-tunecache: {line}; FlashInfer goes on without it" for line in warning]
    assert not here.cache.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param("match='nearly'", "match level 'nearly' is not known; use exact or compatible", id="match"),
        pytest.param("deadline=0", "a deadline of 0 seconds makes no sense; give a positive number", id="deadline"),
    ],
)
def test_arguments_that_make_no_sense(machine: Make, arguments: str, message: str) -> None:
    answer = machine().run(f"""
try:
    fi_tunecache.enable({arguments})
except fi_tunecache.UsageError as error:
    result = [str(error), {STOCK}]
""")
    assert answer.result == [message, True]


def test_enabling_again(machine: Make) -> None:
    """The same again changes nothing; with something else it starts anew."""
    here = machine()
    answer = here.run(f"""
fi_tunecache.enable()
fi_tunecache.enable()
served = {LOOKUPS}
fi_tunecache.enable()
same = {STOCK}
fi_tunecache.enable(match="compatible")
result = [served, same, {STOCK}, {LOOKUPS}]
""")
    assert answer.result == [here.expected, True, False, here.expected]
    assert [line.split(" from ")[0].rpartition(" ")[2] for line in answer.lines("INFO")] == ["(exact)", "(compatible)"]


def test_disabling(machine: Make) -> None:
    """What was served stays, as from a file; the rest is FlashInfer's again, its tables too."""
    here = machine()
    without = here.run(f"result = {LOOKUPS}").result
    tuned = next(number for number, answer in enumerate(without) if answer != here.expected[number])
    answer = here.run(f"""
fi_tunecache.enable()
ask(given[{tuned}])
fi_tunecache.disable()
tables = [type(tuner()._file_configs), type(tuner()._file_config_policies), type(tuner()._managed_stores)]
result = [tables == [dict] * 3, {LOOKUPS}, len(tuner()._file_configs)]
fi_tunecache.disable()
""")
    plain_dicts, rest, left = answer.result
    assert (plain_dicts, left) == (True, 1)
    assert rest == [*without[:tuned], here.expected[tuned], *without[tuned + 1 :]]


def test_disabling_before_the_first_lookup(machine: Make) -> None:
    here = machine()
    answer = here.run(f"fi_tunecache.enable()\nfi_tunecache.disable()\nresult = [{STOCK}, {LOOKUPS}]")
    assert answer.result == [True, plain(here, f"result = {LOOKUPS}").result]


# --- the program's own results, and FlashInfer's other switches


def local(lookup: dict[str, Any]) -> list[Any]:
    runner = lookup["runners"][-1][0]
    return [runner, [7, []] if runner.startswith("Cudnn") else 7]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_that_is_loaded_after_ours_were_served(machine: Make, version: str) -> None:
    here = machine(version=version)
    here.run(
        """
with autotune(True, cache="user.json"):
    [ask(lookup, [offer]) for lookup, offer in given]
""",
        given=[[lookup, local(lookup)] for lookup in here.lookups],
    )
    program = f"""
fi_tunecache.enable()
before = {LOOKUPS}
{{load}}
result = [before, {LOOKUPS}]
"""
    alone = here.run(f"tuner().load_configs('user.json')\nresult = {LOOKUPS}").result
    assert here.run(program.format(load="tuner().load_configs('user.json')")).result == [here.expected, alone]
    context = f"with autotune(False, cache='user.json'): result = [before, {LOOKUPS}]"
    assert here.run(f"fi_tunecache.enable()\nbefore = {LOOKUPS}\n{context}").result == [here.expected, alone]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_saved_after_a_file_was_loaded(machine: Make, version: str) -> None:
    """Ours were served before, under runners that come first: they must not be in the way of the program's own."""
    here = machine(version=version)
    offers = [[lookup, local(lookup)] for lookup in here.lookups]
    here.run("with autotune(True, cache='user.json'): [ask(lookup, [offer]) for lookup, offer in given]", offers)
    alone = here.run(f"tuner().load_configs('user.json')\nresult = {LOOKUPS}").result
    answer = here.run(f"""
fi_tunecache.enable()
{LOOKUPS}
tuner().load_configs("user.json")
tuner().save_configs("user.json")
enabled = {LOOKUPS}
fi_tunecache.disable()
result = [enabled, {LOOKUPS}]
""")
    assert answer.result == [alone, alone]
    assert here.run(f"tuner().load_configs('user.json')\nresult = {LOOKUPS}").result == alone


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_that_was_not_loaded_is_saved_to(machine: Make, version: str) -> None:
    """FlashInfer merges: what is there, and not ours, stays, and ours do not come before it."""
    here = machine(version=version)
    offers = [[lookup, local(lookup)] for lookup in here.lookups]
    here.run("with autotune(True, cache='user.json'): [ask(lookup, [offer]) for lookup, offer in given]", offers)
    alone = here.run(f"tuner().load_configs('user.json')\nresult = {LOOKUPS}").result
    program = f"fi_tunecache.enable()\nresult = {LOOKUPS}\ntuner().save_configs('user.json')"
    assert here.run(program).result == here.expected
    assert here.run(f"tuner().load_configs('user.json')\nresult = {LOOKUPS}").result == alone


@pytest.mark.parametrize("way", ["copy.copy", "copy.deepcopy", "lambda table: pickle.loads(pickle.dumps(table))"])
def test_copies_of_the_tables(machine: Make, way: str) -> None:
    here = machine()
    answer = here.run(f"""
import copy, pickle
fi_tunecache.enable()
ask(given[0])
tables = [tuner()._file_configs, tuner()._file_config_policies]
copies = [({way})(table) for table in tables]
result = [[type(table) is dict for table in copies], [len(table) for table in copies], {LOOKUPS}]
""")
    assert answer.result == [[True, True], [1, 1], here.expected]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_covered_is_not_tuned_and_the_rest_is_and_all_is_saved(machine: Make, version: str) -> None:
    """As where a framework's warm-up meets a registry that knows one of its two ops."""
    (bundle,) = bundles_of(version)
    known = {text: entry for text, entry in bundle.entries.items() if entry.key.custom_op == "fp8_gemm"}
    lookups = tuple(lookup for lookup in bundle.lookups if lookup.custom_op == "fp8_gemm")
    half = msgspec.structs.replace(bundle, entries=known, lookups=lookups)
    here = machine(half, version=version)
    whole = Machine(here._programs, here.folder, [bundle])
    program = f"""
with autotune(True, cache="user.json"):
    result = {LOOKUPS}
"""
    answer = whole.run("fi_tunecache.enable()" + program, FI_TUNECACHE_REGISTRY=here.environ["FI_TUNECACHE_REGISTRY"])
    (whole.folder / "user.json").rename(whole.folder / "with.json")
    without = whole.run(program)
    for lookup, given, expected, tuned in zip(whole.asked, answer.result, whole.expected, without.result, strict=True):
        assert given == (expected if lookup.custom_op == "fp8_gemm" else tuned)
    assert 0 < answer.profiles < without.profiles

    saved = read_cache_file((whole.folder / "with.json").read_bytes())
    marked = {entry.key.text for entry in saved.entries if MARK in (entry.selection or {})}
    served = {lookup.winning_key.text for lookup in whole.asked if lookup.custom_op == "fp8_gemm"}
    assert served <= {entry.key.text for entry in saved.entries}
    assert marked == (served if version == "0.7.4" else set()), "FlashInfer before 0.7.4 saves no fourth element"
    again = whole.run(f"with autotune(True, cache='with.json'): result = {LOOKUPS}")
    assert (again.result, again.profiles) == (answer.result, 0)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_context_that_races_the_default_gets_what_has_raced_it(machine: Make, version: str) -> None:
    """In ``autotune_v2("tune")`` the default is a candidate; also after ours were served elsewhere."""
    here = machine(*bundles_of(version, raced=False), version=version)
    ask = f"""
{{served}}
with autotune_v2(persistent_cache=False):
    result = {LOOKUPS}
"""
    alone = here.run(ask.format(served=""))
    assert alone.profiles > 0
    for served in ("fi_tunecache.enable()", f"fi_tunecache.enable()\n{LOOKUPS}"):
        answer = here.run(ask.format(served=served))
        assert (answer.result, answer.profiles) == (alone.result, alone.profiles)
    plainly = here.run(f"fi_tunecache.enable()\nwith autotune(True): result = {LOOKUPS}")
    assert (plainly.result, plainly.profiles) == (here.expected, 0)


def test_a_store_gets_what_has_not_raced_for_replay_alone(machine: Make) -> None:
    here = machine(*bundles_of("0.7.4", raced=False))
    replay = f"with autotune_v2('replay', cache_root='store'): result = {LOOKUPS}"
    assert here.run(f"fi_tunecache.enable()\n{replay}").result == here.expected
    tuned = here.run(f"with autotune_v2(cache_root='store'): result = {LOOKUPS}")
    alone = here.run(f"with autotune_v2(cache_root='other'): result = {LOOKUPS}")
    assert (tuned.result, tuned.profiles) == (alone.result, alone.profiles)
    assert here.run(f"fi_tunecache.enable()\n{replay}").result == tuned.result


@pytest.mark.parametrize("version", ["0.7.2.post1", "0.7.2"])
def test_a_store_of_an_older_flashinfer_gets_nothing_that_has_not_raced(machine: Make, version: str) -> None:
    """It would leave such an entry beside the winner of another runner, and could go on serving it."""
    here = machine(*bundles_of(version, raced=False), version=version)
    tune = f"with autotune_v2(cache_root='store'): result = {LOOKUPS}"
    replay = f"with autotune_v2('replay', cache_root='store'): result = {LOOKUPS}"
    alone = here.run(replay)
    assert here.run(f"fi_tunecache.enable()\n{replay}").result == alone.result
    tuned = here.run(f"fi_tunecache.enable()\n{tune}")
    assert tuned.profiles > 0
    assert here.run(f"fi_tunecache.enable()\n{replay}").result == tuned.result


@pytest.mark.parametrize("version", VERSIONS)
def test_a_measurement_policy_without_a_store_has_none_of_ours(machine: Make, version: str) -> None:
    here = machine(version=version)
    program = f"""
fi_tunecache.enable()
with autotune_v2(persistent_cache=False, measurement_policy=MeasurementPolicy(execution_mode="eager")):
    result = {LOOKUPS}
"""
    answer, alone = here.run(program), plain(here, program)
    assert (answer.result, answer.profiles) == (alone.result, alone.profiles)


def test_a_policy_that_changes_nothing_is_none(machine: Make) -> None:
    here = machine()
    answer = here.run(f"""
fi_tunecache.enable()
with autotune_v2(persistent_cache=False, measurement_policy=MeasurementPolicy()):
    result = {LOOKUPS}
""")
    assert (answer.result, answer.profiles) == (here.expected, 0)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_store_that_is_attached_later_is_seeded_before_its_first_lookup(machine: Make, version: str) -> None:
    here = machine(version=version)
    answer = here.run(f"""
fi_tunecache.enable()
first = {LOOKUPS}
with autotune_v2(cache_root="store"):
    again = [{STOCK}, {LOOKUPS}, {STOCK}]
result = [first, again, {LOOKUPS}]
""")
    assert answer.result == [here.expected, [False, here.expected, True], here.expected]
    assert (answer.profiles, len(answer.lines("INFO"))) == (0, 2)
    replayed = here.run(f"with autotune_v2('replay', cache_root='store'): result = {LOOKUPS}")
    assert replayed.result == here.expected


@pytest.mark.parametrize("version", VERSIONS)
def test_every_store_is_seeded(machine: Make, version: str) -> None:
    """Another root, with the same facts, is another store."""
    here = machine(version=version)
    answer = here.run(f"""
fi_tunecache.enable()
result = []
for root in ("one", "two", "one"):
    with autotune_v2(cache_root=root):
        result.append({LOOKUPS})
""")
    assert answer.result == [here.expected] * 3
    assert (answer.profiles, len(answer.lines("INFO"))) == (0, 2)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_store_that_was_attached_before_the_first_lookup(machine: Make, version: str) -> None:
    here = machine(version=version)
    answer = here.run(f"""
fi_tunecache.enable()
with autotune_v2("replay", cache_root="one"): pass
with autotune_v2("replay", cache_root="two"): second = {LOOKUPS}
with autotune_v2("replay", cache_root="one"): first = {LOOKUPS}
result = [first, second, {STOCK}]
""")
    assert answer.result == [here.expected, here.expected, True]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_store_that_has_been_asked_before(machine: Make, version: str) -> None:
    """It remembers what it has not; what is seeded it looks for again."""
    here = machine(version=version)
    answer = here.run(f"""
with autotune_v2("replay", cache_root="store"):
    {LOOKUPS}
    fi_tunecache.enable()
    result = {LOOKUPS}
""")
    assert answer.result == here.expected


@pytest.mark.parametrize("version", VERSIONS)
def test_a_context_without_a_store_after_one_with_it(machine: Make, version: str) -> None:
    here = machine(version=version)
    answer = here.run(f"""
fi_tunecache.enable()
with autotune_v2(cache_root="store"): stored = {LOOKUPS}
with autotune_v2(persistent_cache=False): result = [stored, {LOOKUPS}]
""")
    assert answer.result == [here.expected, here.expected]
    assert answer.profiles == 0


def test_a_thread_does_not_wait_for_a_store_that_another_one_uses(with_hub: Machine, hub: HubServer) -> None:
    with_hub.run("fi_tunecache.enable()\nask(given[0])")
    hub.fault(Fault(hang=math.inf))
    answer = with_hub.run(f"""
fi_tunecache.enable(deadline=4.0)
ask(given[0])
entered = threading.Event()
def work():
    policy = MeasurementPolicy(execution_mode="eager")  # of which nothing is cached
    with autotune_v2("replay", cache_root="store", cache_scope="context", measurement_policy=policy):
        entered.set()
        ask(given[0])
thread = threading.Thread(target=work)
thread.start()
entered.wait()
time.sleep(0.3)
started = time.perf_counter()
result = [{LOOKUPS}, time.perf_counter() - started]
thread.join()
result.append({STOCK})
""")
    served, seconds, is_stock = answer.result
    assert (served, is_stock) == (with_hub.expected, True)
    assert seconds < 1.5


def test_entries_of_files_are_found_when_they_are_first_looked_for(machine: Make) -> None:
    """After a store of a context alone; the lookup that finds out is the last one without."""
    here = machine()
    answer = here.run(f"""
fi_tunecache.enable()
policy = MeasurementPolicy(execution_mode="eager")  # the registry has nothing of it
with autotune_v2("replay", cache_root="store", cache_scope="context", measurement_policy=policy):
    stored = {LOOKUPS}
result = [stored, ask(given[0]), {LOOKUPS}, {STOCK}]
""")
    default = plain(here, "result = ask(given[0])").result
    assert answer.result == [plain(here, f"result = {LOOKUPS}").result, default, here.expected, True]


@pytest.mark.parametrize("version", VERSIONS)
def test_ops_that_are_skipped(machine: Make, version: str) -> None:
    here = machine(version=version)
    program = f"""
fi_tunecache.enable()
with autotune(True, skip_ops={{"fp8_gemm"}}):
    result = {LOOKUPS}
"""
    alone = plain(here, program).result
    for lookup, given, ours, own in zip(here.asked, here.run(program).result, here.expected, alone, strict=True):
        assert given == (own if lookup.custom_op == "fp8_gemm" else ours)


@pytest.mark.parametrize("way", ["contextlib.nullcontext()", "autotune_v2('replay', cache_root='store')"])
def test_a_tactic_on_the_blocklist_is_not_served(machine: Make, way: str) -> None:
    """Nor anything else for the op and profile of such an entry."""
    here = machine()
    lookup, (runner, tactic) = next((a, b) for a, b in here.asked.items() if b[1] not in (-1, [-1]))
    blocked = {"invalid_tactics": {f"{lookup.custom_op}::{runner}": [tactic]}}
    (here.folder / "blocked.json").write_text(json.dumps(blocked))
    refused = {
        asked.profile
        for asked, answer in here.asked.items()
        if asked.custom_op == lookup.custom_op and answer == [runner, tactic]
    }
    program = f"fi_tunecache.enable()\nAutoTuner._instance = None\nwith {way}: result = {LOOKUPS}"
    served = here.run(program, FLASHINFER_TACTICS_BLOCKLIST="blocked.json").result
    alone = plain(here, program).result
    for asked, given, ours, own in zip(here.asked, served, here.expected, alone, strict=True):
        is_refused = asked.custom_op == lookup.custom_op and asked.profile in refused
        assert given == (own if is_refused else ours)


@pytest.mark.parametrize("way", ["contextlib.nullcontext()", "autotune_v2('replay', cache_root='store')"])
@pytest.mark.parametrize(
    ("mapped", "differs"),
    [
        pytest.param("130100", False, id="the one that it was tuned with"),
        pytest.param("130200", True, id="another one"),
        pytest.param(None, False, id="none that could be told"),
    ],
)
def test_the_cublas_that_the_process_has_mapped(machine: Make, way: str, mapped: str | None, differs: bool) -> None:
    """The environment names the one that a loader finds first; a wheel of torch brings its own."""
    here = machine(version="0.7.2.post1")
    assert here.bundles[0].provenance.mapped_cublas == "130100"
    answer = here.run(f"""
import fi_tunecache.unusable_entries
fi_tunecache.unusable_entries.mapped_cublas = lambda: {mapped!r}
fi_tunecache.enable()
with {way}:
    result = {LOOKUPS}
""")
    alone = here.run(f"result = {LOOKUPS}").result
    entries = here.bundles[0].entries.values()
    left_out = {entry.key.shape for entry in entries if entry.runner.startswith("Cublas") and entry.tactic != -1}
    for lookup, given, ours, own in zip(here.asked, answer.result, here.expected, alone, strict=True):
        assert given == (own if differs and (lookup.custom_op, lookup.profile) in left_out else ours)
    line = "fi-tunecache: bundle {} was tuned with cuBLASLt 130100, here 130200 is mapped: its tactics are left out"
    assert len(answer.lines("WARNING")) == differs
    assert [warning.startswith(line.partition("{}")[0]) for warning in answer.lines("WARNING")] == [True] * differs


@pytest.mark.parametrize("version", VERSIONS)
def test_clearing_the_cache(machine: Make, version: str) -> None:
    """It forgets the program's own results, and ours are served again, as those of a managed store are."""
    here = machine(version=version)
    answer = here.run(f"""
fi_tunecache.enable()
with autotune(True):
    first = {LOOKUPS}
tuner().clear_cache()
result = [first, len(tuner()._file_configs), {LOOKUPS}]
""")
    assert answer.result == [here.expected, 0, here.expected]


def test_flashinfer_tunes_again_what_it_has_discarded(machine: Make) -> None:
    """0.7.4 discards a key when it times its op again: ours must not come back."""
    here = machine()
    answer = here.run("""
fi_tunecache.enable()
ours = ask(given[0])
(key,) = tuner()._file_configs.keys()
tuner()._file_configs.pop(key), tuner()._invalidated_file_keys.add(key)
result = [ours, ask(given[0])]
""")
    assert answer.result == [here.expected[0], plain(here, "result = ask(given[0])").result]


def test_what_flashinfer_lists_and_counts_are_the_programs_own(machine: Make) -> None:
    here = machine()
    answer = here.run("""
fi_tunecache.enable()
ask(given[0])
configs = tuner()._file_configs
result = [len(configs), len(list(configs)), len(configs.items()), bool(configs), len(tuner()._file_config_policies)]
""")
    assert answer.result == [1, 0, 1, True, 1], (
        "what it saves has the one that was served, what it looks through has not"
    )


def test_an_environment_with_unknown_facts(machine: Make) -> None:
    """As FlashInfer has it on a machine without a GPU."""
    here = machine()
    here.bundles[0] = msgspec.structs.replace(here.bundles[0], environment=Environment(flashinfer_version="0.7.4"))
    answer = here.run(f"fi_tunecache.enable()\nresult = [{LOOKUPS}, {STOCK}]")
    assert answer.result == [plain(here, f"result = {LOOKUPS}").result, True]
    (line,) = answer.lines("WARNING")
    assert "no GPU was found" in line
