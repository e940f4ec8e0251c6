"""The candidates for a request: manifest rows of its registries, with the bundles that can matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from .errors import IntegrityError
from .folder import Folder
from .match_level import MatchLevel
from .registry import Registry
from .registry_tree import RegistryTree
from .resolution import choose, judge
from .selection import Request
from .user_cache import UserCache
from .verdict import Candidate, Resolution

__all__ = ["Fetched", "fetch_candidates", "resolve_both"]


class Fetched(Struct, frozen=True):
    """Candidates, the verified bytes of those whose bundle was fetched, by sha256, and what registries announce.

    ``serials`` are those of the manifests that were read, one a registry in order of precedence.
    """

    candidates: tuple[Candidate, ...]
    data: Mapping[str, bytes]
    notices: tuple[str, ...] = ()
    serials: tuple[int, ...] = ()


def fetch_candidates(request: Request, trees: Sequence[RegistryTree], cache: UserCache | None) -> Fetched:
    """Read the manifests, and every bundle that either match level could use.

    A bundle that ``cache`` holds is not fetched again; one that two registries have counts for
    the first. Where no registry has the folder, the candidates are those of its neighbours (the same
    GPU or the same FlashInfer), to be rejected with their reasons. Stores nothing.

    Raises
    ------
    RegistryError, FormatError, IntegrityError
        A registry can't be read, or holds what it must not.
    """
    folder = Folder.of(request.environment)
    candidates: dict[str, Candidate] = {}
    fetched: dict[str, bytes] = {}
    registries = list(map(Registry, trees))
    manifests = [registry.manifest(folder) for registry in registries]
    for precedence, (registry, manifest) in enumerate(zip(registries, manifests, strict=True)):
        rows = [Candidate(registry.name, row, None, precedence) for row in manifest.bundles]
        judgements = judge(rows, request.environment, MatchLevel.COMPATIBLE, request.policy)
        new = [item for item in judgements if item.candidate.row.sha256 not in candidates]
        wanted = {item.candidate.row.sha256: item.candidate.row for item in new if not item.rejected}
        if cache is not None:
            held = {sha256: cache.read_bundle(sha256) for sha256 in wanted}
            fetched.update({sha256: data for sha256, data in held.items() if data is not None})
        registry.prefetch(folder, (row for sha256, row in wanted.items() if sha256 not in fetched))
        for candidate in (item.candidate for item in new):
            sha256 = candidate.row.sha256
            if sha256 in wanted:
                if sha256 not in fetched:
                    fetched[sha256] = registry.bundle_bytes(folder, candidate.row)
                bundle = registry.bundle(folder, candidate.row, fetched[sha256])
                candidate = msgspec.structs.replace(candidate, bundle=bundle)
            candidates[sha256] = candidate
    ids = {candidate.row.bundle_id for candidate in candidates.values()}
    if len(ids) != len(candidates):
        raise IntegrityError("two bundles have the same first 16 digits", "leave one of the registries out")
    return Fetched(
        tuple(candidates.values()) or _neighbours(folder, registries),
        fetched,
        notices=tuple(
            f"{registry.name}: {notice}"
            for registry, manifest in zip(registries, manifests, strict=True)
            for notice in manifest.notices
        ),
        serials=tuple(manifest.serial for manifest in manifests),
    )


def _neighbours(folder: Folder, registries: Sequence[Registry]) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(registry.name, row, None, precedence)
        for precedence, registry in enumerate(registries)
        for other in registry.folders()
        if other.slug == folder.slug or other.version == folder.version
        for row in registry.manifest(other).bundles
    )


def resolve_both(request: Request, fetched: Fetched) -> tuple[Resolution, Resolution]:
    """The resolution at the request's match level, and the one at the other level."""
    asked, other = (
        choose(fetched.candidates, request.environment, level, request.policy, request.skip_ops)
        for level in (request.level, request.level.other)
    )
    return asked, other
