"""A program with ``enable()`` and nothing else added, in every way in which programs use FlashInfer's autotuner.

Real FlashInfer, of which the timing of kernels alone is replaced: there is no GPU. Real download from the loopback Hub.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from command_line import snapshot
from hub_registry import REGISTRY
from hub_registry import publish as put
from hub_server import HubServer
from programs import Machine, Programs, bundles_of

from fi_tunecache.measurement_policy import DEFAULT_POLICY, MeasurementPolicy

pytestmark = pytest.mark.slow

EAGER = MeasurementPolicy.from_execution_mode("eager")
SAVED = "saved.json"


class Way(NamedTuple):
    """How a program uses the autotuner: in what context it asks.

    ``keeps`` is where its results are afterwards: FlashInfer's own file or store, or ``saved.json`` by
    ``save_configs``, None where FlashInfer keeps them in memory alone. ``loads`` is what the program does first where
    there is such a file.
    """

    context: str
    policy: MeasurementPolicy = DEFAULT_POLICY
    keeps: str | None = SAVED
    loads: str = ""
    versions: tuple[str, ...] = ("0.7.4", "0.7.2.post1", "0.7.2")


LOAD = f"if os.path.exists('{SAVED}'): tuner().load_configs('{SAVED}')"
POLICY = "measurement_policy=MeasurementPolicy(execution_mode='eager')"
WAYS = {
    "no context": Way("contextlib.nullcontext()", loads=LOAD),
    "autotune(False)": Way("autotune(False)", loads=LOAD),
    "autotune(False, cache)": Way(f"autotune(False, cache='{SAVED}')"),
    "autotune(True)": Way("autotune(True)", loads=LOAD),
    "autotune(True, cache)": Way("autotune(True, cache='user.json')", keeps="user.json"),
    "v2 tune": Way("autotune_v2(cache_root='store')", keeps="store"),
    "v2 replay": Way("autotune_v2('replay', cache_root='store')", keeps="store"),
    "v2 tune, policy": Way(f"autotune_v2(cache_root='store', {POLICY})", EAGER, keeps="store"),
    "v2 replay, policy": Way(f"autotune_v2('replay', cache_root='store', {POLICY})", EAGER, keeps="store"),
    "v2 tune, no store": Way("autotune_v2(persistent_cache=False)", loads=LOAD),
    "v2 replay, no store": Way("autotune_v2('replay', persistent_cache=False)", loads=LOAD),
    "v2 tune, context": Way(
        "autotune_v2(cache_root='store', cache_scope='context')", keeps="store", versions=("0.7.4",)
    ),
    "v2 replay, context": Way(
        "autotune_v2('replay', cache_root='store', cache_scope='context')", keeps="store", versions=("0.7.4",)
    ),
    "v2 tune, policy, context": Way(
        f"autotune_v2(cache_root='store', cache_scope='context', {POLICY})", EAGER, keeps="store", versions=("0.7.4",)
    ),
}

EACH = pytest.mark.parametrize(
    ("version", "name"),
    [pytest.param(version, name, id=f"{version}-{name}") for name, way in WAYS.items() for version in way.versions],
)

PROGRAM = """
{loads}
with {context}:
    result = [ask(lookup) for lookup in given]
{saves}
result = [result, AutoTuner.__dict__["choose_one"] is STOCK["choose_one"]]
"""
SAVES = f"tuner().save_configs('{SAVED}')"
ENABLE = "fi_tunecache.enable()\n"


def program(way: Way, *, saves: bool = True) -> str:
    return PROGRAM.format(context=way.context, loads=way.loads, saves=SAVES if saves and way.keeps == SAVED else "")


@pytest.fixture
def machine(
    hub: HubServer, programs: Callable[[str], Programs], tmp_path: Path
) -> Callable[[str, MeasurementPolicy], Machine]:
    """One with nothing on it, which is told of a registry on the Hub that holds results of that version and policy."""

    def make(version: str, policy: MeasurementPolicy = DEFAULT_POLICY) -> Machine:
        bundles = bundles_of(version, policy)
        put(hub, *bundles)
        folder = tmp_path / "machine"
        folder.mkdir()
        variables = {"HF_ENDPOINT": hub.endpoint, "FI_TUNECACHE_REGISTRY": REGISTRY}
        return Machine(programs(version), folder, bundles, **variables)

    return make


@EACH
def test_the_first_lookup_downloads_and_the_second_start_asks_nobody(
    version: str, name: str, machine: Callable[[str, MeasurementPolicy], Machine], hub: HubServer
) -> None:
    way = WAYS[name]
    here = machine(version, way.policy)
    hub.clear_log()
    first = here.run(ENABLE + program(way))
    assert first.result == [here.expected, True]
    assert first.profiles == 0
    assert first.lines("WARNING") == []
    (line,) = first.lines("INFO")
    assert line.startswith(f"fi-tunecache: {len(here.bundles[0].entries)} entries for NVIDIA H200 (exact) from hf://")
    assert 0 < len(hub.requests()) <= 5

    hub.clear_log()
    before = snapshot(here.folder)
    second = here.run(ENABLE + program(way, saves=False))
    assert second.result == [here.expected, True]
    assert (second.profiles, second.lines("WARNING"), len(second.lines("INFO"))) == (0, [], 1)
    assert hub.requests() == []
    assert snapshot(here.folder) == before


@EACH
def test_what_flashinfer_keeps_serves_without_us(
    version: str, name: str, machine: Callable[[str, MeasurementPolicy], Machine]
) -> None:
    way = WAYS[name]
    here = machine(version, way.policy)
    assert here.run(ENABLE + program(way)).result == [here.expected, True]
    alone = here.run(program(way, saves=False))
    assert alone.result == [here.expected, True]
    assert (alone.profiles, alone.log) == (0, [])


LOCAL = """
def LOCAL(lookup):  # cuDNN's tactics are pairs
    runner = lookup["runners"][-1][0]
    return [[runner, [7, []] if runner.startswith("Cudnn") else 7]]
