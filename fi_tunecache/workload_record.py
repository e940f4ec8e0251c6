"""What was looked up while a workload was served, kept in the user cache; a newer record replaces the older.

``fi-tunecache publish --lookups`` takes such a file as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from . import __version__
from .environment import Environment
from .errors import FormatError, UsageError
from .json_document import decode_json, naming
from .match_level import MatchLevel
from .measurement_policy import MeasurementPolicy
from .recorded_lookup import MAX_LOOKUPS_BYTES, MAX_LOOKUPS_NESTING, RecordedLookup, lookup_json, lookups_from
from .registry_tree import registry_names
from .retrieval import cached
from .selection import Request, Selection
from .user_cache import UserCache
from .workload import Workload

__all__ = [
    "RECORD_FORMAT",
    "RecordedSelection",
    "WorkloadRecord",
    "find_record",
    "forget_workload",
    "is_record",
    "keep_workload",
    "kept_records",
    "read_record",
    "write_record",
]

RECORD_FORMAT = 1
_MARK = "fi_tunecache_workload"
_AGAIN = "record the workload again"
_ID_PREFIX = re.compile(r"[0-9a-f]{4,32}")

_Line = Annotated[str, msgspec.Meta(max_length=4096)]


class RecordedSelection(Struct, frozen=True, kw_only=True):
    """The selection that was there when the lookups were recorded; ``registries`` in order of precedence."""

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    level: MatchLevel
    policy: dict[str, str]
    registries: tuple[_Line, ...]

    @classmethod
    def of(cls, selection: Selection) -> RecordedSelection:
        return cls(
            id=selection.id,
            digest=selection.digest,
            level=selection.level,
            policy=selection.policy,
            registries=tuple(name for name, _ in selection.registries),
        )


class WorkloadRecord(Struct, frozen=True, kw_only=True):
    """The lookups of a workload, and where and when (UTC, ISO 8601) they were recorded."""

    workload: Workload
    tool: str
    recorded: str
    environment: Environment
    selection: RecordedSelection | None
    lookups: tuple[RecordedLookup, ...]


class _Format(Struct, frozen=True):
    format: int = msgspec.field(name=_MARK)


class _Stored(Struct, frozen=True, kw_only=True):
    workload: dict[str, str]
    tool: _Line
    recorded: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    environment: dict[str, str]
    selection: RecordedSelection | None
    lookups: list[Any]


def is_record(document: object) -> bool:
    """Whether decoded JSON claims to be the record of a workload."""
    return isinstance(document, dict) and _MARK in document


def write_record(record: WorkloadRecord) -> bytes:
    """The bytes of a record's file. Raises FormatError for a key that FlashInfer could not read back."""
    return msgspec.json.encode(
        {
            _MARK: RECORD_FORMAT,
            "workload": dict(record.workload.parts),
            "tool": record.tool,
            "recorded": record.recorded,
            "environment": record.environment.metadata(),
            "selection": record.selection,
            "lookups": [lookup_json(lookup) for lookup in record.lookups],
        }
    )


def read_record(data: bytes, *, source: str = "") -> WorkloadRecord:
    """The inverse of :func:`write_record`. Raises FormatError for anything else, or a newer format."""
    document = decode_json(data, max_bytes=MAX_LOOKUPS_BYTES, max_nesting=MAX_LOOKUPS_NESTING, source=source)
    with naming(source):
        try:
            found = msgspec.convert(document, _Format).format
            if found != RECORD_FORMAT:
                raise FormatError(f"workload format {found} is not {RECORD_FORMAT}", _AGAIN)
            stored = msgspec.convert(document, _Stored)
            workload = Workload.of(stored.workload)
        except msgspec.ValidationError as error:
            raise FormatError(f"not the record of a workload ({error})", _AGAIN) from None
        except UsageError as error:
            raise FormatError(error.problem, _AGAIN) from None
        if stored.selection is not None:
            MeasurementPolicy.from_fields(stored.selection.policy)
        return WorkloadRecord(
            workload=workload,
            tool=stored.tool,
            recorded=stored.recorded,
            environment=Environment.from_metadata(stored.environment),
            selection=stored.selection,
            lookups=lookups_from(stored.lookups),
        )


def keep_workload(
    parts: Workload | Mapping[str, str | int] | str,
    lookups: Iterable[RecordedLookup],
    *,
    environment: Environment,
    selection: Selection | None,
    cache: UserCache | None = None,
) -> Path:
    """Keep what was looked up while a workload was served, in the place of an older record of it.

    Parameters
    ----------
    parts
        What is served; see :class:`~fi_tunecache.workload.Workload`. Ranks that look up different things are
        different workloads: give each a part of its own.
    lookups
        Several outcomes of one question in the order in which each was first seen.
    environment
        The facts as FlashInfer found them.
    selection
        The one that was in use. None if none was: then the one is noted that the cache has for this environment, if
        any (a file or a store may have been made from it), so that a change of it is noticed.
    cache
        By default the user's.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    UsageError
        Parts that can't name a workload, or a variable that makes no sense.
    FormatError
        A lookup that could not be read back.
    CacheError
        The cache can't be written.
    """
    cache = cache or UserCache.locate()
    if selection is None:
        registries = registry_names((), os.environ)
        level = MatchLevel.in_use(None, os.environ)
        held = cached(Request(environment=environment, registries=registries, level=level), cache)
        selection = None if held is None else held.selection
    record = WorkloadRecord(
        workload=Workload.of(parts),
        tool=f"fi-tunecache {__version__}",
        recorded=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        environment=environment,
        selection=None if selection is None else RecordedSelection.of(selection),
        lookups=tuple(lookups),
    )
    data = write_record(record)
    read_record(data)
    path = cache.workload_path(record.workload.id)
    cache.store(path, data)
    return path


def forget_workload(parts: Workload | Mapping[str, str | int] | str, cache: UserCache | None = None) -> None:
    """Remove the record of a workload, if there is one: what it says is no longer known. Raises CacheError."""
    (cache or UserCache.locate()).remove_workload(Workload.of(parts).id)


def find_record(cache: UserCache, workload: Workload | Mapping[str, str | int] | str) -> WorkloadRecord | None:
    """The record of a workload; None if there is none.

    A text may also be an id, or at least four digits at its beginning. A damaged record is set aside, one that
    can't be read is as if not there; ``cache.notices`` tells it.

    Raises UsageError for what can't name a workload, and where several have ids that begin so.
    """
    wanted = Workload.of(workload)
    found = _read(cache, cache.workload_path(wanted.id))
    if found is not None or not isinstance(workload, str) or not _ID_PREFIX.fullmatch(workload):
        return found
    paths = [path for path in _paths(cache) if path.name.startswith(workload)]
    if len(paths) > 1:
        raise UsageError(f"{workload} is the beginning of {len(paths)} ids of workloads", "give more of its digits")
    return _read(cache, paths[0]) if paths else None


def kept_records(cache: UserCache) -> tuple[WorkloadRecord, ...]:
    """All records that can be read, sorted by workload."""
    records = [record for path in _paths(cache) if (record := _read(cache, path)) is not None]
    return tuple(sorted(records, key=lambda record: str(record.workload)))


def _paths(cache: UserCache) -> list[Path]:
    return [file.path for file in cache.files() if file.kind == "workloads" and file.path.suffix == ".json"]


def _read(cache: UserCache, path: Path) -> WorkloadRecord | None:
    def parse(data: bytes) -> WorkloadRecord:
        record = read_record(data)
        if record.workload.id != path.stem:
            raise FormatError("its id is not its name")
        return record

    return cache.read_parsed(path, parse)
