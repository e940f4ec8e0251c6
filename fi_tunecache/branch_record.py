"""What was last seen of a branch: its commit, and how far the manifests of its folders had come.

By it an offline machine knows what to read, and a registry that goes back to an older state is noticed.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

from .errors import CacheError, IntegrityError
from .user_cache import UserCache

__all__ = ["BranchRecord", "advance", "read_record", "write_record"]


class BranchRecord(Struct, frozen=True):
    """``branch`` is a registry's name, ``serials`` those of the manifests that were read, by folder."""

    branch: str
    commit: str
    serials: dict[str, int] = {}


def _name(branch: str) -> str:
    return hashlib.sha256(branch.encode()).hexdigest()[:32]


def read_record(cache: UserCache, branch: str) -> BranchRecord | None:
    """None where there is none; one that is damaged or of another branch is as if not there."""
    path = cache.branch_path(_name(branch))
    try:
        data = cache.read(path)
        if data is None:
            return None
        record = msgspec.json.decode(data, type=BranchRecord)
    except CacheError as error:
        cache.notice(str(error))
        return None
    except (msgspec.DecodeError, RecursionError) as error:
        cache.set_aside(path, str(error))
        return None
    return record if record.branch == branch else None


def write_record(cache: UserCache, record: BranchRecord) -> None:
    """Keep a record. Raises CacheError where the cache can't be written."""
    cache.store(cache.branch_path(_name(record.branch)), msgspec.json.encode(record, order="sorted"))


def advance(
    cache: UserCache, branch: str, commit: str, folder: str, serial: int, *, allow_rollback: bool = False
) -> BranchRecord:
    """The record after a folder's manifest was read at a commit; it is not stored yet.

    Raises IntegrityError where the manifest is older than one that was seen before, unless that is allowed:
    a yank may be undone that way by whoever can rewind a branch, or a mirror may be behind.
    """
    record = read_record(cache, branch) or BranchRecord(branch, commit)
    seen = record.serials.get(folder, 0)
    if serial < seen and not allow_rollback:
        raise IntegrityError(
            f"its manifest has gone back from change {seen}, seen before, to {serial}",
            "ask the publisher why; --allow-rollback takes it, and a commit after @ pins one",
            source=f"{branch}/{folder}",
            expected=str(seen),
            actual=str(serial),
        )
    return BranchRecord(branch, commit, {**record.serials, folder: serial})
