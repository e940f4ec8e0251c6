"""``autotune_v2``: managed stores, scopes, measurement policies, and who races the default."""

from __future__ import annotations

import math

import pytest
from hub_server import Fault, HubServer
from programs import Machine, bundles_of
from serving_programs import LOOKUPS, STOCK, VERSIONS, Make, plain

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("version", VERSIONS)
def test_a_context_that_races_the_default_gets_what_has_raced_it(serving_machine: Make, version: str) -> None:
    """In ``autotune_v2("tune")`` the default is a candidate; also after ours were served elsewhere."""
    here = serving_machine(*bundles_of(version, raced=False), version=version)
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


def test_a_store_gets_what_has_not_raced_for_replay_alone(serving_machine: Make) -> None:
    here = serving_machine(*bundles_of("0.7.4", raced=False))
    replay = f"with autotune_v2('replay', cache_root='store'): result = {LOOKUPS}"
    assert here.run(f"fi_tunecache.enable()\n{replay}").result == here.expected
    tuned = here.run(f"with autotune_v2(cache_root='store'): result = {LOOKUPS}")
    alone = here.run(f"with autotune_v2(cache_root='other'): result = {LOOKUPS}")
    assert (tuned.result, tuned.profiles) == (alone.result, alone.profiles)
    assert here.run(f"fi_tunecache.enable()\n{replay}").result == tuned.result


@pytest.mark.parametrize("version", ["0.7.2.post1", "0.7.2"])
def test_a_store_of_an_older_flashinfer_gets_nothing_that_has_not_raced(serving_machine: Make, version: str) -> None:
    """It would leave such an entry beside the winner of another runner, and could go on serving it."""
    here = serving_machine(*bundles_of(version, raced=False), version=version)
    tune = f"with autotune_v2(cache_root='store'): result = {LOOKUPS}"
    replay = f"with autotune_v2('replay', cache_root='store'): result = {LOOKUPS}"
    alone = here.run(replay)
    assert here.run(f"fi_tunecache.enable()\n{replay}").result == alone.result
    tuned = here.run(f"fi_tunecache.enable()\n{tune}")
    assert tuned.profiles > 0
    assert here.run(f"fi_tunecache.enable()\n{replay}").result == tuned.result


@pytest.mark.parametrize("version", VERSIONS)
def test_a_measurement_policy_without_a_store_has_none_of_ours(serving_machine: Make, version: str) -> None:
    here = serving_machine(version=version)
    program = f"""
fi_tunecache.enable()
with autotune_v2(persistent_cache=False, measurement_policy=MeasurementPolicy(execution_mode="eager")):
    result = {LOOKUPS}
"""
    answer, alone = here.run(program), plain(here, program)
    assert (answer.result, answer.profiles) == (alone.result, alone.profiles)


def test_a_policy_that_changes_nothing_is_none(serving_machine: Make) -> None:
    here = serving_machine()
    answer = here.run(f"""
fi_tunecache.enable()
with autotune_v2(persistent_cache=False, measurement_policy=MeasurementPolicy()):
    result = {LOOKUPS}
""")
    assert (answer.result, answer.profiles) == (here.expected, 0)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_store_that_is_attached_later_is_seeded_before_its_first_lookup(serving_machine: Make, version: str) -> None:
    here = serving_machine(version=version)
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
def test_every_store_is_seeded(serving_machine: Make, version: str) -> None:
    """Another root, with the same facts, is another store."""
    here = serving_machine(version=version)
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
def test_a_store_that_was_attached_before_the_first_lookup(serving_machine: Make, version: str) -> None:
    here = serving_machine(version=version)
    answer = here.run(f"""
fi_tunecache.enable()
with autotune_v2("replay", cache_root="one"): pass
with autotune_v2("replay", cache_root="two"): second = {LOOKUPS}
with autotune_v2("replay", cache_root="one"): first = {LOOKUPS}
result = [first, second, {STOCK}]
""")
    assert answer.result == [here.expected, here.expected, True]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_store_that_has_been_asked_before(serving_machine: Make, version: str) -> None:
    """It remembers what it has not; what is seeded it looks for again."""
    here = serving_machine(version=version)
    answer = here.run(f"""
with autotune_v2("replay", cache_root="store"):
    {LOOKUPS}
    fi_tunecache.enable()
    result = {LOOKUPS}
""")
    assert answer.result == here.expected


@pytest.mark.parametrize("version", VERSIONS)
def test_a_context_without_a_store_after_one_with_it(serving_machine: Make, version: str) -> None:
    here = serving_machine(version=version)
    answer = here.run(f"""
fi_tunecache.enable()
with autotune_v2(cache_root="store"): stored = {LOOKUPS}
with autotune_v2(persistent_cache=False): result = [stored, {LOOKUPS}]
""")
    assert answer.result == [here.expected, here.expected]
    assert answer.profiles == 0


def test_a_thread_does_not_wait_for_a_store_that_another_one_uses(serving_with_hub: Machine, hub: HubServer) -> None:
    serving_with_hub.run("fi_tunecache.enable()\nask(given[0])")
    hub.fault(Fault(hang=math.inf))
    answer = serving_with_hub.run(f"""
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
    assert (served, is_stock) == (serving_with_hub.expected, True)
    assert seconds < 1.5


def test_entries_of_files_are_found_when_they_are_first_looked_for(serving_machine: Make) -> None:
    """After a store of a context alone; the lookup that finds out is the last one without."""
    here = serving_machine()
    answer = here.run(f"""
fi_tunecache.enable()
policy = MeasurementPolicy(execution_mode="eager")  # the registry has nothing of it
with autotune_v2("replay", cache_root="store", cache_scope="context", measurement_policy=policy):
    stored = {LOOKUPS}
result = [stored, ask(given[0]), {LOOKUPS}, {STOCK}]
""")
    default = plain(here, "result = ask(given[0])").result
    assert answer.result == [plain(here, f"result = {LOOKUPS}").result, default, here.expected, True]
