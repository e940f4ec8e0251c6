"""From a resolution to files: the selection in the user cache, and a v1 file that FlashInfer loads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

import msgspec

from . import __version__
from .bundle import MARK
from .entry import Entry
from .environment import Environment
from .errors import UsageError
from .flashinfer_json import CacheFile, Limits, read_cache_file, write_cache_file
from .selection import (
    BLANK_DIGEST,
    SELECTION_FORMAT,
    OtherLevel,
    Request,
    Selection,
    SelectionBundle,
    replace_digest,
)
from .verdict import Candidate, Resolution

__all__ = ["materialise", "resolution_json", "stamped", "store_entries"]

_LIMITS = Limits(bytes=2**30, entries=2_000_000)
"""A selection may hold the entries of many bundles, each of which was within its own limits."""


def materialise(
    request: Request,
    candidates: Iterable[Candidate],
    asked: Resolution,
    other: Resolution,
    revisions: tuple[tuple[str, str | None], ...],
) -> tuple[Selection, bytes]:
    """Make the selection file for a resolution.

    Parameters
    ----------
    candidates
        Those that the resolutions are about.
    asked, other
        The resolution at the request's match level and at the other one.
    revisions
        (registry, revision) in order of precedence.
    """
    candidates = tuple(candidates)
    rows = {candidate.row.bundle_id: candidate.row for candidate in candidates}
    bundles = {candidate.row.bundle_id: candidate.bundle for candidate in candidates}
    selection = Selection(
        format=SELECTION_FORMAT,
        id=request.selection_id,
        tool=f"fi-tunecache {__version__}",
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        gpu=request.environment.gpu or "",
        flashinfer_version=request.environment.flashinfer_version or "",
        level=request.level,
        policy=request.policy.manifest_fields(),
        registries=revisions,
        bundles=tuple(
            SelectionBundle(
                bundle_id=verdict.bundle_id,
                sha256=rows[verdict.bundle_id].sha256,
                registry=verdict.registry,
                entries=verdict.taken,
                default_raced=rows[verdict.bundle_id].default_raced,
                mapped_cublas=bundle.provenance.mapped_cublas if (bundle := bundles[verdict.bundle_id]) else None,
            )
            for verdict in asked.used
        ),
        entries=len(asked.chosen),
        other_level=OtherLevel(other.level, len(other.chosen), len(other.used)),
        marks={text: chosen.bundle_id for text, chosen in asked.chosen.items() if chosen.entry.policy is None}
        if len(asked.used) > 1
        else {},
    )
    entries = [_marked(chosen.entry, chosen.bundle_id) for chosen in asked.chosen.values()]
    facts = {name: value for name, value in request.environment.identity().items() if value is not None}
    blank = write_cache_file(_cache_file(entries, {**facts, MARK: msgspec.to_builtins(selection)}), limits=_LIMITS)
    digest = hashlib.sha256(blank).hexdigest()
    return msgspec.structs.replace(selection, digest=digest), replace_digest(blank, BLANK_DIGEST, digest)


def _marked(entry: Entry, bundle_id: str) -> Entry:
    """Name the bundle in the fourth element. An entry without a policy has no room for one (FlashInfer reads
    the third element as a tuple); such a file is marked in its metadata alone."""
    if entry.policy is None:
        return entry
    return msgspec.structs.replace(entry, selection={**(entry.selection or {}), MARK: bundle_id})


def store_entries(selection: Selection, data: bytes, *, only_raced: bool) -> tuple[Entry, ...]:
    """The entries of a selection file for a managed store, each marked with its bundle; ``data`` are the file's bytes.

    An entry that FlashInfer's default did not race has no policy there: such a one is served in replay, and timed
    again where FlashInfer tunes, which it does in a store's context with the default among the candidates
    (``flashinfer/autotuner/autotuner.py``, 0.7.2 to 0.7.4: ``require_profiling_policy``). FlashInfer before 0.7.4 then
    leaves it beside the winner, and may serve it in its place: for those, ``only_raced`` leaves such entries out.
    """
    raced = {bundle.bundle_id: bundle.default_raced is True for bundle in selection.bundles}
    only = selection.bundles[0].bundle_id
    found = []
    for entry in read_cache_file(data, source="selection", limits=_LIMITS).entries:
        bundle = (entry.selection or {}).get(MARK) or selection.marks.get(entry.key.text, only)
        if only_raced and not raced[bundle]:
            continue
        policy = entry.policy if raced[bundle] else None
        found.append(msgspec.structs.replace(entry, policy=policy, selection={**(entry.selection or {}), MARK: bundle}))
    return tuple(found)


def _cache_file(entries: Iterable[Entry], metadata: Mapping[str, Any]) -> CacheFile:
    return CacheFile(entries=tuple(entries), metadata=metadata, records={}, generation=None, legacy=())


def stamped(selection: Selection, data: bytes, environment: Environment) -> bytes:
    """A v1 file that FlashInfer in ``environment`` loads: stamped with its facts, entries marked.

    ``data`` are the selection file's bytes. Raises UsageError if a fact is undetermined:
    FlashInfer would ignore the whole file.
    """
    if missing := environment.undetermined():
        raise UsageError(
            f"can't stamp a file for FlashInfer: {', '.join(missing)} not known",
            f"give it with --fact {missing[0]}=VALUE, or all with --environment FILE or --like",
        )
    mark = {
        "tool": selection.tool,
        "selection": selection.id,
        "level": selection.level.value,
        "bundles": [f"{bundle.registry}: {bundle.sha256}" for bundle in selection.bundles],
    }
    entries = read_cache_file(data, source="selection", limits=_LIMITS).entries
    return write_cache_file(_cache_file(entries, {**environment.metadata(), MARK: mark}), limits=_LIMITS)


def resolution_json(resolution: Resolution) -> bytes:
    """The reasons behind a selection, for people and machines; its entries are in the selection itself."""
    return msgspec.json.encode(resolution_builtins(resolution), order="sorted")


def resolution_builtins(resolution: Resolution) -> dict[str, Any]:
    """The documented JSON form of a resolution: each reason as an object and as its line."""
    return {
        "environment": resolution.environment.metadata(),
        "match": resolution.level.value,
        "policy": resolution.policy.manifest_fields(),
        "entries": len(resolution.chosen),
        "bundles": [
            {
                "bundle": verdict.bundle_id,
                "registry": verdict.registry,
                "entries": verdict.entries,
                "taken": verdict.taken,
                "provided_elsewhere": verdict.elsewhere,
                "differing": [msgspec.to_builtins(difference) for difference in verdict.differing],
                "may_cost_speed": list(verdict.may_cost_speed),
                "rejected": [msgspec.to_builtins(reason) for reason in verdict.rejected],
                "line": str(verdict),
            }
            for verdict in resolution.verdicts
        ],
        "dropped": [
            {
                "bundle": dropped.bundle_id,
                "custom_op": dropped.custom_op,
                "runner": dropped.runner,
                "rivals": list(dropped.rivals),
                "entries": dropped.entries,
                "cause": str(dropped.cause),
                "line": str(dropped),
            }
            for dropped in resolution.dropped
        ],
    }