"""
TUNES = {
    "user.json": "autotune(True, cache='user.json')",
    SAVED: f"autotune(True, cache='{SAVED}')",
}


@EACH
def test_what_was_tuned_here_comes_first(
    version: str, name: str, machine: Callable[[str, MeasurementPolicy], Machine]
) -> None:
    """Under the last runner of the caller's list, where ours are under earlier ones."""
    way = WAYS[name]
    here = machine(version, way.policy)
    store = f"autotune_v2(cache_root='store'{', ' + POLICY if way.policy is EAGER else ''})"
    tune = f"""{LOCAL}
with {TUNES.get(way.keeps or "", store)}:
    result = [ask(lookup, LOCAL(lookup)) for lookup in given]
"""
    assert here.run(tune).profiles > 0
    alone = here.run(program(way, saves=False)).result[0]
    assert not [given for given, ours in zip(alone, here.expected, strict=True) if given == ours]
    again = here.run(ENABLE + program(way, saves=False))
    assert again.result == [alone, True]
    assert again.profiles == 0


@pytest.mark.parametrize("version", ["0.7.4", "0.7.2.post1", "0.7.2"])
def test_what_is_in_memory_comes_first(version: str, machine: Callable[..., Machine]) -> None:
    here = machine(version)
    answer = here.run(f"""{LOCAL}
with autotune(True):
    local = [ask(lookup, LOCAL(lookup)) for lookup in given]
    local = [ask(lookup) for lookup in given]
fi_tunecache.enable()
with autotune(True):
    result = [local, [ask(lookup) for lookup in given]]
""")
    local, after = answer.result
    assert after == local
    assert not [given for given, ours in zip(local, here.expected, strict=True) if given == ours]
