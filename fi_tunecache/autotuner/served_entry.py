"""The entries of a selection in the form in which FlashInfer holds those of a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from ..bundle import MARK
from ..entry import ProfilingPolicy, Tactic
from ..errors import FormatError
from ..selection import Selection

__all__ = ["ServedEntry", "Unusable", "own_entries", "served_entries", "shape_of"]

_KEY = re.compile(r"\('([^']+)', '([^']+)', (\((?:\([-\d, ]*\)(?:, )?)*,?\)), ")
"""The op, the runner and the profile at the beginning of a key's text. A selection's keys were checked when
it was made; of FlashInfer's own only those that begin so can be rivals of one of ours."""


class ServedEntry(Struct, frozen=True, gc=False):
    """``raced`` tells whether FlashInfer's default took part in the race; ``selection`` is the fourth element, with
    our mark, None where there is no room for one."""

    runner: str
    tactic: Tactic
    policy: ProfilingPolicy | None
    selection: dict[str, Any] | None
    raced: bool


def shape_of(key: str) -> tuple[str, str] | None:
    """The op and the profile of a key's text: keys that share them are rivals in a lookup."""
    match = _KEY.match(key)
    return None if match is None else (match[1], match[3])


Unusable: TypeAlias = Callable[[str, str, str, Tactic], bool]
"""Tells of a bundle, an op, a runner and a tactic whether the tactic may not be used in this process."""


def served_entries(selection: Selection, data: bytes, unusable: Unusable | None = None) -> dict[str, ServedEntry]:
    """Read the entries of a selection file, by the text of their keys.

    What it holds is not checked again: :func:`~fi_tunecache.selection.read_selection` has found the file whole.

    Parameters
    ----------
    selection, data
        What the file says of itself, and its bytes.
    unusable
        Where it says so of an entry, nothing is served for that op and profile: what is left could be the answer to
        another lookup.
    """
    raced = {bundle.bundle_id: bundle.default_raced is True for bundle in selection.bundles}
    only = selection.bundles[0].bundle_id if selection.bundles else ""
    entries: dict[str, ServedEntry] = {}
    refused: set[tuple[str, str] | None] = set()
    for key, value in msgspec.json.decode(data).items():
        if key[:1] != "(":
            continue
        runner, tactic, *rest = value
        policy = tuple(rest[0]) if rest else None
        chosen = rest[1] if len(rest) > 1 else None
        bundle = chosen[MARK] if chosen else selection.marks.get(key, only)
        entries[key] = ServedEntry(runner, _tactic(tactic), policy, chosen, raced[bundle])
        if unusable is not None:
            shape = shape_of(key)
            if shape is not None and unusable(bundle, shape[0], runner, entries[key].tactic):
                refused.add(shape)
    if len(entries) != selection.entries:
        raise FormatError(f"a selection of {selection.entries} entries holds {len(entries)}", "pull again")
    return {key: entry for key, entry in entries.items() if shape_of(key) not in refused} if refused else entries


def own_entries(path: str | PathLike[str]) -> dict[str, str]:
    """The runners of the entries in a v1 file that do not bear our mark, by key; none where it is no such file."""
    try:
        document = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError):
        return {}
    if not isinstance(document, dict):
        return {}
    entries = {key: value for key, value in document.items() if key[:1] == "(" and isinstance(value, list) and value}
    return {key: str(value[0]) for key, value in entries.items() if not _is_marked(value)}


def _is_marked(value: list[Any]) -> bool:
    return len(value) > 3 and isinstance(value[3], dict) and MARK in value[3]


def _tactic(value: Any) -> Tactic:
    return tuple(map(_tactic, value)) if isinstance(value, list) else value
