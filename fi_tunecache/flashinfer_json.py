"""FlashInfer's v1 cache file: one flat JSON object of entries, with the environment beside them.

Format: ``AutoTuner.save_configs`` and ``load_configs``, ``flashinfer/autotuner/autotuner.py``,
0.6.7 to 0.7.4. ``_metadata``, ``_records`` and ``_generation`` are fields; every other name is a
key, its value ``[runner, tactic]``, from 0.7.1 on with the policy and from 0.7.4 on with the
selection after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from sys import intern
from typing import Any

from msgspec import Struct

from .entry import Entry, LegacyEntry, ProfilingPolicy, Tactic, read_policy, read_tactic, tactic_json
from .environment import Environment
from .errors import FormatError
from .json_document import decode_json, naming
from .key import MAX_NESTING, Key, is_legacy_key
from .wording import count_entries

__all__ = ["MAX_ENTRIES", "MAX_FILE_BYTES", "CacheFile", "Limits", "read_cache_file", "write_cache_file"]

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_ENTRIES = 100_000
_MAX_FILE_NESTING = MAX_NESTING + 2  # a tactic lies in a value in the object

_METADATA, _RECORDS, _GENERATION = "_metadata", "_records", "_generation"
_FIELDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    _METADATA: (dict, "an object"),
    _RECORDS: (dict, "an object"),
    _GENERATION: ((str, type(None)), "a string"),
}


class Limits(Struct, frozen=True):
    """How large a file may be, in bytes and in entries, before it is refused unread."""

    bytes: int
    entries: int


FILE_LIMITS = Limits(MAX_FILE_BYTES, MAX_ENTRIES)


class CacheFile(Struct, frozen=True):
    """What one v1 file says.

    ``metadata`` is None where the file has none (FlashInfer takes such a file on every machine).
    ``records`` are other products' (``_records``), passed through unread. ``generation`` is by
    what FlashInfer notices that another process has written the file; it is not needed. An entry
    may name another runner than its key: FlashInfer loads it and never serves it.
    """

    entries: tuple[Entry, ...]
    metadata: Mapping[str, Any] | None = None
    records: Mapping[str, Any] = {}
    generation: str | None = None
    legacy: tuple[LegacyEntry, ...] = ()

    def environment(self, source: str = "") -> Environment:
        """Where the entries were tuned, from the metadata.

        Raises
        ------
        FormatError
            No metadata, the wildcard ``*``, or a fact that is none.
        """
        if self.metadata is None:
            raise FormatError("no _metadata: nobody can say where it was tuned", "tune again", source=source)
        return Environment.from_metadata(self.metadata, source=source)


def read_cache_file(data: bytes, *, source: str = "", limits: Limits = FILE_LIMITS) -> CacheFile:
    """Read a v1 file; the inverse of :func:`write_cache_file`.

    Does not judge the metadata (:meth:`CacheFile.environment` does) nor whether FlashInfer would
    serve an entry. Does not repair: a file with one bad entry is refused.

    Parameters
    ----------
    data
        At most 64 MiB, 100,000 entries, nesting 18, integers of 64 bits, finite floats.
    source
        Named in the error: a path or a registry object.

    Raises
    ------
    FormatError
        With the reason. Some of what is refused FlashInfer would load, but never write: a policy
        that is not a list of scalars, a selection that is not an object, a fifth element, a field
        that is not known.
    """
    document = decode_json(data, max_bytes=limits.bytes, max_nesting=_MAX_FILE_NESTING, source=source)
    with naming(source):
        if not isinstance(document, dict):
            raise FormatError(f"a JSON {type(document).__name__}, not an object of entries", "name a v1 cache file")
        fields = {name: document.pop(name) for name in _FIELDS if name in document}
        for name, value in fields.items():
            kind, word = _FIELDS[name]
            if not isinstance(value, kind):
                raise FormatError(f"{name} is a {type(value).__name__}, not {word}", "tune again, or mend the file")
        if unknown := [name[:80] for name in document if name.startswith("_")]:
            raise FormatError(f"{unknown[0]} is not a field that is known", "upgrade fi-tunecache")
        if len(document) > limits.entries:
            raise FormatError(f"{len(document)} entries are more than {limits.entries}", "split the file")
        entries: list[Entry] = []
        legacy: list[LegacyEntry] = []
        policies: dict[str, ProfilingPolicy] = {}
        for text, value in document.items():
            try:
                runner, tactic, policy, selection = _read_value(value, policies)
            except FormatError as error:
                raise FormatError(f"{error.problem}, at {text[:120]}", error.next_step or "remove the entry") from None
            try:
                key = Key.parse(text)
            except FormatError as error:
                if not is_legacy_key(text):
                    raise FormatError(error.problem, error.next_step or "remove the entry") from None
                legacy.append(LegacyEntry(text, runner, tactic))
            else:
                entries.append(Entry(key, intern(runner), tactic, policy, selection))
    return CacheFile(
        entries=tuple(entries),
        metadata=fields.get(_METADATA),
        records=fields.get(_RECORDS, {}),
        generation=fields.get(_GENERATION),
        legacy=tuple(legacy),
    )


def _read_value(
    value: object, policies: dict[str, ProfilingPolicy]
) -> tuple[str, Tactic, ProfilingPolicy | None, dict[str, Any] | None]:
    if not isinstance(value, list) or len(value) < 2 or not isinstance(value[0], str):
        raise FormatError("a value is not a list of runner and tactic", "tune again, or remove the entry")
    tactic = read_tactic(value[1])
    if len(value) == 2:
        return value[0], tactic, None, None
    written = repr(value[2])  # most entries share a handful of policies
    policy = policies.get(written)
    if policy is None:
        policy = policies[written] = read_policy(value[2])
    if len(value) == 3:
        return value[0], tactic, policy, None
    if len(value) > 4:
        raise FormatError(f"a value has {len(value)} elements; four are known", "upgrade fi-tunecache")
    if not isinstance(value[3], dict):
        raise FormatError(f"a selection is a {type(value[3]).__name__}, not an object", "tune again")
    return value[0], tactic, policy, value[3]


def write_cache_file(cache_file: CacheFile, *, limits: Limits = FILE_LIMITS) -> bytes:
    """The canonical bytes of a v1 file: names sorted, no spaces, one content, one sequence of bytes.

    ASCII, because FlashInfer opens the file in the encoding of its locale. ``generation`` is
    written as it is: leave it out where the content has changed.

    Raises
    ------
    FormatError
        What FlashInfer would take on every machine (no metadata, a wildcard), what it could not
        read back (a selection without a policy: it takes the third element for the policy and
        fails on ``null``), what would be lost (legacy entries, two entries with one key), what
        :func:`read_cache_file` refuses for its size, or what JSON has no form for.
    """
    if cache_file.legacy:
        raise FormatError(
            f"{count_entries(len(cache_file.legacy))} with keys without extras would be lost",
            f"leave them out: {LegacyEntry.STATEMENT}",
        )
    if len(cache_file.entries) > limits.entries:
        raise FormatError(f"{len(cache_file.entries)} entries are more than {limits.entries}", "write several files")
    cache_file.environment()
    document: dict[str, Any] = {_METADATA: dict(cache_file.metadata or {})}
    if cache_file.records:
        document[_RECORDS] = dict(cache_file.records)
    if cache_file.generation is not None:
        document[_GENERATION] = cache_file.generation
    for entry in cache_file.entries:
        if entry.key.text in document:
            raise FormatError(f"two entries for {entry.key.text[:120]}", "keep one of them")
        document[entry.key.text] = _value(entry)
    try:
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise FormatError(f"JSON has no form for what the file is to hold ({error})") from None
    if len(text) > limits.bytes:
        raise FormatError(f"{len(text)} bytes are more than {limits.bytes}", "write several files")
    return text.encode("ascii")


def _value(entry: Entry) -> list[Any]:
    value: list[Any] = [entry.runner, tactic_json(entry.tactic)]
    if entry.policy is not None:
        value.append(entry.policy)
    elif entry.selection is not None:
        raise FormatError(f"a selection without a policy, at {entry.key.text[:120]}", "keep both or neither")
    if entry.selection is not None:
        value.append(dict(entry.selection))
    return value
