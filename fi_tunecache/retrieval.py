"""Get the selection for a request: from the user cache where it is current, else from registries.

A hit imports nothing that only a miss needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .deadline import Deadline
from .errors import CacheError, FormatError, IntegrityError, NoMatchError
from .folder import Folder
from .registry_tree import COMMAND_DEADLINE, HUB_SCHEME, RegistryTree, open_tree
from .selection import Request, Selection, read_selection
from .user_cache import LOCK_TIMEOUT, UserCache

if TYPE_CHECKING:
    from .branch_record import BranchRecord
    from .candidates import Fetched
    from .verdict import Resolution

__all__ = ["Pulled", "cached", "no_match", "pull", "resolve"]


@dataclass(frozen=True)
class Pulled:
    """The outcome of :func:`pull`.

    ``data`` are the selection file's bytes. ``hit`` tells that the cached selection was used;
    ``resolution`` is then None (the reasons lie beside it in the cache). ``not_stored`` says why
    the selection is not in the cache, where it could not be written.
    """

    selection: Selection
    data: bytes
    hit: bool
    resolution: Resolution | None = None
    not_stored: str | None = None


def pull(
    request: Request,
    *,
    cache: UserCache | None = None,
    opener: Callable[[str], RegistryTree] | None = None,
    offline: bool = False,
    deadline: float = COMMAND_DEADLINE,
    allow_rollback: bool = False,
    accept: Callable[[Selection], None] = lambda _: None,
) -> Pulled:
    """Get the selection for a request.

    A hit writes nothing and takes no lock. It costs one request for each branch of a Hub among the registries
    (none where the name holds a commit). Where the cache can't be written, the selection is
    still returned and ``not_stored`` says why. A damaged file in the cache is set aside, told in
    ``cache.notices``, and made again.

    Parameters
    ----------
    request
        What is asked for.
    cache
        By default the user's.
    opener
        How a registry's name becomes its tree; by default :func:`~fi_tunecache.registry_tree.open_tree`.
    offline
        Take the cached selection without asking a registry whether it is current; where there is none,
        make it from what is here.
    deadline
        Seconds until a Hub must have answered, in all.
    allow_rollback
        Take a manifest that is older than one that was already seen of the same branch.
    accept
        Called with a new selection before it is stored; what it raises is raised.

    Raises
    ------
    NoMatchError
        Nothing fits; nothing is stored, and what was chosen before, and may be yanked now, is removed.
    RegistryError, FormatError, IntegrityError
        A registry can't be read, or holds what it must not, or has gone back to an older state; nothing is stored.
    """
    cache = cache or UserCache.locate()
    held = cached(request, cache)
    if held is not None and offline:
        return held
    folder = Folder.of(request.environment)
    until = Deadline(deadline)
    opener = opener or partial(open_tree, cache=cache, deadline=until, offline=offline)
    trees = [opener(name) for name in request.registries]
    revisions = tuple((tree.name, tree.revision(folder)) for tree in trees)
    if held is not None and _is_current(held.selection, trees, revisions, cache):
        return held
    remote = any(name.startswith(HUB_SCHEME) for name in request.registries)
    patience = until.remaining() / 2 if remote else LOCK_TIMEOUT  # what is left is for doing it ourselves
    with cache.lock(request.selection_id, patience):
        held = cached(request, cache)  # another process may have stored it meanwhile
        if held is not None and _is_current(held.selection, trees, revisions, cache):
            return held
        try:
            return _make(request, trees, revisions, cache, allow_rollback, accept)
        except IntegrityError:  # while this process waited, the branch may have moved on, and others have seen it
            moved = [tree.moved_on() for tree in trees]
            if not any(moved):
                raise
        revisions = tuple((tree.name, tree.revision(folder)) for tree in trees)
        return _make(request, trees, revisions, cache, allow_rollback, accept)


def _is_current(
    selection: Selection,
    trees: Sequence[RegistryTree],
    revisions: tuple[tuple[str, str | None], ...],
    cache: UserCache,
) -> bool:
    """Whether a selection was made from what the registries are at now, and no branch was seen elsewhere since.

    A branch that was may have gone back, which is noticed where the selection is made again.
    """
    if selection.registries != revisions:
        return False
    for tree, (_, revision) in zip(trees, revisions, strict=True):
        if tree.branch is not None:
            from .branch_record import read_record

            record = read_record(cache, tree.branch)
            if record is not None and record.commit != revision:
                return False
    return True


def _make(
    request: Request,
    trees: Sequence[RegistryTree],
    revisions: tuple[tuple[str, str | None], ...],
    cache: UserCache,
    allow_rollback: bool,
    accept: Callable[[Selection], None],
) -> Pulled:
    from .branch_record import advance, write_record
    from .candidates import fetch_candidates, resolve_both
    from .materialisation import materialise, resolution_json

    fetched = fetch_candidates(request, trees, cache)
    for notice in fetched.notices:
        cache.notice(notice)
    _remove_yanked(cache, fetched)
    folder = str(Folder.of(request.environment))
    records = [
        advance(cache, tree.branch, revision or "", folder, serial, allow_rollback=allow_rollback)
        for tree, (_, revision), serial in zip(trees, revisions, fetched.serials, strict=True)
        if tree.branch is not None
    ]
    asked, other = resolve_both(request, fetched)
    if not asked.chosen:
        _forget(cache, request.selection_id, records)
        raise no_match(asked, other, trees)
    selection, data = materialise(request, fetched.candidates, asked, other, revisions)
    accept(selection)
    try:
        for record in records:
            write_record(cache, record)
        for bundle in selection.bundles:
            cache.store_bundle(bundle.sha256, fetched.data[bundle.sha256])
        cache.store(cache.resolution_path(selection.id), resolution_json(asked))
        cache.store(cache.selection_path(selection.id), data)
    except CacheError as error:
        return Pulled(selection, data, False, asked, not_stored=str(error))
    return Pulled(selection, data, False, asked)


def _remove_yanked(cache: UserCache, fetched: Fetched) -> None:
    """A bundle that was withdrawn is not kept: `publish --from cache` would offer it anew."""
    for candidate in fetched.candidates:
        if candidate.row.yanked is not None:
            with contextlib.suppress(CacheError):  # of a cache that can't be written nothing is published either
                cache.remove_bundle(candidate.row.sha256)


def _forget(cache: UserCache, selection_id: str, records: Sequence[BranchRecord]) -> None:
    """Where nothing fits any more, as after a yank, what was chosen before must not be served from the cache."""
    from .branch_record import write_record

    try:
        if cache.remove_selection(selection_id):
            cache.notice("what was chosen before is no longer there, and is removed from the cache")
        for record in records:
            write_record(cache, record)
    except CacheError as error:
        cache.notice(str(error))


def cached(request: Request, cache: UserCache) -> Pulled | None:
    """The selection for a request that is in the cache; one that is damaged or can't be read is as if not there.

    Asks no registry, so it may be older than what one holds now. Reads one file; a damaged one is set aside, told
    in ``cache.notices``.
    """

    def parse(data: bytes) -> Pulled:
        selection = read_selection(data)
        if selection.id != request.selection_id:
            raise FormatError("its id is not its name")
        return Pulled(selection, data, True)

    return cache.read_parsed(cache.selection_path(request.selection_id), parse)


def resolve(
    request: Request, *, cache: UserCache | None = None, opener: Callable[[str], RegistryTree] | None = None
) -> tuple[Resolution, Resolution]:
    """Choose the entries for a request from its registries, at its match level and at the other one.

    Reads manifests and bundles (those in ``cache`` from there), stores nothing. That a branch has gone back, which
    :func:`pull` refuses, is told in ``cache.notices``.

    Returns
    -------
    tuple
        The resolution at the request's level, then the one at the other level.

    Raises
    ------
    RegistryError, FormatError, IntegrityError
        A registry can't be read, or holds what it must not.
    """
    from .candidates import fetch_candidates, resolve_both

    opener = opener or partial(open_tree, cache=cache)
    trees = [opener(name) for name in request.registries]
    fetched = fetch_candidates(request, trees, cache)
    if cache is not None:
        folder = Folder.of(request.environment)
        for notice in (*fetched.notices, *_rollbacks(cache, folder, trees, fetched.serials)):
            cache.notice(notice)
    return resolve_both(request, fetched)


def _rollbacks(
    cache: UserCache, folder: Folder, trees: Sequence[RegistryTree], serials: Sequence[int]
) -> Iterator[str]:
    from .branch_record import advance

    for tree, serial in zip(trees, serials, strict=True):
        if tree.branch is not None:
            try:
                advance(cache, tree.branch, "", str(folder), serial)
            except IntegrityError as error:
                yield f"{error.problem}: pull takes that with --allow-rollback only"


def no_match(
    asked: Resolution, other: Resolution, trees: Sequence[RegistryTree], *, explained: bool = False
) -> NoMatchError:
    """The error for a resolution without entries: the nearest bundle or folder, and what the other level gives.

    ``explained`` tells that the reader has seen the verdicts, and so is not sent to ``resolve``.
    """
    environment = asked.environment
    problem = (
        f"nothing in {', '.join(tree.name for tree in trees)} fits {environment.gpu}, "
        f"flashinfer {environment.flashinfer_version} at match level {asked.level}"
    )
    if asked.nearest is not None:
        reasons = asked.nearest.rejected or asked.nearest.differing
        names = ", ".join(getattr(reason, "fact", str(reason)) for reason in reasons)
        problem += f" (nearest: bundle {asked.nearest.bundle_id}: {names or 'its entries are dropped'})"
        if other.chosen:
            return NoMatchError(problem, f"--match {other.level} would give {len(other.chosen)} entries")
        meant = _similar_gpus(asked)
        steps = [f"did you mean {' or '.join(map(repr, meant))}?"] if meant else []
        unknown = [item.fact for item in asked.nearest.differing if item.here is None]
        if unknown:
            given = " ".join(f"--fact {fact}=VALUE" for fact in unknown)
            steps.append(f"what is unknown matches nothing: give it with {given}")
        elif not explained:
            steps.append("`fi-tunecache resolve` with the same options tells why, bundle by bundle")
        return NoMatchError(problem, " ".join(steps))
    there = ", ".join(map(str, sorted({folder for tree in trees for folder in tree.folders()}))) or "nothing"
    return NoMatchError(problem, f"there is {there}; see `fi-tunecache list`")


def _similar_gpus(asked: Resolution) -> list[str]:
    """GPUs of the candidates whose names contain the asked one: a hint for who typed too little, never a match.

    The other way round it would tell an ``NVIDIA H200 NVL`` to pass for an ``NVIDIA H200``.
    """
    here = asked.environment.gpu or ""
    found = {verdict.tuned_in.gpu or here for verdict in asked.verdicts} - {here}
    return sorted(gpu for gpu in found if here.casefold() in gpu.casefold())
