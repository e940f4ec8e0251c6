"""What came from a registry is not published as if it had been tuned: marked entries, and unmarked ones of old."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import made
import msgspec
import pytest
from made_sources import OF_0_7_2, PROVENANCE, gathered, lines, published, source, v1_file
from real_flashinfer import RealFlashInfer

from fi_tunecache.bundle import MARK, Bundle
from fi_tunecache.entry import Entry
from fi_tunecache.environment import Environment
from fi_tunecache.errors import UsageError
from fi_tunecache.flashinfer_json import read_cache_file
from fi_tunecache.managed_store import write_entries
from fi_tunecache.manifest import BundleRow, Yank
from fi_tunecache.materialisation import stamped
from fi_tunecache.measurement_policy import DEFAULT_POLICY
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.publish.gather import gather
from fi_tunecache.publish.left_out import Reason
from fi_tunecache.publish.plan import Status, make_plan
from fi_tunecache.publish.published import Published, read_published
from fi_tunecache.publish.recorded_lookups import questions_of
from fi_tunecache.registry import open_registry
from fi_tunecache.registry_tree import EMBEDDED
from fi_tunecache.retrieval import pull
from fi_tunecache.selection import Request
from fi_tunecache.source import Source, SourceKind, read_source
from fi_tunecache.user_cache import UserCache
from fi_tunecache.verdict import Rule

ID = "92e3198da296966e"
M1, M2, M4 = (made.entry(made.key(made.CUTLASS, m), 7) for m in (1, 2, 4))
NEXT_STEP = "leave them out with --skip-pulled, or tune without fi-tunecache"


def marked(entry: Entry, mark: object = ID) -> Entry:
    return msgspec.structs.replace(entry, selection={"time_ms": 0.5, MARK: mark})


def refused(*sources: Source, known: Published | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        gather(sources, PROVENANCE, published=known or Published())
    assert caught.value.next_step == NEXT_STEP
    return caught.value.problem


# --- marks


@pytest.mark.parametrize("environment", [made.H200, OF_0_7_2], ids=["0.7.4", "0.7.2.post1"])
@pytest.mark.parametrize("kind", [SourceKind.CACHE_FILE, SourceKind.STORE])
def test_store_entries(environment: Environment, kind: SourceKind) -> None:
    entries = [M1, marked(M2), marked(M4)]
    message = refused(source("a", entries, environment=environment, kind=kind))

    assert message.removeprefix("a (a)").removeprefix("a") == (
        f" can't be published: 2 of 3 entries came from bundle {ID}, the first {M2.key.text}"
    )
    found = gathered(source("a", entries, environment=environment, kind=kind), skip_pulled=True)
    assert found.bundle is not None
    assert list(found.bundle.entries.values()) == [M1]
    assert lines(found.left_out) == [(Reason.PULLED, made.CUTLASS, 2)]
    assert found.left_out[0].bundles == (ID,)


@pytest.mark.parametrize(
    ("marks", "named"),
    [
        pytest.param(["0" * 16, "1" * 16, "1" * 16], f"bundles {'1' * 16}, {'0' * 16},", id="the most frequent first"),
        pytest.param(
            [f"{number:016x}" for number in range(7)],
            "bundles 0000000000000000, 0000000000000001, 0000000000000002, 0000000000000003 and 3 more,",
            id="four at most",
        ),
        pytest.param([{"a": ["b"] * 99}], "bundle {'a': ['b', ", id="what is no id"),
        pytest.param([""], "bundle '',", id="an empty mark"),
        pytest.param([None], "bundle None,", id="null"),
    ],
)
def test_the_bundles_that_marks_name(marks: list[object], named: str) -> None:
    entries = [marked(made.entry(made.key(made.CUTLASS, m + 1)), mark) for m, mark in enumerate(marks)]
    message = refused(source("a", entries))

    assert f"came from {named}" in message
    assert len(message) < 400


def test_a_seeded_store_and_what_was_tuned_again(tmp_path: Path) -> None:
    seeded = write_entries(tmp_path, made.H200, DEFAULT_POLICY, [M1, M2], mark=ID).path
    assert f"2 of 2 entries came from bundle {ID}" in refused(read_source(tmp_path))

    for file in (seeded / "entries").iterdir():  # as FlashInfer rewrites what it tunes
        document = json.loads(file.read_bytes())
        del document[MARK]
        file.write_text(json.dumps(document))
    known = published(made.bundle([M1, M2]))
    assert gathered(read_source(tmp_path), published=known).bundle is not None


def test_a_file_that_pull_made(tmp_path: Path) -> None:
    path = tmp_path / "pulled.json"
    path.write_bytes(pulled_file(tmp_path, made_embedded("0.7.4"))[0])

    message = refused(read_source(path))
    assert message.startswith(f"{path} can't be published: ")
    assert "165 of 165 entries came from bundles 3d1350e7978426ba, d152cdd59e311f69" in message
    assert gathered(read_source(path), skip_pulled=True).bundle is None


def test_a_file_that_pull_made_and_flashinfer_has_added_to() -> None:
    """FlashInfer keeps the metadata of a file that it saves to, with what it has tuned; 0.7.4 keeps the marks too."""
    entries = [M1, marked(M2), msgspec.structs.replace(M4, policy=None)]
    file = source("a", entries, kind=SourceKind.PULLED, bundles=(ID,))

    assert "2 of 3 entries came from bundle" in refused(file)
    found = gathered(file, skip_pulled=True)
    assert found.bundle is not None
    assert list(found.bundle.entries.values()) == [M1]

    old = source("a", [M1, M2], kind=SourceKind.PULLED, bundles=(ID,), environment=OF_0_7_2)
    assert f"2 of 2 entries came from bundle {ID}" in refused(old)
    assert gathered(old, skip_pulled=True).bundle is None


@pytest.mark.parametrize(("bundles", "origin"), [((), "a registry"), ((ID,), f"bundle {ID}")])
def test_only_the_metadata_tells(bundles: tuple[str, ...], origin: str) -> None:
    file = source("a", [M1], kind=SourceKind.PULLED, bundles=bundles)

    assert refused(file) == f"a can't be published: its metadata says that it was pulled from {origin}"
    assert gathered(file, skip_pulled=True).bundle is not None


@pytest.mark.parametrize(
    ("tuned_ms", "recorded", "remaining", "cause"),
    [
        pytest.param(2.0, False, [], Rule.NOT_FASTEST, id="the pulled one is faster"),
        pytest.param(0.25, False, [made.TINY], None, id="the tuned one is faster"),
        pytest.param(None, False, [], Rule.NO_TIMES, id="nobody knows"),
        pytest.param(0.25, True, [], Rule.LEFT_OVER, id="the pulled one wins a lookup"),
    ],
)
def test_what_lost_against_a_pulled_entry_is_not_published_alone(
    tuned_ms: float | None, recorded: bool, remaining: list[str], cause: Rule | None
) -> None:
    entries = [marked(M1), made.entry(made.key(made.TINY), 1, tuned_ms)]
    asked = questions_of([made.lookup([made.CUTLASS, made.TINY], made.CUTLASS)] if recorded else [])
    found = gathered(source("a", entries), skip_pulled=True, questions=asked)

    assert [entry.runner for entry in (found.bundle.entries.values() if found.bundle else ())] == remaining
    assert (Reason.PULLED, made.CUTLASS, 1) in lines(found.left_out)
    assert [line.cause for line in found.left_out if line.runner == made.TINY] == ([cause] if cause else [])
    assert found.read == 2 == sum(line.entries for line in found.left_out) + len(remaining)


def test_a_pulled_loser_changes_nothing() -> None:
    tuned = made.entry(made.key(made.TINY), 1)
    asked = questions_of([made.lookup([made.TINY, made.CUTLASS], made.TINY)])
    found = gathered(source("a", [marked(M1), tuned]), skip_pulled=True, questions=asked)

    assert found.bundle is not None
    assert list(found.bundle.entries.values()) == [tuned]
    assert len(found.bundle.lookups) == 1


def test_what_was_pulled_here_and_tuned_there() -> None:
    found = gathered(source("a", [marked(M1)]), source("b", [made.entry(M1.key, 8)]), skip_pulled=True)

    assert found.bundle is not None
    assert [entry.tactic for entry in found.bundle.entries.values()] == [8]
    assert found.conflicts == ()


# --- FlashInfer before 0.7.4 saves a v1 file without marks


KNOWN = published(made.bundle([M1, M2], environment=OF_0_7_2))
(KNOWN_ID,) = (item.bundle_id for item in KNOWN.bundles)


def test_unstore_entries_that_equal_published_ones() -> None:
    file = source("a", [M1, M2, M4], environment=OF_0_7_2)

    assert refused(file, known=KNOWN) == (
        f"a can't be published: 2 of 3 entries equal those of bundle {KNOWN_ID}, and FlashInfer 0.7.2.post1 saves no "
        f"marks, the first {M1.key.text}"
    )
    found = gathered(file, published=KNOWN, skip_pulled=True)
    assert found.bundle is not None
    assert list(found.bundle.entries.values()) == [M4]
    assert [(line.cause, line.entries, line.bundles) for line in found.left_out] == [(Reason.PULLED, 2, (KNOWN_ID,))]


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"cudnn_version": "91800", "cublas_version": "13.0.0"}, id="accepted by family"),
        pytest.param({"flashinfer_version": "0.7.2.post1"}, id="of the same environment"),
    ],
)
def test_whatever_else_differs(facts: dict[str, str]) -> None:
    file = source("a", [M1], environment=OF_0_7_2.with_facts(facts))
    assert f"1 of 1 entry equal those of bundle {KNOWN_ID}" in refused(file, known=KNOWN)


def test_a_yanked_bundle_counts_too() -> None:
    known = published(made.bundle([M1], environment=OF_0_7_2), yanked=Yank("throttled", "2026-12-02"))
    assert "1 of 1 entry equal those of bundle" in refused(source("a", [M1], environment=OF_0_7_2), known=known)


def test_a_bundle_that_only_the_cache_has() -> None:
    known = Published(tuple(msgspec.structs.replace(item, row=None) for item in KNOWN.bundles))
    assert KNOWN_ID in refused(source("a", [M1], environment=OF_0_7_2), known=known)


@pytest.mark.parametrize(
    ("entry", "environment", "kind"),
    [
        pytest.param(M1, made.H200, SourceKind.CACHE_FILE, id="0.7.4 keeps marks"),
        pytest.param(M1, OF_0_7_2, SourceKind.STORE, id="a store holds what was tuned"),
        pytest.param(M1, OF_0_7_2.with_facts({"gpu": "NVIDIA H100"}), SourceKind.CACHE_FILE, id="another GPU"),
        pytest.param(
            M1, OF_0_7_2.with_facts({"flashinfer_version": "0.7.2"}), SourceKind.CACHE_FILE, id="another FlashInfer"
        ),
        pytest.param(made.entry(M1.key, 8), OF_0_7_2, SourceKind.CACHE_FILE, id="another tactic"),
        pytest.param(
            msgspec.structs.replace(M1, policy=("x", 1)), OF_0_7_2, SourceKind.CACHE_FILE, id="another policy"
        ),
        pytest.param(made.entry(made.key(made.CUTLASS, 8), 7), OF_0_7_2, SourceKind.CACHE_FILE, id="another key"),
    ],
)
def test_what_was_tuned(entry: Entry, environment: Environment, kind: SourceKind) -> None:
    found = gathered(source("a", [entry], environment=environment, kind=kind), published=KNOWN)

    assert found.bundle is not None
    assert found.left_out == ()


def test_the_file_that_a_bundle_was_gathered_from_may_come_again() -> None:
    file = source("a", [M1, M2], environment=OF_0_7_2)
    first = gathered(file).bundle
    assert first is not None
    known = published(first)

    again = gathered(file, published=known)
    assert again.bundle == first
    (planned,) = make_plan([again], known).bundles
    assert (planned.status, planned.held_by) == (Status.UNCHANGED, (known.bundles[0].bundle_id,))
    both = gathered(file, source("b", [M4], environment=OF_0_7_2), published=known)
    assert both.bundle is not None
    assert len(both.bundle.entries) == 3


def test_the_file_is_excused_for_its_own_bundle_alone() -> None:
    """What was left out as pulled when the file was published is left out again."""
    file = source("a", [M1, M4], environment=OF_0_7_2)
    first = gathered(file, published=KNOWN, skip_pulled=True).bundle
    assert first is not None
    known = Published((*KNOWN.bundles, *published(first).bundles))

    assert f"1 of 2 entries equal those of bundle {KNOWN_ID}," in refused(file, known=known)


# --- what is read for it


def registry_of(root: Path, *bundles: Bundle) -> list[BundleRow]:
    return add_bundles(root, "ours", bundles)


def known_of(target: Path | None, cache: UserCache | None, *sources: Source) -> list[str]:
    registry = None if target is None else open_registry(str(target))
    return [item.bundle_id for item in read_published(registry, sources, cache).bundles]


def test_what_is_read_of_a_registry(tmp_path: Path) -> None:
    elsewhere, h100 = OF_0_7_2.with_facts({"cudnn_version": "1"}), OF_0_7_2.with_facts({"gpu": "NVIDIA H100"})
    same, other_facts, other_gpu, newer, newer_other = registry_of(
        tmp_path,
        made.bundle([M1], environment=OF_0_7_2),
        made.bundle([M1], environment=elsewhere),
        made.bundle([M1], environment=h100),
        made.bundle([M1]),
        made.bundle([M1], environment=made.H200.with_facts({"cudnn_version": "1"})),
    )
    old, new = source("old", [M1], environment=OF_0_7_2), source("new", [M1])

    assert known_of(tmp_path, None, old) == [same.bundle_id, other_facts.bundle_id]
    assert known_of(tmp_path, None, new) == [newer.bundle_id]
    assert known_of(tmp_path, None, old, new) == [same.bundle_id, other_facts.bundle_id, newer.bundle_id]
    assert known_of(None, None, old, new) == []
    assert {other_gpu.bundle_id, newer_other.bundle_id}.isdisjoint(known_of(tmp_path, None, old, new))


def test_what_is_read_of_the_cache(tmp_path: Path) -> None:
    cache = UserCache(tmp_path / "cache")
    rows = registry_of(
        tmp_path / "registry", made.bundle([M1], environment=OF_0_7_2), made.bundle([M2], environment=OF_0_7_2)
    )
    for row in registry_of(tmp_path / "other", made.bundle([M4], environment=OF_0_7_2), made.bundle([M4])):
        folder = f"{row.environment['flashinfer_version']}/nvidia-h200"
        cache.store_bundle(row.sha256, (tmp_path / "other" / folder / row.file).read_bytes())
        rows.append(row)
    old, new = source("old", [M1], environment=OF_0_7_2), source("new", [M1])

    assert known_of(tmp_path / "registry", cache, old) == [row.bundle_id for row in rows[:3]]
    assert known_of(None, cache, old) == [rows[2].bundle_id]
    assert known_of(None, cache, new) == []  # 0.7.4 keeps marks: nobody needs the cache


def test_what_the_cache_holds_is_not_fetched(tmp_path: Path) -> None:
    (row,) = registry_of(tmp_path / "registry", made.bundle([M1], environment=OF_0_7_2))
    path = tmp_path / "registry" / "0.7.2.post1" / "nvidia-h200" / row.file
    cache = UserCache(tmp_path / "cache")
    cache.store_bundle(row.sha256, path.read_bytes())
    path.unlink()

    assert known_of(tmp_path / "registry", cache, source("a", [M1], environment=OF_0_7_2)) == [row.bundle_id]


def test_a_cached_bundle_that_can_not_be_read_is_noticed(tmp_path: Path) -> None:
    cache = UserCache(tmp_path)
    data = b'{"_metadata":{"fi_tunecache":{"format":2}}}'
    for sha256 in ("0" * 64, hashlib.sha256(data).hexdigest()):
        cache.store_bundle(sha256, data)

    assert known_of(None, cache, source("a", [M1], environment=OF_0_7_2)) == []
    assert len(cache.notices) == 2
    assert any("its sha256 is not its name" in notice for notice in cache.notices)


def test_sources_that_will_be_refused_need_nothing() -> None:
    unknown = msgspec.structs.replace(made.H200, gpu=None)
    assert known_of(None, None, source("a", [M1], environment=unknown)) == []


# --- with the real FlashInfer


def made_embedded(version: str) -> Environment:
    registry = open_registry(EMBEDDED)
    (folder,) = (folder for folder in registry.folders() if folder.version == version)
    return registry.manifest(folder).bundles[0].tuned_in


def pulled_file(tmp_path: Path, environment: Environment) -> tuple[bytes, Sequence[str]]:
    """A file as ``pull --to`` writes it, and the ids of its bundles."""
    found = pull(Request(environment=environment, registries=(EMBEDDED,)), cache=UserCache(tmp_path / "cache"))
    ids = [bundle.bundle_id for bundle in found.selection.bundles]
    return stamped(found.selection, found.data, environment), ids


@pytest.mark.slow
@pytest.mark.parametrize(("version", "how"), [("0.7.2.post1", "saves no marks"), ("0.7.4", "came from bundle")])
def test_pulled_then_saved_by_flashinfer(
    flashinfer: Callable[[str], RealFlashInfer], version: str, how: str, tmp_path: Path
) -> None:
    environment = made_embedded(version)
    data, ids = pulled_file(tmp_path, environment)
    ours, saved = tmp_path / "ours.json", tmp_path / "saved.json"
    ours.write_bytes(data)
    answer = flashinfer(version).play(metadata=environment.metadata(), load=ours, save=saved)
    assert answer["loaded"]
    file = read_source(saved)
    assert file.kind is SourceKind.CACHE_FILE
    assert file.sections[0].environment == environment

    for cache, target in ((None, open_registry(EMBEDDED)), (UserCache(tmp_path / "cache"), None)):
        message = refused(file, known=read_published(target, [file], cache))
        assert how in message
        assert all(bundle_id in message for bundle_id in ids)
        count = len(read_cache_file(data).entries)
        assert f"{count} of {count} entries" in message
    known = read_published(open_registry(EMBEDDED), [file], None)
    found = gathered(file, published=known, skip_pulled=True)
    assert (found.bundle, sum(line.entries for line in found.left_out)) == (None, count)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.7.2.post1", "0.7.4"])
def test_pulled_and_saved_in_its_place(
    flashinfer: Callable[[str], RealFlashInfer], version: str, tmp_path: Path
) -> None:
    """FlashInfer keeps the metadata of what it saves over, so the file still says that it was pulled."""
    environment = made_embedded(version)
    data, ids = pulled_file(tmp_path, environment)
    path = tmp_path / "pulled.json"
    path.write_bytes(data)
    flashinfer(version).play(metadata=environment.metadata(), load=path, save=path)
    assert path.read_bytes() != data

    file = read_source(path)
    assert file.kind is SourceKind.PULLED
    message = refused(file)
    assert all(bundle_id in message for bundle_id in ids)
    assert gathered(file, skip_pulled=True).bundle is None


def test_a_file_of_the_old_flashinfer_that_was_tuned(tmp_path: Path) -> None:
    path = v1_file(tmp_path / "rank_tp0_pp0_dp0.json", [M4], OF_0_7_2)
    file = read_source(path)
    known = read_published(open_registry(EMBEDDED), [file], None)

    assert gathered(file, published=known).bundle is not None
