"""One entry of FlashInfer's managed store, as the content and the name of its file.

Format: ``ManagedAutotuneCache.publish``, ``lookup`` and ``preload``, ``flashinfer/autotune_cache.py``,
0.7.0 to 0.7.4; protocol records: ``flashinfer/autotuner/protocol.py``, 0.7.4.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from .bundle import MARK
from .entry import Entry, read_policy, read_tactic, tactic_json
from .errors import FormatError
from .json_document import decode_json, naming
from .key import MAX_KEY_BYTES, MAX_NESTING, Dtype, Extra, Key, parse_extras

__all__ = [
    "MAX_ENTRY_BYTES",
    "MAX_ENTRY_NESTING",
    "ProtocolRecord",
    "decode_key_fields",
    "encode_key_fields",
    "entry_file",
    "entry_file_name",
    "json_bytes",
    "read_entry",
    "record_file",
]

MAX_ENTRY_BYTES = 64 * 1024 + MAX_KEY_BYTES
MAX_ENTRY_NESTING = 2 * (MAX_NESTING + 2) + 1  # every tuple of key_fields is a list in an object

_PROTOCOL = "__protocol__"
_TUPLE, _DTYPE = "__tuple__", "__dtype__"


class ProtocolRecord(Struct, frozen=True):
    """The result of an operation that tunes itself (FlashInfer 0.7.4 and newer).

    ``value`` is that operation's own JSON, which nobody else interprets. ``mark`` as in an entry.
    """

    namespace: str
    key: str
    value: Any
    mark: Any = None

    @property
    def fields(self) -> tuple[str, str, str]:
        """What takes the place of a key's four fields; its ``str()`` is the key."""
        return (_PROTOCOL, self.namespace, self.key)


def entry_file_name(key_text: str) -> str:
    """The name of an entry's file, as FlashInfer computes it from the key's text."""
    return f"{hashlib.sha256(key_text.encode()).hexdigest()[:24]}.json"


def encode_key_fields(fields: Extra) -> Any:
    """The JSON form of a key's fields: ``{"__tuple__": [...]}``, ``{"__dtype__": "bfloat16"}``."""
    if isinstance(fields, Dtype):
        return {_DTYPE: fields.name}
    if isinstance(fields, tuple):
        return {_TUPLE: [encode_key_fields(item) for item in fields]}
    return [encode_key_fields(item) for item in fields] if isinstance(fields, list) else fields


def decode_key_fields(value: object) -> Extra:
    """The inverse of :func:`encode_key_fields`. Raises FormatError for anything it does not give."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [decode_key_fields(item) for item in value]
    match value:
        case {"__tuple__": [*items], **others} if not others:
            return tuple(decode_key_fields(item) for item in items)
        case {"__dtype__": str(name), **others} if not others and name.isidentifier():
            return Dtype(name)
    raise FormatError(f"key_fields hold what FlashInfer does not write: {str(value)[:80]}")


def read_entry(data: bytes, file_name: str, *, source: str = "") -> Entry | ProtocolRecord:
    """Read one entry's file.

    A mark of ours (the field ``fi_tunecache``) stands in ``Entry.selection`` under that name, as
    it does in a v1 file. Other fields that FlashInfer ignores are dropped.

    Parameters
    ----------
    data
        The file's content, at most 72 KiB.
    file_name
        FlashInfer finds an entry only under the hash of its key.
    source
        Named in the error.

    Raises
    ------
    FormatError
        Malformed, under another name than its key's, ``key_fields`` that disagree with the key
        (FlashInfer would not preload it), or a record in another namespace than its key's.
    """
    document = decode_json(data, max_bytes=MAX_ENTRY_BYTES, max_nesting=MAX_ENTRY_NESTING, source=source)
    with naming(source):
        match document:
            case {"key": str(text), "runner": str(runner), "tactic": tactic, **others}:
                pass
            case _:
                raise FormatError("not an entry: key, runner or tactic is missing", "remove it")
        if file_name != (expected := entry_file_name(text)):
            raise FormatError(f"FlashInfer looks for this key in {expected}: {text[:120]}", "remove it")
        if (fields := others.get("key_fields")) is not None:
            decoded = decode_key_fields(fields)
            if not isinstance(decoded, tuple) or str(decoded) != text:
                raise FormatError(f"key_fields name another key than {text[:120]}", "remove it")
        mark = others.get(MARK)
        if text.startswith(f"('{_PROTOCOL}', "):
            return _read_record(text, runner, tactic, mark)
        policy = others.get("profiling_policy")
        return Entry(
            key=Key.parse(text),
            runner=runner,
            tactic=read_tactic(tactic),
            policy=None if policy is None else read_policy(policy),
            selection=None if mark is None else {MARK: mark},
        )


def _read_record(text: str, runner: str, value: object, mark: object) -> ProtocolRecord:
    match parse_extras(text) if len(text) <= MAX_KEY_BYTES else None:
        case (_, str(namespace), str(key)) if namespace == runner != "":
            return ProtocolRecord(namespace, key, value, mark)
    raise FormatError(f"not the key of a record in the namespace {runner[:80]!r}: {text[:120]}", "remove it")


def entry_file(entry: Entry, mark: str | None) -> tuple[str, bytes]:
    """Name and content of an entry's file; ``mark``, if given, takes the place of the entry's own."""
    key = entry.key
    fields: tuple[Extra, ...] = (key.custom_op, key.runner, key.profile, key.extras)
    document = {"key": key.text, "runner": entry.runner, "tactic": tactic_json(entry.tactic)}
    if entry.policy is not None:
        document["profiling_policy"] = list(entry.policy)
    return _file(document, fields, mark or (entry.selection or {}).get(MARK))


def record_file(record: ProtocolRecord, mark: str | None) -> tuple[str, bytes]:
    """Name and content of a record's file; ``mark`` as for :func:`entry_file`."""
    document = {"key": str(record.fields), "runner": record.namespace, "tactic": record.value}
    return _file(document, record.fields, mark or record.mark)


def _file(document: dict[str, Any], fields: tuple[Extra, ...], mark: object) -> tuple[str, bytes]:
    document["key_fields"] = encode_key_fields(fields)
    if mark is not None:
        document[MARK] = mark
    return entry_file_name(document["key"]), json_bytes(document)


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """JSON as FlashInfer lays it out in a store. Raises FormatError for what JSON has no form for."""
    try:
        return json.dumps(document, sort_keys=True, indent=2, allow_nan=False).encode("ascii")
    except (TypeError, ValueError) as error:
        raise FormatError(f"JSON has no form for what an entry is to hold ({error})") from None
