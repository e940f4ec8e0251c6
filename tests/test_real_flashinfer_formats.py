"""What we write and read, against the real FlashInfer: managed stores, saved files, its rule for several runners."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from first_runner import first_runner_with_an_entry
from real_flashinfer import RealFlashInfer, answer_of, embedded, question, winners

from fi_tunecache.bundle import MARK
from fi_tunecache.entry import Entry
from fi_tunecache.environment import Environment
from fi_tunecache.flashinfer_json import CacheFile, read_cache_file, write_cache_file
from fi_tunecache.key import Key, Profile
from fi_tunecache.managed_store import write_entries
from fi_tunecache.materialisation import stamped
from fi_tunecache.measurement_policy import EXECUTION_MODES, MeasurementPolicy
from fi_tunecache.registry_tree import EMBEDDED
from fi_tunecache.retrieval import Pulled, pull
from fi_tunecache.selection import Request
from fi_tunecache.user_cache import UserCache

pytestmark = pytest.mark.slow

Releases = Callable[[str], RealFlashInfer]

VERSIONS = ("0.7.4", "0.7.2.post1", "0.7.2")


def pulled(environment: Environment, tmp_path: Path, policy: MeasurementPolicy) -> Pulled:
    request = Request(environment=environment, registries=(EMBEDDED,), policy=policy)
    return pull(request, cache=UserCache(tmp_path / "cache"))


class TestManagedStore:
    """``autotune_v2(mode="replay")`` of a store that we wrote."""

    def write(self, root: Path, version: str, mode: str, tmp_path: Path) -> Environment:
        policy = MeasurementPolicy.from_execution_mode(mode)
        environment = embedded(version, policy)[0].environment
        entries = read_cache_file(pulled(environment, tmp_path, policy).data).entries
        assert write_entries(root, environment, policy, entries).written == len(entries)
        return environment

    def test_0_7_4_covers_every_lookup_of_each_policy(self, flashinfer: Releases, tmp_path: Path) -> None:
        root = tmp_path / "store"
        environments = {mode: self.write(root, "0.7.4", mode, tmp_path) for mode in EXECUTION_MODES}
        differing = set()
        for mode, environment in environments.items():
            expected = winners(*embedded("0.7.4", MeasurementPolicy.from_execution_mode(mode)))
            answer = flashinfer("0.7.4").play(
                metadata=environment.metadata(),
                store=root,
                execution_mode=mode,
                lookups=[question(lookup.keys) for lookup in expected],
            )
            assert [given["served"] for given in answer["answers"]] == list(expected.values())
            assert [given["chosen"] for given in answer["answers"]] == list(expected.values())
            assert answer["preloaded"] == len(expected)
            # search_cache finds each in the store, then choose_one in the memory.
            assert answer["coverage"] == {"hit managed": len(expected), "hit memory": len(expected)}
            differing.add(str(expected))
        assert len(differing) == len(EXECUTION_MODES)

    def test_0_7_2_post1_serves_every_lookup(self, flashinfer: Releases, tmp_path: Path) -> None:
        root = tmp_path / "store"
        environment = self.write(root, "0.7.2.post1", "auto", tmp_path)
        expected = winners(*embedded("0.7.2.post1"))
        answer = flashinfer("0.7.2.post1").play(
            metadata=environment.metadata(), store=root, lookups=[question(lookup.keys) for lookup in expected]
        )
        assert answer["preloaded"] == len(expected)
        assert [given["served"] for given in answer["answers"]] == list(expected.values())

    @pytest.mark.parametrize(
        ("here", "mode"),
        [
            pytest.param({}, "cuda_graph", id="another policy"),
            pytest.param({"cudnn_frontend_version": "1.31.0"}, "eager", id="another fact"),
        ],
    )
    def test_is_not_found_with(self, flashinfer: Releases, here: dict[str, str], mode: str, tmp_path: Path) -> None:
        root = tmp_path / "store"
        environment = self.write(root, "0.7.4", "eager", tmp_path).with_facts(here)
        lookups = list(winners(*embedded("0.7.4", MeasurementPolicy.from_execution_mode("eager"))))
        answer = flashinfer("0.7.4").play(
            metadata=environment.metadata(),
            store=root,
            execution_mode=mode,
            lookups=[question(lookup.keys) for lookup in lookups],
        )
        assert answer["coverage"] == {"miss fallback": 2 * len(lookups)}


@pytest.mark.parametrize(("version", "keeps_selections"), [("0.7.4", True), ("0.7.2.post1", False), ("0.7.2", False)])
def test_a_file_that_flashinfer_saves_again(
    flashinfer: Releases, version: str, keeps_selections: bool, tmp_path: Path
) -> None:
    """Entries stay as they are; our mark in them only where FlashInfer knows the fourth element, in metadata never."""
    tuned_in = embedded("0.7.4")[0].environment
    environment = tuned_in.with_facts({"flashinfer_version": version})
    selected = pulled(tuned_in, tmp_path, MeasurementPolicy())
    data = stamped(selected.selection, selected.data, environment)
    ours, saved = tmp_path / "ours.json", tmp_path / "saved.json"
    ours.write_bytes(data)

    answer = flashinfer(version).play(metadata=environment.metadata(), load=ours, save=saved)
    assert (answer["loaded"], answer["entries"]) == (True, selected.selection.entries)
    before, after = read_cache_file(data), read_cache_file(saved.read_bytes())
    assert before.metadata == {**environment.metadata(), MARK: before.metadata[MARK]}
    assert after.metadata == environment.metadata()
    assert all(entry.policy and MARK in entry.selection for entry in before.entries)
    kept = {entry.key.text: entry for entry in before.entries}
    if not keeps_selections:
        kept = {text: msgspec.structs.replace(entry, selection=None) for text, entry in kept.items()}
    assert {entry.key.text: entry for entry in after.entries} == kept


@pytest.mark.parametrize("version", VERSIONS)
def test_the_first_runner_with_an_entry_is_served(flashinfer: Releases, version: str, tmp_path: Path) -> None:
    """``search_cache`` does what ``first_runner.py`` says, on 600 lookups against random subsets of entries."""
    (source, *_) = embedded("0.7.4" if version == "0.7.4" else "0.7.2.post1")
    environment = source.environment.with_facts({"flashinfer_version": version})
    shapes: dict[tuple[str, Profile], set[Key]] = {}
    for lookup in source.lookups:
        shapes.setdefault((lookup.custom_op, lookup.profile), set()).update(lookup.keys)
    for (op, profile), keys in shapes.items():  # one class may stand in a list twice, with other extras
        twin = min(keys, key=str)
        keys.add(Key(op, twin.runner, profile, (*twin.extras, "twin")))
    rivals = [sorted(keys, key=str) for keys in shapes.values()]
    every = [Entry(key, key.runner, (number, ())) for number, key in enumerate(itertools.chain(*rivals))]

    chance = random.Random(20261201)
    places = set()
    for number in range(20):
        entries = {entry.key.text: entry for entry in every if chance.random() < 0.4}
        path = tmp_path / f"{number}.json"
        path.write_bytes(write_cache_file(CacheFile(tuple(entries.values()), environment.metadata())))
        orders = [chance.sample(keys, len(keys)) for keys in chance.choices(rivals, k=30)]
        answer = flashinfer(version).play(
            metadata=environment.metadata(), load=path, lookups=[question(order) for order in orders]
        )
        for order, given in zip(orders, answer["answers"], strict=True):
            texts = [key.text for key in order]
            hit = first_runner_with_an_entry(texts, entries)
            assert given["keys"] == texts
            assert given["served"] == (None if hit is None else answer_of(entries[hit]))
            places.add(None if hit is None else texts.index(hit))
    assert places >= {None, 0, 1, 2}


class TestEnvironment:
    """What we take for the environment where FlashInfer is imported."""

    @pytest.mark.parametrize("version", VERSIONS)
    def test_is_what_flashinfer_stamps(self, flashinfer: Releases, version: str) -> None:
        metadata = {**embedded("0.7.4")[0].environment.metadata(), "flashinfer_version": version}
        assert flashinfer(version).play(metadata=metadata, environment=True)["environment"] == metadata

    @pytest.mark.parametrize("version", VERSIONS)
    def test_leaves_undetermined_what_flashinfer_does_not_know(self, flashinfer: Releases, version: str) -> None:
        facts = flashinfer(version).play(metadata={"flashinfer_version": version, "gpu": "unknown"}, environment=True)
        assert facts["environment"] == {"flashinfer_version": version}
