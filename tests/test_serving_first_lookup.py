"""When ``enable()`` acts: threads, forks, graphs, locks, interrupts, imports."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_server import Fault, HubServer
from programs import Machine
from serving_programs import LOOKUPS, STOCK, Make, plain

pytestmark = pytest.mark.slow


def test_many_threads_wait_for_one_download(serving_with_hub: Machine, hub: HubServer) -> None:
    answer = serving_with_hub.run("""
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
    assert answer.result == serving_with_hub.expected[:16]
    assert len(answer.lines("INFO")) == 1
    assert len(hub.requests()) <= 5


def test_threads_wait_no_longer_than_the_deadline(serving_with_hub: Machine, hub: HubServer) -> None:
    hub.fault(Fault(hang=math.inf))
    answer = serving_with_hub.run(f"""
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
    assert chosen == plain(serving_with_hub, f"given = given[:4]\nresult = {LOOKUPS}").result
    assert 0.5 < longest < 2.0
    assert is_stock
    assert len(answer.lines("WARNING")) == 1


def test_a_thread_that_holds_the_tuners_lock_is_let_through(serving_machine: Make) -> None:
    """Others may be waiting for it; a runner that is being timed may ask for another op."""
    here = serving_machine()
    answer = here.run(f"""
fi_tunecache.enable()
with tuner()._lock:
    first = ask(given[0])
result = [first, {STOCK}, ask(given[0]), {STOCK}]
""")
    assert answer.result == [plain(here, "result = ask(given[0])").result, False, here.expected[0], True]


def test_a_lock_that_another_thread_holds_and_waits(serving_machine: Make) -> None:
    """It may wait for this thread, whose lookup needs no lock: the op is skipped."""
    here = serving_machine()
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


def test_an_interrupt_of_the_first_lookup(serving_machine: Make) -> None:
    """It goes through, and the next lookup does what this one did not."""
    here = serving_machine()
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


def test_arguments_that_are_named_like_ours(serving_machine: Make) -> None:
    """``choose_one`` hands whatever is named on to the runners."""
    here = serving_machine()
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


def test_nothing_happens_while_a_graph_is_recorded(serving_machine: Make) -> None:
    here = serving_machine()
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


def test_children_that_are_forked_before_the_first_lookup(serving_machine: Make) -> None:
    here = serving_machine()
    answer = here.run(f"""{FORK}
fi_tunecache.enable()
result = [in_child(lambda: {LOOKUPS}), in_child(lambda: {LOOKUPS}), {LOOKUPS}]
""")
    assert answer.result == [here.expected] * 3


def test_children_that_are_forked_after_it(serving_machine: Make) -> None:
    here = serving_machine()
    answer = here.run(f"""{FORK}
fi_tunecache.enable()
ask(given[0])
result = in_child(lambda: [{LOOKUPS}, {STOCK}])
""")
    assert answer.result == [here.expected, True]


def test_a_child_that_is_forked_while_another_thread_downloads(serving_with_hub: Machine, hub: HubServer) -> None:
    """It does not wait for a thread that it does not have; here it downloads itself, once the Hub answers."""
    hub.fault(Fault(hang=math.inf, times=1))
    answer = serving_with_hub.run(f"""{FORK}
fi_tunecache.enable(deadline=3.0)
thread = threading.Thread(target=lambda: ask(given[0]))
thread.start()
time.sleep(0.5)
result = in_child(lambda: {LOOKUPS})
thread.join()
""")
    assert answer.result == serving_with_hub.expected


def test_flashinfer_is_imported_later(serving_machine: Make, flashinfer_folder: Callable[[str], Path]) -> None:
    """``enable()`` imports neither FlashInfer nor torch, and what imports them finds nothing changed but the hook."""
    here = serving_machine()
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
