"""What is pulled, in the real FlashInfer: it loads there, and every recorded lookup gets its winner.

Runs on any machine: the metadata of an H200 takes the place of what FlashInfer finds, runners are
toys of the recorded class names, and the rest is FlashInfer's own: ``load_configs``,
``search_cache``, ``choose_one``, the ops' tuning configurations.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_flashinfer import RealFlashInfer, answer_of, embedded, question, recorded_question, winners

from fi_tunecache.bundle import Bundle, Provenance
from fi_tunecache.entry import Lookup
from fi_tunecache.environment import FACTS, Environment
from fi_tunecache.key import Key
from fi_tunecache.match_level import MatchLevel
from fi_tunecache.materialisation import stamped
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.publish.gather import gather
from fi_tunecache.publish.recorded_lookups import read_questions
from fi_tunecache.registry_tree import EMBEDDED
from fi_tunecache.retrieval import pull
from fi_tunecache.selection import Request
from fi_tunecache.source import read_source
from fi_tunecache.user_cache import UserCache

pytestmark = pytest.mark.slow

DATA = Path(__file__).with_name("data")
GEMM_A = DATA / "h200-flashinfer-0.7.4" / "gemm-a.v1.json"
GEMM_A_LOOKUPS = GEMM_A.with_name("gemm-a.lookups.json")

Releases = Callable[[str], RealFlashInfer]


def gathered(source: Path, lookups: Path | None) -> Bundle:
    questions = read_questions(lookups.read_bytes()) if lookups else ()
    provenance = Provenance(created="2026-12-01")
    (made,) = gather([read_source(source)], provenance, questions=questions)
    assert made.bundle is not None
    return made.bundle


def gemm_a() -> Bundle:
    return gathered(GEMM_A, GEMM_A_LOOKUPS)


def registry_of(bundle: Bundle, tmp_path: Path) -> str:
    root = tmp_path / "registry"
    add_bundles(root, "test", [bundle])
    return str(root)


def pulled_file(
    environment: Environment, tmp_path: Path, registry: str = EMBEDDED, level: MatchLevel = MatchLevel.EXACT
) -> tuple[Path, int]:
    """What ``pull --to FILE`` writes, and how many entries it holds."""
    request = Request(environment=environment, registries=(registry,), level=level)
    pulled = pull(request, cache=UserCache(tmp_path / "cache"))
    path = tmp_path / "pulled.json"
    path.write_bytes(stamped(pulled.selection, pulled.data, environment))
    return path, pulled.selection.entries


def served(answers: Sequence[dict[str, Any]]) -> list[Any]:
    """What ``search_cache`` found (None: nothing). ``choose_one`` must have told the op the same."""
    for answer in answers:
        if answer["served"] is not None:
            assert answer["chosen"] == answer["served"]
    return [answer["served"] for answer in answers]


def ask(lookups: dict[Lookup, list[Any]]) -> list[dict[str, Any]]:
    return [question(lookup.keys) for lookup in lookups]


@pytest.mark.parametrize(("version", "count"), [("0.7.4", 165), ("0.7.2.post1", 27)])
class TestThePulledFile:
    def test_loads_with_every_entry_and_gives_every_winner(
        self, flashinfer: Releases, version: str, count: int, tmp_path: Path
    ) -> None:
        bundles = embedded(version)
        environment, expected = bundles[0].environment, winners(*bundles)
        path, entries = pulled_file(environment, tmp_path)
        answer = flashinfer(version).play(metadata=environment.metadata(), load=path, lookups=ask(expected))
        assert (answer["loaded"], answer["entries"], entries, len(expected)) == (True, count, count, count)
        assert [given["keys"] for given in answer["answers"]] == [[key.text for key in item.keys] for item in expected]
        assert served(answer["answers"]) == list(expected.values())

    def test_serves_where_autotune_loads_it(
        self, flashinfer: Releases, version: str, count: int, tmp_path: Path
    ) -> None:
        bundles = embedded(version)
        environment, expected = bundles[0].environment, winners(*bundles)
        path, _ = pulled_file(environment, tmp_path)
        before = path.read_bytes()
        answer = flashinfer(version).play(metadata=environment.metadata(), cache=path, lookups=ask(expected))
        assert answer["entries"] == count
        assert served(answer["answers"]) == list(expected.values())
        assert path.read_bytes() == before

    def test_spares_tuning(self, flashinfer: Releases, version: str, count: int, tmp_path: Path) -> None:
        """In tuning mode FlashInfer passes over an entry whose policy is not the op's, and times again."""
        bundles = embedded(version)
        environment, expected = bundles[0].environment, winners(*bundles)
        # A call tunes all smaller buckets too, which the extras of this runner name up to 0.7.2.post1 by the
        # call's own M: no entry fits them, and FlashInfer times again whatever is loaded.
        asked = {
            lookup: winner
            for lookup, winner in expected.items()
            if version == "0.7.4" or lookup.runners != ("CublasltBf16GemmRunner",)
        }
        path, _ = pulled_file(environment, tmp_path)
        answer = flashinfer(version).play(metadata=environment.metadata(), cache=path, tune=True, lookups=ask(asked))
        assert len(asked) == {"0.7.4": 165, "0.7.2.post1": 18}[version]
        assert [given["chosen"] for given in answer["answers"]] == list(asked.values())

    @pytest.mark.parametrize("fact", FACTS)
    def test_is_refused_where_one_fact_differs(
        self, flashinfer: Releases, version: str, count: int, fact: str, tmp_path: Path
    ) -> None:
        bundles = embedded(version)
        environment, expected = bundles[0].environment, winners(*bundles)
        path, _ = pulled_file(environment, tmp_path)
        elsewhere = environment.with_facts({fact: "another"})
        answer = flashinfer(version).play(metadata=elsewhere.metadata(), load=path, lookups=ask(expected))
        assert (answer["loaded"], answer["entries"]) == (False, 0)
        assert served(answer["answers"]) == [None] * count


