"""``pull --to flashinfer``, and the real FlashInfer: it serves what was seeded, and nobody overrules the other.

How FlashInfer replaces an entry: in ``autotune_v2("tune")`` it takes one whose policy is not the op's, or
that the runner's ``validate_tactic`` refuses, for a miss, tunes, and renames its own over it
(``choose_one``, ``flashinfer/autotuner/autotuner.py``, and ``ManagedAutotuneCache.publish``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_line import CommandLine
from made_machine import run_python
from real_flashinfer import RealFlashInfer, answer_of, embedded, question, winners

from fi_tunecache.bundle import MARK, Bundle
from fi_tunecache.entry import Entry, Lookup
from fi_tunecache.managed_entry import entry_file_name
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.source import read_source
from fi_tunecache.store_root import find_store_root

pytestmark = pytest.mark.slow

Releases = Callable[[str], RealFlashInfer]
Winners = dict[Lookup, list[Any]]

versions = pytest.mark.parametrize("version", ["0.7.4", "0.7.2.post1", "0.7.2"])


class Machine:
    """A machine with one release of FlashInfer and the facts of the H200, whose store lies in ``store``."""

    def __init__(self, version: str, flashinfer: Releases, command_line: CommandLine) -> None:
        self.flashinfer = flashinfer(version)
        self.bundles = embedded("0.7.2.post1" if version == "0.7.2" else version)
        here = self.bundles[0].environment.with_facts({"flashinfer_version": version})
        self.bundles = [msgspec.structs.replace(bundle, environment=here) for bundle in self.bundles]
        self.metadata = here.metadata()
        self.root = command_line.folder / "store"
        self._command_line = command_line

    @property
    def winners(self) -> Winners:
        return winners(*self.bundles)

    def pull(self) -> dict[str, Any]:
        """Pull from a registry with the machine's bundles into its store; what the report says of the store."""
        add_bundles(self._command_line.folder / "registry", "made", self.bundles)
        Path("facts.json").write_text(json.dumps(self.metadata), "utf-8")
        command = ["pull", "--environment", "facts.json", "--registry", "./registry", "--to", "flashinfer:store"]
        report: dict[str, Any] = self._command_line.json(*command)["store"]
        return report

    def clear(self) -> int:
        removed: int = self._command_line.json("cache", "clear", "--to", "flashinfer:store")["entries"]
        return removed

    def play(self, lookups: Winners, **scenario: Any) -> list[Any]:
        """What the real FlashInfer tells the ops that ask; its whole answer is in ``answer``."""
        asked = [question(lookup.keys) for lookup in lookups]
        self.answer = self.flashinfer.play(metadata=self.metadata, store=self.root, lookups=asked, **scenario)
        return [given["chosen"] for given in self.answer["answers"]]

    def tune(self, lookup: Lookup, runner: str, **scenario: Any) -> list[Any]:
        """Have FlashInfer tune a lookup that it does not find; the answer, by that runner, with which it publishes."""
        winner = [runner, [77, []] if runner.startswith("Cudnn") else 77]
        assert self.play({lookup: []}, tune=True, offers=[winner], **scenario) == [winner]
        return winner

    def entries(self) -> dict[str, Entry]:
        (section,) = read_source(self.root).sections
        assert section.problems == ()
        return {entry.key.text: entry for entry in section.entries}

    def file(self, key: str) -> Path:
        (path,) = self.root.glob(f"v2/*/entries/{entry_file_name(key)}")
        return path


def marked(entries: dict[str, Entry]) -> set[str]:
    return {text for text, entry in entries.items() if MARK in (entry.selection or {})}


def fp8(lookups: Winners) -> Lookup:
    """One that two runners raced for, with a single token: FlashInfer tunes no other shape for it."""
    return next(lookup for lookup in lookups if lookup.custom_op == "fp8_gemm" and lookup.profile[0][1] == 1)


@pytest.fixture
def machine(flashinfer: Releases, command_line: CommandLine) -> Callable[[str], Machine]:
    return lambda version: Machine(version, flashinfer, command_line)


@versions
def test_every_lookup_is_served_by_the_store(machine: Callable[[str], Machine], version: str) -> None:
    here = machine(version)
    expected = here.winners
    report = here.pull()
    assert (report["seeded"], report["kept"], report["skipped"]) == (len(here.entries()), 0, 0)

    assert here.play(expected) == list(expected.values())
    assert [given["served"] for given in here.answer["answers"]] == list(expected.values())
    assert here.answer["preloaded"] == report["seeded"]
    if version == "0.7.4":  # search_cache finds each in the store, then choose_one in the memory
        assert here.answer["coverage"] == {"hit managed": len(expected), "hit memory": len(expected)}


