"""What switches entries off: variables, arguments, ``disable()``, skip_ops, the blocklist, another cuBLASLt."""

from __future__ import annotations

import json

import msgspec
import pytest
from serving_programs import LOOKUPS, STOCK, VERSIONS, Make, plain

from fi_tunecache.environment import Environment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("value", "warning"),
    [
        pytest.param("off", [], id="off"),
        pytest.param("perhaps", ["FI_TUNECACHE=perhaps is not known; set it to off, observe or on"], id="not known"),
    ],
)
def test_the_variable_switches_it_off(serving_machine: Make, value: str, warning: list[str]) -> None:
    here = serving_machine()
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
def test_arguments_that_make_no_sense(serving_machine: Make, arguments: str, message: str) -> None:
    answer = serving_machine().run(f"""
try:
    fi_tunecache.enable({arguments})
except fi_tunecache.UsageError as error:
    result = [str(error), {STOCK}]
""")
    assert answer.result == [message, True]


def test_enabling_again(serving_machine: Make) -> None:
    """The same again changes nothing; with something else it starts anew."""
    here = serving_machine()
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


def test_disabling(serving_machine: Make) -> None:
    """What was served stays, as from a file; the rest is FlashInfer's again, its tables too."""
    here = serving_machine()
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


def test_disabling_before_the_first_lookup(serving_machine: Make) -> None:
    here = serving_machine()
    answer = here.run(f"fi_tunecache.enable()\nfi_tunecache.disable()\nresult = [{STOCK}, {LOOKUPS}]")
    assert answer.result == [True, plain(here, f"result = {LOOKUPS}").result]


@pytest.mark.parametrize("version", VERSIONS)
def test_ops_that_are_skipped(serving_machine: Make, version: str) -> None:
    here = serving_machine(version=version)
    program = f"""
fi_tunecache.enable()
with autotune(True, skip_ops={{"fp8_gemm"}}):
    result = {LOOKUPS}
"""
    alone = plain(here, program).result
    for lookup, given, ours, own in zip(here.asked, here.run(program).result, here.expected, alone, strict=True):
        assert given == (own if lookup.custom_op == "fp8_gemm" else ours)


@pytest.mark.parametrize("way", ["contextlib.nullcontext()", "autotune_v2('replay', cache_root='store')"])
def test_a_tactic_on_the_blocklist_is_not_served(serving_machine: Make, way: str) -> None:
    """Nor anything else for the op and profile of such an entry."""
    here = serving_machine()
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
def test_the_cublas_that_the_process_has_mapped(
    serving_machine: Make, way: str, mapped: str | None, differs: bool
) -> None:
    """The environment names the one that a loader finds first; a wheel of torch brings its own."""
    here = serving_machine(version="0.7.2.post1")
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


def test_an_environment_with_unknown_facts(serving_machine: Make) -> None:
    """As FlashInfer has it on a machine without a GPU."""
    here = serving_machine()
    here.bundles[0] = msgspec.structs.replace(here.bundles[0], environment=Environment(flashinfer_version="0.7.4"))
    answer = here.run(f"fi_tunecache.enable()\nresult = [{LOOKUPS}, {STOCK}]")
    assert answer.result == [plain(here, f"result = {LOOKUPS}").result, True]
    (line,) = answer.lines("WARNING")
    assert "no GPU was found" in line
