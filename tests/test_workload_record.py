"""The record of a workload: what names it, what is kept, and that a damaged one harms nobody."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made
import pytest
from command_line import snapshot
from hypothesis import given
from hypothesis import strategies as st
from made_lookups import lookup, lookups
from msgspec import structs
from strategies import environments
from unprivileged import unprivileged

from fi_tunecache import __version__
from fi_tunecache.environment import Environment
from fi_tunecache.errors import CacheError, FormatError, UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.match_level import MatchLevel
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.publish.recorded_lookups import questions_at, read_questions
from fi_tunecache.recorded_lookup import Served, write_lookups
from fi_tunecache.registry import open_registry
from fi_tunecache.retrieval import pull
from fi_tunecache.selection import Request, Selection
from fi_tunecache.user_cache import UserCache
from fi_tunecache.workload import Workload
from fi_tunecache.workload_record import (
    RecordedSelection,
    WorkloadRecord,
    find_record,
    keep_workload,
    kept_records,
    read_record,
    write_record,
)

LLAMA = Workload((("model", "llama"), ("tp", "2")))
LOOKUPS = (lookup(Served.REGISTRY), lookup(Served.DEFAULT, m=2, reason="op known, shape not"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UserCache:
    for name in ("FI_TUNECACHE_REGISTRY", "FI_TUNECACHE_MATCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FI_TUNECACHE_DIR", str(tmp_path / "cache"))
    return UserCache(tmp_path / "cache")


@pytest.fixture
def selection(cache: UserCache) -> Selection:
    """Of the embedded registry, for the machine that it was tuned on."""
    return pull(Request(environment=embedded_environment(), registries=("embedded",)), cache=cache).selection


def embedded_environment() -> Environment:
    return open_registry("embedded").manifest(Folder.parse("0.7.4/nvidia-h200")).bundles[0].tuned_in


def keep(cache: UserCache, parts: Any = LLAMA, **changed: Any) -> Path:
    given = {"lookups": LOOKUPS, "environment": made.H200, "selection": None, **changed}
    return keep_workload(parts, given.pop("lookups"), cache=cache, **given)


# --- what names a workload


@pytest.mark.parametrize(
    ("given", "text"),
    [
        pytest.param("model=llama,tp=2", "model=llama,tp=2", id="as it is printed"),
        pytest.param("tp=2,model=llama", "model=llama,tp=2", id="in another order"),
        pytest.param({"tp": "2", "model": "llama"}, "model=llama,tp=2", id="parts"),
        pytest.param(LLAMA, "model=llama,tp=2", id="a workload"),
        pytest.param("llama-70b", "name=llama-70b", id="a word"),
        pytest.param("name=llama-70b", "name=llama-70b", id="the same as a part"),
        pytest.param("flags=a=b", "flags=a=b", id="a value with an equals sign"),
        pytest.param("model=Größe 1", "model=Größe 1", id="a value that is no word"),
    ],
)
def test_a_workload(given: Any, text: str) -> None:
    workload = Workload.of(given)

    assert str(workload) == text
    assert Workload.parse(text) == workload


def test_its_id() -> None:
    assert LLAMA.id == hashlib.sha256(b'[["model","llama"],["tp","2"]]').hexdigest()[:32]
    assert Workload.parse("tp=2,model=llama").id == LLAMA.id
    ids = [Workload.parse(text).id for text in ("model=llama,tp=1", "model=llama", "llama", "model=tp,llama=2")]
    assert len({LLAMA.id, *ids}) == 5


values = st.text(min_size=1, max_size=20).filter(
    lambda text: text.isprintable() and "," not in text and text.strip() == text
)
workloads = st.dictionaries(
    st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,8}", fullmatch=True), values, min_size=1, max_size=5
)


@given(workloads)
def test_parsing_is_the_inverse_of_printing(parts: dict[str, str]) -> None:
    workload = Workload.of(parts)

    assert dict(workload.parts) == parts
    assert Workload.parse(str(workload)) == workload
    assert re.fullmatch("[0-9a-f]{32}", workload.id)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param("", "workload: name can't be ''; give one printable line", id="nothing"),
        pytest.param({}, "a workload of 0 parts; name 1 to 32 of them", id="no parts"),
        pytest.param({f"n{i}": "x" for i in range(33)}, "a workload of 33 parts", id="too many"),
        pytest.param(
            "model=llama,fast", "workload: 'fast' has no value; write it like model=llama,tp=2", id="no value"
        ),
        pytest.param("model=", "workload: model can't be ''", id="an empty value"),
        pytest.param("=llama", "'' can't name a part of a workload", id="no name"),
        pytest.param("a b=c", "'a b' can't name a part", id="a name of two words"),
        pytest.param("a=1,a=2", "workload: 'a' is named twice; name it once", id="twice"),
        pytest.param({"model": "a,b"}, "workload: model can't be 'a,b'; give one printable line", id="a comma"),
        pytest.param({"model": " a"}, "workload: model can't be ' a'", id="a space"),
        pytest.param({"model": "a\nb"}, "workload: model can't be 'a\\nb'", id="two lines"),
        pytest.param({"model": "x" * 501}, "workload: model can't be", id="long"),
        pytest.param({"tp": 2.5}, "workload: tp can't be '2.5'", id="a number with a point"),
        pytest.param(5, "workload: a int names none", id="no parts"),
        pytest.param({2: "tp"}, "'2' can't name a part", id="a number for a name"),
    ],
)
def test_what_names_no_workload(given: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Workload.of(given)
    assert message in str(caught.value)


def test_a_number_is_its_text() -> None:
    assert Workload.of({"tp": 2}) == Workload.of({"tp": "2"})


def test_parts_out_of_order_are_no_workload() -> None:
    with pytest.raises(UsageError, match="not in order"):
        Workload((("tp", "2"), ("model", "llama")))


# --- what is kept


def test_what_is_kept(cache: UserCache, selection: Selection) -> None:
    path = keep(cache, {"tp": "2", "model": "llama"}, environment=embedded_environment(), selection=selection)
    record = find_record(cache, "model=llama,tp=2")

    assert path == cache.workload_path(LLAMA.id)
    assert record is not None
    assert record == WorkloadRecord(
        workload=LLAMA,
        tool=f"fi-tunecache {__version__}",
        recorded=record.recorded,
        environment=embedded_environment(),
        selection=RecordedSelection(
            id=selection.id,
            digest=selection.digest,
            level=MatchLevel.EXACT,
            policy={},
            registries=("embedded",),
        ),
        lookups=LOOKUPS,
    )
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", record.recorded)
    assert cache.notices == []


def test_the_file(cache: UserCache) -> None:
    document = json.loads(keep(cache).read_bytes())

    assert list(document) == [
        "fi_tunecache_workload", "workload", "tool", "recorded", "environment", "selection", "lookups",
    ]  # fmt: skip
    assert document["fi_tunecache_workload"] == 1
    assert document["workload"] == {"model": "llama", "tp": "2"}
    assert document["environment"] == made.H200.metadata()
    assert document["selection"] is None
    assert document["lookups"] == json.loads(write_lookups(LOOKUPS))


def test_by_default_it_is_the_users_cache(cache: UserCache) -> None:
    assert keep_workload("llama", LOOKUPS, environment=made.H200, selection=None) == cache.workload_path(
        Workload.of("llama").id
    )


def test_a_newer_record_replaces_the_older(cache: UserCache) -> None:
    assert keep(cache) == keep(cache, lookups=LOOKUPS[:1])
    record = find_record(cache, LLAMA)

    assert record is not None
    assert record.lookups == LOOKUPS[:1]


def test_a_selection_that_is_there_and_not_in_use_is_noted(cache: UserCache, tmp_path: Path) -> None:
    """As after `pull --to FILE`: the file was made from it."""
    registry = tmp_path / "registry"
    add_bundles(registry, "made", [made.bundle([made.entry(made.key(made.CUTLASS))])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FI_TUNECACHE_REGISTRY", str(registry))
        patch.setenv("FI_TUNECACHE_MATCH", "compatible")
        request = Request(environment=made.H200, registries=(str(registry),), level=MatchLevel.COMPATIBLE)
        there = pull(request, cache=cache).selection
        keep(cache)
    record = find_record(cache, LLAMA)

    assert record is not None
    assert record.selection == RecordedSelection.of(there)


def test_a_cache_that_can_not_be_written(shared_path: Path) -> None:
    shared_path.chmod(0o555)
    with unprivileged(), pytest.raises(CacheError, match="can't be written"):
        keep(UserCache(shared_path))
    shared_path.chmod(0o755)


def test_what_could_not_be_read_back_is_not_kept(cache: UserCache) -> None:
    with pytest.raises(FormatError, match="no printable line"):
        keep(cache, lookups=[structs.replace(LOOKUPS[0], reason="two\nlines")])
    assert find_record(cache, LLAMA) is None


@given(environments, st.lists(lookups(), max_size=2), st.none() | st.sampled_from(MatchLevel))
def test_reading_is_the_inverse_of_writing(
    environment: Environment, recorded: list[Any], level: MatchLevel | None
) -> None:
    record = WorkloadRecord(
        workload=LLAMA,
        tool="fi-tunecache 1",
        recorded="2026-12-01T08:30:00Z",
        environment=environment,
        selection=None
        if level is None
        else RecordedSelection(
            id="0" * 32,
            digest="1" * 64,
            level=level,
            policy={"measure_execution_mode": "eager"},
            registries=("/a/path", "hf://datasets/team/tuned"),
        ),
        lookups=tuple(recorded),
    )

    assert read_record(write_record(record)) == record


# --- finding one


def test_a_record_is_found_by_the_beginning_of_its_id(cache: UserCache) -> None:
    keep(cache)
    for text in (LLAMA.id, LLAMA.id[:4]):
        found = find_record(cache, text)
        assert found is not None
        assert found.workload == LLAMA
    assert find_record(cache, "0000") is None
    assert find_record(cache, LLAMA.id[:3]) is None, "too short: it could be a word"


def test_a_word_is_first_of_all_a_name(cache: UserCache) -> None:
    keep(cache)
    keep(cache, LLAMA.id[:8])
    found = find_record(cache, LLAMA.id[:8])

    assert found is not None
    assert str(found.workload) == f"name={LLAMA.id[:8]}"


def test_the_beginning_of_two_ids(cache: UserCache) -> None:
    for digit in "01":
        cache.store(cache.workload_path(f"abcd{digit}".ljust(32, "0")), b"")
    with pytest.raises(UsageError, match="abcd is the beginning of 2 ids of workloads; give more of its digits"):
        find_record(cache, "abcd")


def test_all_records(cache: UserCache) -> None:
    assert kept_records(cache) == ()
    for name in ("b", "a"):
        keep(cache, name)
    cache.store(cache.workload_path("0" * 32), b"{}")

    assert [str(record.workload) for record in kept_records(cache)] == ["name=a", "name=b"]


# --- what is damaged

Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda d: d.update(fi_tunecache_workload=2), "workload format 2 is not 1", id="a newer format"),
        pytest.param(lambda d: d.pop("fi_tunecache_workload"), "not the record of a workload", id="no format"),
        pytest.param(lambda d: d.pop("lookups"), "not the record of a workload", id="no lookups"),
        pytest.param(lambda d: d.update(workload={}), "a workload of 0 parts", id="no parts"),
        pytest.param(
            lambda d: d.update(workload={"a": "\x1b[31m"}), "workload: a can't be", id="a part for a terminal"
        ),
        pytest.param(lambda d: d.update(workload={"a": 1}), "Expected `str`, got `int`", id="a part is a number"),
        pytest.param(lambda d: d.update(recorded="yesterday"), "matching regex", id="no time"),
        pytest.param(lambda d: d.update(environment={"gpu": "*"}), "the wildcard '*'", id="a wildcard"),
        pytest.param(lambda d: d.update(selection={"id": "x"}), "matching regex", id="no selection's id"),
        pytest.param(lambda d: d["selection"].update(policy={"a": "b"}), "measurement policy: a = 'b'", id="no policy"),
        pytest.param(lambda d: d["selection"].update(level="fuzzy"), "Invalid enum value 'fuzzy'", id="no level"),
        pytest.param(lambda d: d["selection"].update(registries=["x" * 4097]), "length <= 4096", id="a long name"),
        pytest.param(lambda d: d["lookups"].append({}), "not recorded lookups", id="no lookup"),
        pytest.param(lambda d: d["lookups"][0].update(served="magic"), "Invalid enum value 'magic'", id="no answer"),
        pytest.param(lambda d: d.update(x=json.loads("[" * 60 + "]" * 60)), "nested deeper than", id="deep"),
        pytest.param(lambda d: d.update(x=2**64), "more than 64 bits", id="a huge number"),
        pytest.param(lambda d: d.update(workload={"model": "other"}), "its id is not its name", id="another workload"),
    ],
)
def test_a_damaged_record_is_set_aside(cache: UserCache, selection: Selection, change: Change, message: str) -> None:
    path = keep(cache, selection=selection)
    document = json.loads(path.read_bytes())
    change(document)
    data = json.dumps(document).encode()
    path.write_bytes(data)

    assert find_record(cache, LLAMA) is None
    (notice,) = cache.notices
    assert message in notice
    assert notice.startswith(f"{path} was damaged")
    assert path.with_name(f"{path.name}.corrupt").read_bytes() == data
    assert keep(cache) == path
    assert find_record(cache, LLAMA) is not None


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\xef\xbb\xbf{}", b"{}" * 2])
def test_what_is_no_record(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^llama\.json: "):
        read_record(data, source="llama.json")


def test_one_that_can_not_be_read_is_as_if_not_there(cache: UserCache) -> None:
    cache.workload_path(LLAMA.id).mkdir(parents=True)

    assert find_record(cache, LLAMA) is None
    assert cache.notices == [
        f"{cache.workload_path(LLAMA.id)} can't be read (Is a directory); fix it or set FI_TUNECACHE_DIR"
    ]


def test_reading_writes_nothing(cache: UserCache) -> None:
    keep(cache)
    before = snapshot(cache.root)
    find_record(cache, LLAMA)
    kept_records(cache)

    assert snapshot(cache.root) == before


# --- publish takes it


def test_publish_reads_its_lookups(cache: UserCache, tmp_path: Path) -> None:
    answers = [Served.TUNED, Served.MEMORY, Served.FILE, Served.DEFAULT, Served.SKIPPED]
    recorded = [lookup(served, m=m + 1, raced=True) for m, served in enumerate(answers)]
    alone = tmp_path / "lookups.json"
    alone.write_bytes(write_lookups(recorded))
    questions = questions_at(keep(cache, lookups=recorded))

    assert questions == questions_at(alone) == read_questions(alone.read_bytes())
    assert [question.winner for question in questions] == [(made.TINY, 7)] * 3 + [None] * 2
    assert [question.raced for question in questions] == [True, None, None, None, None]


def test_publish_names_a_record_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "llama.json"
    path.write_text('{"fi_tunecache_workload": 1}', "utf-8")
    with pytest.raises(FormatError, match=r"llama.json: not the record of a workload"):
        questions_at(path)