@versions
def test_what_was_seeded_spares_tuning_where_the_default_raced(machine: Callable[[str], Machine], version: str) -> None:
    here = machine(version)
    # Of this runner 0.7.2 names the call's own M in the key of every smaller shape too, and so never finds them.
    asked = {
        lookup: winner
        for lookup, winner in here.winners.items()
        if version == "0.7.4" or lookup.runners != ("CublasltBf16GemmRunner",)
    }
    raced = winners(*(bundle for bundle in here.bundles if bundle.default_raced))
    here.pull()
    timed_again = [None if lookup not in raced else winner for lookup, winner in asked.items()]
    assert here.play(asked, tune=True) == timed_again, "None: it begins to profile, with the default as a candidate"
    assert marked(here.entries()) == set(here.entries())


@versions
def test_what_flashinfer_has_tuned_stays(machine: Callable[[str], Machine], version: str) -> None:
    here = machine(version)
    expected = here.winners
    lookup = fp8(expected)
    ours = lookup.winning_key
    own = here.tune(lookup, ours.runner)
    before = here.file(ours.text).read_bytes()

    report = here.pull()

    assert (report["kept"], report["skipped"]) == (1, 0)
    assert here.file(ours.text).read_bytes() == before
    assert here.play(expected) == list({**expected, lookup: own}.values())


@versions
def test_ours_does_not_win_over_what_another_runner_has_won(machine: Callable[[str], Machine], version: str) -> None:
    """FlashInfer would serve the first of the caller's runners that has an entry."""
    here = machine(version)
    expected = here.winners
    lookup = next(
        lookup for lookup in expected if lookup.custom_op == "fp8_gemm" and lookup.winner == 0 and len(lookup.keys) == 2
    )
    own = here.tune(lookup, lookup.runners[1])

    report = here.pull()

    assert report["kept"] >= 1
    assert lookup.winning_key.text not in here.entries()
    assert here.play({lookup: []}) == [own]


def without_policy(bundle: Bundle, key: str) -> Bundle:
    if key not in bundle.entries:
        return bundle
    entry = msgspec.structs.replace(bundle.entries[key], policy=None, selection=None)
    return msgspec.structs.replace(bundle, entries={**bundle.entries, key: entry})


@versions
@pytest.mark.parametrize("why", ["its policy is not the op's", "the runner refuses it"])
def test_what_flashinfer_tunes_again_is_not_ours_any_more(
    machine: Callable[[str], Machine], version: str, why: str
) -> None:
    here = machine(version)
    lookup = fp8(here.winners)
    key, seeded = lookup.winning_key, here.winners[lookup]
    refused = [seeded] if why == "the runner refuses it" else []
    if not refused:
        here.bundles = [without_policy(bundle, key.text) for bundle in here.bundles]
    count = here.pull()["seeded"]
    assert marked(here.entries()) == set(here.entries())
    assert answer_of(here.entries()[key.text]) == seeded

    own = here.tune(lookup, key.runner, refused=refused)

    after = here.entries()
    assert (answer_of(after[key.text]), after[key.text].selection) == (own, None)
    assert set(after) - marked(after) == {key.text}
    assert len(after) == count
    retuned = here.file(key.text).read_bytes()
    report = here.pull()
    assert (report["seeded"], report["kept"], report["skipped"]) == (0, 1, count - 1)

    assert here.clear() == count - 1
    assert here.entries() == {key.text: after[key.text]}
    assert here.file(key.text).read_bytes() == retuned
    assert here.play({lookup: []}) == [own]


ROOTS = [
    {},
    {"FLASHINFER_WORKSPACE_BASE": "/base"},
    {"FLASHINFER_WORKSPACE_BASE": ""},
    {"FLASHINFER_WORKSPACE_BASE": "relative"},
    {"FLASHINFER_WORKSPACE_BASE": "~/base"},
    {"FLASHINFER_AUTOTUNE_CACHE_DIR": "/tuned", "FLASHINFER_WORKSPACE_BASE": "/base"},
    {"FLASHINFER_AUTOTUNE_CACHE_DIR": "relative"},
    {"FLASHINFER_AUTOTUNE_CACHE_DIR": "~/tuned"},
    {"FLASHINFER_AUTOTUNE_CACHE_DIR": ""},
]


@versions
def test_the_root_is_the_one_that_flashinfer_uses(
    flashinfer_folder: Callable[[str], Path], version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = run_python(
        "import importlib, json, os\n"
        "from flashinfer.autotune_cache import get_default_cache_root\n"
        "from flashinfer.jit import env\n"
        "found = []\n"
        f"for variables in {ROOTS}:\n"
        "    for name in ('FLASHINFER_WORKSPACE_BASE', 'FLASHINFER_AUTOTUNE_CACHE_DIR'):\n"
        "        os.environ.pop(name, None)\n"
        "    os.environ.update(variables)\n"
        "    importlib.reload(env)\n"
        "    found.append(str(get_default_cache_root()))\n"
        "print(json.dumps(found))\n",
        flashinfer_folder(version),
    )
    assert [str(find_store_root("flashinfer", environ)) for environ in ROOTS] == found
    assert found[0] == str(tmp_path / ".cache" / "flashinfer" / "autotune")
