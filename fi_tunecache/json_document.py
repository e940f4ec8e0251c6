"""JSON from outside: decoded within limits, or refused with one line that names its source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from .errors import FormatError

__all__ = ["INT64", "MAX_CONTAINERS", "decode_json", "naming", "repeated_names"]

MAX_CONTAINERS = 3_000_000
"""Of 100,000 entries each may have thirty; without a limit 64 MiB of empty lists would take 2 GB."""

INT64 = range(-(2**63), 2**63)
"""The integers that a file may hold."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_decoder = msgspec.json.Decoder()


def decode_json(data: bytes, *, max_bytes: int, max_nesting: int, source: str = "") -> object:
    """Decode one JSON document. Does not look at what it means.

    Stricter than the ``json`` module that FlashInfer uses: no ``NaN`` or ``Infinity``, no float
    that overflows, no lone surrogate. Of two equal names in an object the last one counts, as there.

    Parameters
    ----------
    data
        UTF-8 without byte order mark.
    max_bytes
        Limit of ``len(data)``, checked before anything is parsed.
    max_nesting
        How many lists and objects may lie within each other.
    source
        Named in the error.

    Raises
    ------
    FormatError
        Not exactly one JSON document, or beyond a limit; integers have 64 bits.
    """
    with naming(source):
        if len(data) > max_bytes:
            raise FormatError(f"{len(data)} bytes are more than {max_bytes}", "split it, or check what wrote it")
        if not data:
            raise FormatError("the file is empty", "remove it; whatever wrote it did not finish")
        if data.startswith(_BYTE_ORDER_MARK):
            raise FormatError("starts with a byte order mark", "save it as UTF-8 without one")
        if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
            raise FormatError(f"more than {MAX_CONTAINERS} lists and objects", "no FlashInfer writes that")
        try:
            document = _decoder.decode(data)
        except msgspec.DecodeError as error:
            raise FormatError(f"not a JSON document ({error})", "fetch or write it again") from None
        except RecursionError:
            raise _too_deep(max_nesting) from None
        _check_limits(document, max_nesting)
        return document


def repeated_names(data: bytes) -> tuple[str, ...]:
    """Names that stand twice in one object of a document that :func:`decode_json` accepts, each once.

    Of two equal names every reader of JSON takes the last, so nobody would notice the other.
    """
    repeated: dict[str, None] = {}

    def look(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            repeated.update(dict.fromkeys(name for name, count in counts.items() if count > 1))

    json.loads(data, object_pairs_hook=look)
    return tuple(repeated)


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Name the source in every FormatError that does not name one yet."""
    try:
        yield
    except FormatError as error:
        if error.source or not source:
            raise
        raise FormatError(error.problem, error.next_step, source=source) from None


def _too_deep(max_nesting: int) -> FormatError:
    return FormatError(f"nested deeper than {max_nesting}", "no FlashInfer writes that: check what did")


def _check_limits(document: object, max_nesting: int) -> None:
    """Level by level, so that no document can exhaust the stack."""
    level: list[Any] = [[document]]
    for _ in range(max_nesting + 1):
        below: list[Any] = []
        for container in level:
            for value in container.values() if type(container) is dict else container:
                kind = type(value)
                if kind is dict or kind is list:
                    below.append(value)
                elif kind is int and value not in INT64:
                    raise FormatError("holds an integer of more than 64 bits", "no FlashInfer writes that")
        if not below:
            return
        level = below
    raise _too_deep(max_nesting)
