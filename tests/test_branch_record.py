"""What was last seen of a branch: kept for offline machines, and so that going back is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unprivileged import unprivileged

from fi_tunecache.branch_record import BranchRecord, advance, read_record, write_record
from fi_tunecache.errors import CacheError, IntegrityError
from fi_tunecache.user_cache import UserCache

BRANCH, FOLDER = "hf://datasets/team/tuned", "0.7.4/nvidia-h200"
FIRST, SECOND = "1" * 40, "2" * 40
RECORD = BranchRecord(BRANCH, FIRST, {FOLDER: 3, "0.7.2/nvidia-h200": 8})


@pytest.fixture
def cache(tmp_path: Path) -> UserCache:
    return UserCache(tmp_path / "cache")


def files(cache: UserCache) -> list[Path]:
    return sorted(path for path in cache.root.rglob("*") if path.is_file())


# --- keeping it


def test_a_record_is_kept_by_branch(cache: UserCache) -> None:
    other = BranchRecord(f"{BRANCH}@v1", SECOND)
    assert read_record(cache, BRANCH) is None
    write_record(cache, RECORD)
    write_record(cache, other)

    assert read_record(cache, BRANCH) == RECORD
    assert read_record(cache, other.branch) == other
    assert read_record(cache, f"{BRANCH}@v2") is None
    assert [path.parent for path in files(cache)] == [cache.root / "branches"] * 2
    assert cache.notices == []


@given(st.builds(BranchRecord, st.text(), st.text(), st.dictionaries(st.text(), st.integers(0, 2**63 - 1))))
def test_reading_and_writing_are_inverse(tmp_path_factory: pytest.TempPathFactory, record: BranchRecord) -> None:
    cache = UserCache(tmp_path_factory.getbasetemp() / "records")
    write_record(cache, record)
    assert read_record(cache, record.branch) == record


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"branch":"hf', id="truncated"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b'{"branch":1,"commit":2}', id="numbers"),
        pytest.param(b'{"branch":"a","commit":"b","serials":{"c":"d"}}', id="a serial that is no number"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_a_damaged_record_is_set_aside(cache: UserCache, content: bytes) -> None:
    write_record(cache, RECORD)
    (path,) = files(cache)
    path.write_bytes(content)

    assert read_record(cache, BRANCH) is None
    assert [item.name for item in files(cache)] == [f"{path.name}.corrupt"]
    (notice,) = cache.notices
    assert notice.startswith(f"{path} was damaged (")
    write_record(cache, RECORD)
    assert read_record(cache, BRANCH) == RECORD


def test_a_record_in_the_place_of_another_is_as_if_not_there(cache: UserCache) -> None:
    write_record(cache, RECORD)
    (path,) = files(cache)
    path.write_bytes(b'{"branch":"another","commit":"%s"}' % SECOND.encode())
    assert read_record(cache, BRANCH) is None


def test_a_record_that_can_not_be_read_is_as_if_not_there(cache: UserCache) -> None:
    write_record(cache, RECORD)
    (path,) = files(cache)
    path.unlink()
    path.mkdir()
    assert read_record(cache, BRANCH) is None
    assert cache.notices == [f"{path} can't be read (Is a directory); fix it or set FI_TUNECACHE_DIR"]


def test_a_cache_that_can_not_be_written(shared_path: Path) -> None:
    with unprivileged(), pytest.raises(CacheError, match=r"can't be written \(Permission denied"):
        write_record(UserCache(shared_path), RECORD)


# --- noticing what goes back


@pytest.mark.parametrize(
    ("seen", "serial"),
    [
        pytest.param(None, 0, id="nothing was seen, of an old registry"),
        pytest.param(None, 7, id="nothing was seen"),
        pytest.param(3, 3, id="no change: another folder's"),
        pytest.param(3, 4, id="a change"),
        pytest.param(3, 30, id="many"),
    ],
)
def test_going_on(cache: UserCache, seen: int | None, serial: int) -> None:
    if seen is not None:
        write_record(cache, BranchRecord(BRANCH, FIRST, {FOLDER: seen, "other": 5}))
    before = read_record(cache, BRANCH)

    record = advance(cache, BRANCH, SECOND, FOLDER, serial)
    assert (record.branch, record.commit, record.serials[FOLDER]) == (BRANCH, SECOND, serial)
    assert record.serials.get("other") == (None if seen is None else 5), "what is known of other folders stays"
    assert read_record(cache, BRANCH) == before, "it is not stored yet"


@pytest.mark.parametrize("serial", [0, 2])
def test_going_back_is_refused(cache: UserCache, serial: int) -> None:
    write_record(cache, RECORD)
    with pytest.raises(IntegrityError) as caught:
        advance(cache, BRANCH, SECOND, FOLDER, serial)
    assert str(caught.value) == (
        f"{BRANCH}/{FOLDER}: its manifest has gone back from change 3, seen before, to {serial}; "
        "ask the publisher why; --allow-rollback takes it, and a commit after @ pins one"
    )
    assert (caught.value.expected, caught.value.actual) == ("3", str(serial))


def test_going_back_is_taken_where_that_is_asked_for(cache: UserCache) -> None:
    write_record(cache, RECORD)
    record = advance(cache, BRANCH, SECOND, FOLDER, 1, allow_rollback=True)
    assert record == BranchRecord(BRANCH, SECOND, {**RECORD.serials, FOLDER: 1})
    write_record(cache, record)
    assert advance(cache, BRANCH, SECOND, FOLDER, 1) == record