class TestRecordedLookups:
    @pytest.mark.parametrize(
        ("version", "source", "lookups", "count"),
        [
            ("0.7.4", "gemm-a.v1.json", "gemm-a.lookups.json", 90),
            ("0.7.4", "fp8-8k.v1.json", "fp8-8k.lookups.json", 84),
            ("0.7.2.post1", "managed-store", "lookups.json", 30),
        ],
    )
    def test_get_the_winners_that_were_recorded(
        self, flashinfer: Releases, version: str, source: str, lookups: str, count: int, tmp_path: Path
    ) -> None:
        folder = DATA / f"h200-flashinfer-{version}"
        bundle = gathered(folder / source, folder / lookups)
        path, _ = pulled_file(bundle.environment, tmp_path, registry_of(bundle, tmp_path))
        records = json.loads((folder / lookups).read_bytes())
        answer = flashinfer(version).play(
            metadata=bundle.environment.metadata(), load=path, lookups=list(map(recorded_question, records))
        )
        assert len(records) == count
        assert served(answer["answers"]) == [record["winner"] for record in records]

    def test_without_them_only_the_fastest_runner_of_a_shape_is_kept(
        self, flashinfer: Releases, tmp_path: Path
    ) -> None:
        bundle = msgspec.structs.replace(gemm_a(), lookups=())
        path, entries = pulled_file(bundle.environment, tmp_path, registry_of(bundle, tmp_path))
        shapes: dict[tuple[str, object], list[Key]] = {}
        for entry in bundle.entries.values():
            shapes.setdefault((entry.key.custom_op, entry.key.profile), []).append(entry.key)
        orders = [
            (order, min((bundle.entries[key.text] for key in keys), key=lambda entry: entry.selection["time_ms"]))
            for keys in shapes.values()
            for order in itertools.permutations(keys)
        ]
        assert Counter(map(len, shapes.values())) == {3: 18, 1: 36}

        answer = flashinfer("0.7.4").play(
            metadata=bundle.environment.metadata(), load=path, lookups=[question(order) for order, _ in orders]
        )
        assert (entries, answer["loaded"], answer["entries"]) == (54, True, 54)
        assert served(answer["answers"]) == [answer_of(fastest) for _, fastest in orders]


