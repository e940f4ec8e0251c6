"""The v1 file for FlashInfer that is stamped for one environment, and the JSON form of a resolution."""

from __future__ import annotations

import json
from pathlib import Path

import made
import pytest
from msgspec import structs

from fi_tunecache.bundle import MARK
from fi_tunecache.environment import FACTS, Environment
from fi_tunecache.errors import UsageError
from fi_tunecache.flashinfer_json import MAX_ENTRIES, read_cache_file
from fi_tunecache.key import Key
from fi_tunecache.manifest import Yank
from fi_tunecache.match_level import MatchLevel
from fi_tunecache.materialisation import materialise, resolution_builtins, resolution_json, stamped
from fi_tunecache.measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.resolution import choose
from fi_tunecache.retrieval import Pulled, pull
from fi_tunecache.selection import Request, read_selection
from fi_tunecache.source import SourceKind, read_source
from fi_tunecache.user_cache import UserCache
from fi_tunecache.verdict import Chosen, Resolution

OTHER_PATH = made.H200.with_facts({"cutlass_dsl_version": "cpython-312;nvidia-cutlass-dsl==4.8.1:ff;torch==2.11.0:ff"})


@pytest.fixture
def pulled(tmp_path: Path) -> Pulled:
    entries = [
        made.entry(made.key(made.CUTLASS, 1), (0, (1, 2)), 0.5),
        structs.replace(made.entry(made.key(made.CUTLASS, 2), -1), policy=None),
    ]
    add_bundles(tmp_path / "registry", "made", [made.bundle(entries)])
    request = Request(environment=made.H200, registries=(str(tmp_path / "registry"),))
    return pull(request, cache=UserCache(tmp_path / "cache"))


def test_a_stamped_file_bears_the_facts_of_its_environment_as_flashinfer_prints_them(pulled: Pulled) -> None:
    """Also where the selection, which compares them by meaning, was made for another path."""
    for environment in (made.H200, OTHER_PATH):
        file = read_cache_file(stamped(pulled.selection, pulled.data, environment))
        metadata = dict(file.metadata or {})
        metadata.pop(MARK)
        assert metadata == environment.metadata()


def test_a_fact_that_a_newer_flashinfer_adds_is_stamped(pulled: Pulled) -> None:
    newer = Environment.from_metadata({**made.H200.metadata(), "driver_version": "580.1"})
    file = read_cache_file(stamped(pulled.selection, pulled.data, newer))
    assert (file.metadata or {})["driver_version"] == "580.1"


def test_a_stamped_file_says_where_it_comes_from(pulled: Pulled, tmp_path: Path) -> None:
    file = read_cache_file(stamped(pulled.selection, pulled.data, made.H200))
    (bundle,) = pulled.selection.bundles
    assert (file.metadata or {})[MARK] == {
        "tool": pulled.selection.tool,
        "selection": pulled.selection.id,
        "level": "exact",
        "bundles": [f"{tmp_path / 'registry'}: {bundle.sha256}"],
    }


def test_its_entries_are_those_of_the_bundle_marked_where_there_is_room(pulled: Pulled) -> None:
    """FlashInfer reads a third element as the policy: an entry without one has no place for a mark."""
    entries = read_cache_file(stamped(pulled.selection, pulled.data, made.H200)).entries
    (bundle,) = pulled.selection.bundles
    marked, plain = sorted(entries, key=lambda entry: entry.key.profile)
    assert (marked.tactic, marked.policy) == ((0, (1, 2)), made.POLICY)
    assert marked.selection == {"time_ms": 0.5, "candidates": 2, MARK: bundle.bundle_id}
    assert (plain.tactic, plain.policy, plain.selection) == (-1, None, None)


