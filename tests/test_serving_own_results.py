"""The program's own results and ours: what is served, tuned, saved, listed and copied."""

from __future__ import annotations

import msgspec
import pytest
from programs import Machine, bundles_of
from serving_programs import LOOKUPS, VERSIONS, Make, local, plain

from fi_tunecache.bundle import MARK
from fi_tunecache.flashinfer_json import read_cache_file

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_that_is_loaded_after_ours_were_served(serving_machine: Make, version: str) -> None:
    here = serving_machine(version=version)
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
def test_what_is_saved_after_a_file_was_loaded(serving_machine: Make, version: str) -> None:
    """Ours were served before, under runners that come first: they must not be in the way of the program's own."""
    here = serving_machine(version=version)
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
def test_a_file_that_was_not_loaded_is_saved_to(serving_machine: Make, version: str) -> None:
    """FlashInfer merges: what is there, and not ours, stays, and ours do not come before it."""
    here = serving_machine(version=version)
    offers = [[lookup, local(lookup)] for lookup in here.lookups]
    here.run("with autotune(True, cache='user.json'): [ask(lookup, [offer]) for lookup, offer in given]", offers)
    alone = here.run(f"tuner().load_configs('user.json')\nresult = {LOOKUPS}").result
    program = f"fi_tunecache.enable()\nresult = {LOOKUPS}\ntuner().save_configs('user.json')"
    assert here.run(program).result == here.expected
    assert here.run(f"tuner().load_configs('user.json')\nresult = {LOOKUPS}").result == alone


@pytest.mark.parametrize("way", ["copy.copy", "copy.deepcopy", "lambda table: pickle.loads(pickle.dumps(table))"])
def test_copies_of_the_tables(serving_machine: Make, way: str) -> None:
    here = serving_machine()
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
def test_what_is_covered_is_not_tuned_and_the_rest_is_and_all_is_saved(serving_machine: Make, version: str) -> None:
    """As where a framework's warm-up meets a registry that knows one of its two ops."""
    (bundle,) = bundles_of(version)
    known = {text: entry for text, entry in bundle.entries.items() if entry.key.custom_op == "fp8_gemm"}
    lookups = tuple(lookup for lookup in bundle.lookups if lookup.custom_op == "fp8_gemm")
    half = msgspec.structs.replace(bundle, entries=known, lookups=lookups)
    here = serving_machine(half, version=version)
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
def test_clearing_the_cache(serving_machine: Make, version: str) -> None:
    """It forgets the program's own results, and ours are served again, as those of a managed store are."""
    here = serving_machine(version=version)
    answer = here.run(f"""
fi_tunecache.enable()
with autotune(True):
    first = {LOOKUPS}
tuner().clear_cache()
result = [first, len(tuner()._file_configs), {LOOKUPS}]
""")
    assert answer.result == [here.expected, 0, here.expected]


def test_flashinfer_tunes_again_what_it_has_discarded(serving_machine: Make) -> None:
    """0.7.4 discards a key when it times its op again: ours must not come back."""
    here = serving_machine()
    answer = here.run("""
fi_tunecache.enable()
ours = ask(given[0])
(key,) = tuner()._file_configs.keys()
tuner()._file_configs.pop(key), tuner()._invalidated_file_keys.add(key)
result = [ours, ask(given[0])]
""")
    assert answer.result == [here.expected[0], plain(here, "result = ask(given[0])").result]


def test_what_flashinfer_lists_and_counts_are_the_programs_own(serving_machine: Make) -> None:
    here = serving_machine()
    answer = here.run("""
fi_tunecache.enable()
ask(given[0])
configs = tuner()._file_configs
result = [len(configs), len(list(configs)), len(configs.items()), bool(configs), len(tuner()._file_config_policies)]
""")
    assert answer.result == [1, 0, 1, True, 1], (
        "what it saves has the one that was served, what it looks through has not"
    )