class TestWhereALibraryDiffers:
    def test_cudnn_frontend(self, flashinfer: Releases, tmp_path: Path) -> None:
        bundle = gemm_a()
        here = bundle.environment.with_facts({"cudnn_frontend_version": "1.31.0"})
        expected = winners(bundle)
        path, entries = pulled_file(here, tmp_path, registry_of(bundle, tmp_path), MatchLevel.COMPATIBLE)
        original = flashinfer("0.7.4").play(metadata=here.metadata(), load=GEMM_A, lookups=ask(expected))
        assert (original["loaded"], original["entries"]) == (False, 0)
        ours = flashinfer("0.7.4").play(metadata=here.metadata(), load=path, lookups=ask(expected))
        assert (entries, ours["loaded"], ours["entries"]) == (90, True, 90)
        assert served(ours["answers"]) == list(expected.values())

    @pytest.mark.parametrize(
        ("fact", "prefix", "kept"),
        [
            pytest.param("cudnn_version", "Cudnn", {"CublasltBf16GemmRunner": 18}, id="cudnn"),
            pytest.param("cublas_version", "Cublas", {"CudnnBf16GemmRunner": 36}, id="cublas"),
        ],
    )
    @pytest.mark.parametrize("registry", ["gemm-a", "embedded"])
    def test_a_group_with_one_of_its_runners_is_gone_whole(
        self, flashinfer: Releases, registry: str, fact: str, prefix: str, kept: dict[str, int], tmp_path: Path
    ) -> None:
        bundles = [gemm_a()] if registry == "gemm-a" else embedded("0.7.4")
        here = bundles[0].environment.with_facts({fact: "99.9"})
        expected = winners(*bundles)
        name = registry_of(bundles[0], tmp_path) if registry == "gemm-a" else EMBEDDED
        path, entries = pulled_file(here, tmp_path, name, MatchLevel.COMPATIBLE)
        answer = flashinfer("0.7.4").play(metadata=here.metadata(), load=path, lookups=ask(expected))
        found = served(answer["answers"])
        assert (answer["loaded"], answer["entries"]) == (True, entries)
        assert Counter(runner for runner, _ in filter(None, found)) == kept
        for (lookup, winner), given in zip(expected.items(), found, strict=True):
            assert given in (winner, None)
            if any(runner.startswith(prefix) for runner in lookup.runners):
                assert given is None

    def test_the_path_in_the_fingerprint_alone(self, flashinfer: Releases, tmp_path: Path) -> None:
        """0.7.4 hashes installed-file records, which name the virtual environment's folder."""
        bundle = gemm_a()
        fingerprint = bundle.environment.cutlass_dsl_version
        assert fingerprint is not None
        moved = ";".join(
            f"{package}:{record[::-1]}" if record else package
            for package, _, record in (part.partition(":") for part in fingerprint.split(";"))
        )
        here = msgspec.structs.replace(bundle.environment, cutlass_dsl_version=moved)
        assert here != bundle.environment
        path, entries = pulled_file(here, tmp_path, registry_of(bundle, tmp_path), MatchLevel.EXACT)
        original = flashinfer("0.7.4").play(metadata=here.metadata(), load=GEMM_A)
        assert (original["loaded"], original["entries"]) == (False, 0)
        expected = winners(bundle)
        ours = flashinfer("0.7.4").play(metadata=here.metadata(), load=path, lookups=ask(expected))
        assert (entries, ours["loaded"], ours["entries"]) == (90, True, 90)
        assert served(ours["answers"]) == list(expected.values())