def test_it_is_known_as_pulled(pulled: Pulled, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_bytes(stamped(pulled.selection, pulled.data, made.H200))
    source = read_source(path)
    assert source.kind is SourceKind.PULLED
    assert source.sections[0].problems == ()


def test_it_may_hold_the_entries_of_several_bundles() -> None:
    """Which together may be more than one file of somebody's may hold."""
    base = made.key(made.CUTLASS)
    keys = [Key(base.custom_op, base.runner, ((m, 1),), base.extras) for m in range(MAX_ENTRIES + 1)]
    chosen = {key.text: Chosen(made.entry(key), "0" * 16) for key in keys}
    full = Resolution(made.H200, MatchLevel.EXACT, DEFAULT_POLICY, chosen, (), (), ())
    none = structs.replace(full, level=MatchLevel.COMPATIBLE, chosen={})
    selection, data = materialise(Request(environment=made.H200, registries=("made",)), [], full, none, ())
    assert selection.entries == MAX_ENTRIES + 1
    assert read_selection(data) == selection
    document = json.loads(stamped(selection, data, made.H200))
    assert sum(not name.startswith("_") for name in document) == MAX_ENTRIES + 1


@pytest.mark.parametrize("fact", FACTS)
def test_a_file_that_lacks_a_fact_is_not_made(pulled: Pulled, fact: str) -> None:
    environment = structs.replace(made.H200, **{fact: None})
    with pytest.raises(UsageError) as caught:
        stamped(pulled.selection, pulled.data, environment)
    assert str(caught.value) == (
        f"can't stamp a file for FlashInfer: {fact} not known; "
        f"give it with --fact {fact}=VALUE, or all with --environment FILE or --like"
    )


def test_the_json_of_a_resolution_gives_each_reason_as_an_object_and_as_a_line() -> None:
    cudnn, cutlass = made.entry(made.key(made.CUDNN), (0, ())), made.entry(made.key(made.CUTLASS, 2))
    older = made.H200.with_facts({"cudnn_version": "91000"})
    good, yanked, eager = (
        made.candidate(made.bundle([cudnn, cutlass], environment=older)),
        made.candidate(made.bundle([cutlass], created="2026-12-02"), yanked=Yank("wrong clocks", "2026-12-04")),
        made.candidate(made.bundle([cutlass], policy=MeasurementPolicy.from_execution_mode("eager"))),
    )
    resolution = choose([good, yanked, eager], made.H200, MatchLevel.COMPATIBLE)
    document = resolution_builtins(resolution)

    assert json.loads(resolution_json(resolution)) == json.loads(json.dumps(document))
    assert document["environment"] == made.H200.metadata()
    assert (document["match"], document["policy"], document["entries"]) == ("compatible", {}, 1)
    difference = {"type": "fact", "fact": "cudnn_version", "registry": "91000", "here": "91900"}
    assert {row["bundle"]: row for row in document["bundles"]}[good.row.bundle_id] == {
        "bundle": good.row.bundle_id,
        "registry": "test",
        "entries": 2,
        "taken": 1,
        "provided_elsewhere": 0,
        "differing": [difference],
        "may_cost_speed": [],
        "rejected": [],
        "line": f"bundle {good.row.bundle_id}: 1 of 2 entries (differs in cudnn_version: registry 91000, here 91900)",
    }
    rejected = {row["bundle"]: row["rejected"] for row in document["bundles"] if row["rejected"]}
    assert rejected == {
        yanked.row.bundle_id: [{"type": "yanked", "reason": "wrong clocks", "date": "2026-12-04"}],
        eager.row.bundle_id: [{"type": "policy", "registry": "eager", "asked": "default"}],
    }
    assert document["dropped"] == [
        {
            "bundle": good.row.bundle_id,
            "custom_op": "bf16_gemm",
            "runner": made.CUDNN,
            "rivals": [],
            "entries": 1,
            "cause": "cudnn_version: registry 91000, here 91900",
            "line": f"cudnn_version: registry 91000, here 91900: 1 entry of {made.CUDNN} dropped",
        }
    ]
