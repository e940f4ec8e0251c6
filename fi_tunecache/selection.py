"""The selection: the entries chosen for this machine, as one file in the user cache.

A selection file is a FlashInfer v1 file whose metadata holds the facts as they are compared, and
our object: id, registries with the revision they were read at, bundles, counts, and a digest of
the file itself. A hit reads that one file. It is no file for FlashInfer (another virtual environment on the
same machine may share it): :func:`stamped` makes one for a given environment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec
from msgspec import Struct

from . import __version__
from .bundle import MARK
from .compatibility import MatchLevel
from .entry import Entry
from .environment import Environment
from .errors import CacheError, FormatError, NoMatchError, UsageError
from .flashinfer_json import CacheFile, read_cache_file, write_cache_file
from .manifest import Folder
from .measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from .registry import Registry, open_registry
from .resolution import Candidate, Resolution, choose, judge
from .runner_families import rules_version
from .user_cache import UserCache

__all__ = [
    "OtherLevel",
    "Pulled",
    "Request",
    "Selection",
    "SelectionBundle",
    "pull",
    "read_selection",
    "resolve",
    "stamped",
]

SELECTION_FORMAT = 1
_RULES = 1
"""Raised with every change of :mod:`resolution` or :mod:`compatibility` that chooses differently."""

_BLANK_DIGEST = b"0" * 64


class Request(Struct, frozen=True, kw_only=True):
    """Everything that decides a selection and is known without asking a registry.

    ``registries`` are names in order of precedence; ``lock`` is the sha256 of a file that pins
    commits and bundles.
    """

    environment: Environment
    registries: tuple[str, ...]
    level: MatchLevel = MatchLevel.EXACT
    policy: MeasurementPolicy = DEFAULT_POLICY
    skip_ops: frozenset[str] = frozenset()
    lock: str | None = None

    @property
    def selection_id(self) -> str:
        """32 hex digits; equal for equal requests under equal rules, and for nothing else."""
        identity = {
            "environment": self.environment.identity(),
            "registries": self.registries,
            "level": self.level.value,
            "policy": self.policy.manifest_fields(),
            "skip_ops": sorted(self.skip_ops),
            "lock": self.lock,
            "rules": [_RULES, rules_version(), SELECTION_FORMAT],
        }
        return hashlib.sha256(msgspec.json.encode(identity, order="deterministic")).hexdigest()[:32]


class SelectionBundle(Struct, frozen=True):
    """A bundle that provides entries of a selection."""

    bundle_id: str
    sha256: str
    registry: str
    entries: int
    default_raced: bool | None


class OtherLevel(Struct, frozen=True):
    """What the other match level would have given."""

    level: MatchLevel
    entries: int
    bundles: int


class Selection(Struct, frozen=True, kw_only=True):
    """What a selection file says of itself. Its entries are read by :func:`read_selection`'s caller when needed.

    ``registries`` are (name, revision of the folder that was read, None if it had none) in order of precedence.
    """

    format: int
    id: str
    tool: str
    created: str
    level: MatchLevel
    policy: dict[str, str]
    registries: tuple[tuple[str, str | None], ...]
    bundles: tuple[SelectionBundle, ...]
    entries: int
    other_level: OtherLevel
    undetermined: tuple[str, ...] = ()
    digest: str = _BLANK_DIGEST.decode()


class Pulled(Struct, frozen=True):
    """The outcome of :func:`pull`.

    ``hit`` tells that the cached selection was used; ``resolution`` is then None (the reasons
    lie beside it in the cache). ``data`` are the selection file's bytes. ``not_stored`` says why
    the selection is not in the cache, where it could not be written.
    """

    selection: Selection
    data: bytes
    hit: bool
    resolution: Resolution | None = None
    not_stored: str | None = None

    def entries(self) -> tuple[Entry, ...]:
        """The entries, each marked with the bundle it comes from."""
        return read_cache_file(self.data, source="selection").entries


class _Metadata(Struct, frozen=True):
    fi_tunecache: Selection


class _Header(Struct, frozen=True):
    metadata: _Metadata = msgspec.field(name="_metadata")


_header = msgspec.json.Decoder(_Header)


def resolve(
    request: Request, *, opener: Callable[[str], Registry] = open_registry, cache: UserCache | None = None
) -> tuple[Resolution, Resolution]:
    """Choose the entries for a request from its registries, at its match level and at the other one.

    Reads manifests and bundles (those in ``cache`` from there), stores nothing.

    Returns
    -------
    tuple
        The resolution at the request's level, then the one at the other level.

    Raises
    ------
    RegistryError, FormatError, IntegrityError
        A registry can't be read, or holds what it must not.
    """
    outcome = _resolve(request, [opener(name) for name in request.registries], cache)
    return outcome.asked, outcome.other


class _Outcome(Struct, frozen=True):
    asked: Resolution
    other: Resolution
    fetched: Mapping[str, bytes]
    candidates: tuple[Candidate, ...]


def _resolve(request: Request, registries: Sequence[Registry], cache: UserCache | None) -> _Outcome:
    folder = Folder.of(request.environment)
    fetched: dict[str, bytes] = {}
    candidates: dict[str, Candidate] = {}
    for precedence, registry in enumerate(registries):
        rows = [Candidate(registry.name, row, None, precedence) for row in registry.manifest(folder).bundles]
        # Compatible rejects the fewest, so what it needs is all that either level needs.
        for judgement in judge(rows, request.environment, MatchLevel.COMPATIBLE, request.policy):
            candidate = judgement.candidate
            if candidate.row.sha256 in candidates:
                continue  # the same bundle in a registry of higher precedence
            if not judgement.rejected:
                data = cache.read_bundle(candidate.row.sha256) if cache else None
                data = registry.bundle_bytes(folder, candidate.row) if data is None else data
                fetched[candidate.row.sha256] = data
                bundle = registry.bundle(folder, candidate.row, data)
                candidate = msgspec.structs.replace(candidate, bundle=bundle)
            candidates[candidate.row.sha256] = candidate
    given = tuple(candidates.values())
    asked, other = (
        choose(given, request.environment, level, request.policy, request.skip_ops)
        for level in (request.level, request.level.other)
    )
    return _Outcome(asked, other, fetched, given)


def pull(
    request: Request,
    *,
    cache: UserCache | None = None,
    opener: Callable[[str], Registry] = open_registry,
    offline: bool = False,
) -> Pulled:
    """Get the selection for a request: from the cache where it is current, else from its registries.

    A hit writes nothing and takes no lock. Where the cache can't be written, the selection is
    still returned and ``not_stored`` says why.

    Parameters
    ----------
    request
        What is asked for.
    cache
        By default the user's.
    opener
        How a registry's name becomes a registry.
    offline
        Take the cached selection without asking a registry whether it is current.

    Raises
    ------
    NoMatchError
        Nothing fits; nothing is stored.
    RegistryError, FormatError, IntegrityError
        A registry can't be read, or holds what it must not; nothing is stored.
    """
    cache = cache or UserCache.locate()
    held = _held(cache, request.selection_id)
    if held is not None and offline:
        return held
    folder = Folder.of(request.environment)
    registries = [opener(name) for name in request.registries]
    revisions = tuple((registry.name, registry.revision(folder)) for registry in registries)
    if held is not None and held.selection.registries == revisions:
        return held
    with cache.lock(request.selection_id):
        held = _held(cache, request.selection_id)  # another process may have stored it meanwhile
        if held is not None and held.selection.registries == revisions:
            return held
        outcome = _resolve(request, registries, cache)
        if not outcome.asked.chosen:
            raise no_match(outcome.asked, outcome.other, request.registries)
        selection, data = _materialise(request, outcome, revisions)
        try:
            for verdict in outcome.asked.used:
                sha256 = next(sha for sha in outcome.fetched if sha.startswith(verdict.bundle_id))
                cache.store_bundle(sha256, outcome.fetched[sha256])
            cache.store(cache.resolution_path(selection.id), resolution_json(outcome.asked))
            cache.store(cache.selection_path(selection.id), data)
        except CacheError as error:
            return Pulled(selection, data, False, outcome.asked, not_stored=str(error))
        return Pulled(selection, data, False, outcome.asked)


def _held(cache: UserCache, selection_id: str) -> Pulled | None:
    """The cached selection; a damaged one is set aside and is as if not there."""
    path = cache.selection_path(selection_id)
    data = cache.read(path)
    if data is None:
        return None
    try:
        selection = read_selection(data, source=path.name)
        if selection.id != selection_id:
            raise FormatError("its id is not its name", source=path.name)
    except FormatError:
        cache.set_aside(path)
        return None
    return Pulled(selection, data, True)


def no_match(asked: Resolution, other: Resolution, registries: Iterable[str]) -> NoMatchError:
    """The error for a resolution without entries: names the nearest bundle and what the other level gives."""
    environment = asked.environment
    where = f"{environment.gpu}, flashinfer {environment.flashinfer_version}"
    problem = f"nothing in {', '.join(registries)} fits {where} at match level {asked.level}"
    if asked.nearest is not None:
        problem += f" (nearest: {asked.nearest})"
    if other.chosen:
        return NoMatchError(problem, f"--match {other.level} would give {len(other.chosen)} entries")
    return NoMatchError(problem, "see what there is with `fi-tunecache list`")


def _materialise(
    request: Request, outcome: _Outcome, revisions: tuple[tuple[str, str | None], ...]
) -> tuple[Selection, bytes]:
    by_id = {candidate.row.bundle_id: candidate for candidate in outcome.candidates}
    selection = Selection(
        format=SELECTION_FORMAT,
        id=request.selection_id,
        tool=f"fi-tunecache {__version__}",
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        level=request.level,
        policy=request.policy.manifest_fields(),
        registries=revisions,
        bundles=tuple(
            SelectionBundle(
                bundle_id=verdict.bundle_id,
                sha256=by_id[verdict.bundle_id].row.sha256,
                registry=verdict.registry,
                entries=verdict.taken,
                default_raced=by_id[verdict.bundle_id].row.default_raced,
            )
            for verdict in outcome.asked.used
        ),
        entries=len(outcome.asked.chosen),
        other_level=OtherLevel(outcome.other.level, len(outcome.other.chosen), len(outcome.other.used)),
        undetermined=request.environment.undetermined(),
    )
    entries = [_marked(chosen.entry, chosen.bundle_id) for chosen in outcome.asked.chosen.values()]
    facts = {name: value for name, value in request.environment.identity().items() if value is not None}
    metadata: dict[str, Any] = {**facts, MARK: msgspec.to_builtins(selection)}
    blank = write_cache_file(_cache_file(entries, metadata))
    digest = hashlib.sha256(blank).hexdigest()
    data = blank.replace(_BLANK_DIGEST, digest.encode(), 1)
    return msgspec.structs.replace(selection, digest=digest), data


def _marked(entry: Entry, bundle_id: str) -> Entry:
    """Name the bundle in the fourth element. An entry without a policy has no room for one (FlashInfer reads
    the third element as a tuple); such a file is marked in its metadata alone."""
    if entry.policy is None:
        return entry
    return msgspec.structs.replace(entry, selection={**(entry.selection or {}), MARK: bundle_id})


def _cache_file(entries: Iterable[Entry], metadata: Mapping[str, Any]) -> CacheFile:
    return CacheFile(entries=tuple(entries), metadata=metadata, records={}, generation=None, legacy=())


def read_selection(data: bytes, *, source: str = "") -> Selection:
    """Check a selection file's digest and read what it says of itself; its entries are not parsed.

    Raises FormatError if the file was changed since it was written, or is none.
    """
    try:
        selection = _header.decode(data).metadata.fi_tunecache
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"not a selection ({error})", source=source) from None
    digest = selection.digest.encode()
    if hashlib.sha256(data.replace(digest, _BLANK_DIGEST, 1)).hexdigest() != selection.digest:
        raise FormatError("its digest is wrong: the file was changed", "pull again", source=source)
    if selection.format != SELECTION_FORMAT:
        raise FormatError(f"selection format {selection.format} is not {SELECTION_FORMAT}", source=source)
    return selection


def stamped(pulled: Pulled, environment: Environment) -> bytes:
    """A v1 file that FlashInfer in ``environment`` loads: stamped with its facts, entries marked.

    Raises UsageError if a fact is undetermined: FlashInfer would ignore the whole file.
    """
    if missing := environment.undetermined():
        raise UsageError(
            f"can't stamp a file for FlashInfer: {', '.join(missing)} not known",
            f"give it with --fact {missing[0]}=VALUE, or all with --environment FILE or --like",
        )
    selection = pulled.selection
    mark = {
        "tool": selection.tool,
        "selection": selection.id,
        "level": selection.level.value,
        "bundles": [f"{bundle.registry}: {bundle.sha256}" for bundle in selection.bundles],
    }
    return write_cache_file(_cache_file(pulled.entries(), {**environment.metadata(), MARK: mark}))


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
