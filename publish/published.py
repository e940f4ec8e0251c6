"""What a registry and the user cache hold already, as far as a publication has to be compared with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from packaging.version import InvalidVersion, Version

from fi_tunecache.bundle import Bundle, read_bundle
from fi_tunecache.environment import Environment
from fi_tunecache.errors import FormatError, UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import BundleRow
from fi_tunecache.measurement_policy import MeasurementPolicy
from fi_tunecache.registry import Registry
from fi_tunecache.source import Source
from fi_tunecache.user_cache import UserCache

from .identity import Identity, compared_facts, entry_identity

__all__ = ["Published", "PublishedBundle", "drops_marks", "read_published", "release_of"]

_FIRST_THAT_KEEPS_MARKS = Version("0.7.4")


class PublishedBundle(Struct, frozen=True):
    """A bundle that is published; ``row`` is None where only the user cache is known to have it."""

    bundle_id: str
    bundle: Bundle
    row: BundleRow | None = None


class Published(Struct, frozen=True):
    """Bundles of the registry that is published to, in the order of its manifests, and of the user cache."""

    bundles: tuple[PublishedBundle, ...] = ()

    def origins(self, environment: Environment) -> Mapping[Identity, frozenset[str]]:
        """Every entry that may have been pulled into that environment, with the bundles that have it.

        FlashInfer's version and the GPU are equal then, whatever else differs.
        """
        origins: dict[Identity, set[str]] = {}
        for item in self.bundles:
            there = item.bundle.environment
            if (there.flashinfer_version, there.gpu) == (environment.flashinfer_version, environment.gpu):
                for entry in item.bundle.entries.values():
                    origins.setdefault(entry_identity(entry), set()).add(item.bundle_id)
        return {identity: frozenset(ids) for identity, ids in origins.items()}

    def gathered_from(self, digest: str) -> frozenset[str]:
        """The ids of the bundles that a source with that sha256 went into."""
        return frozenset(item.bundle_id for item in self.bundles if digest in item.bundle.provenance.digests)

    def comparable(self, environment: Environment, policy: MeasurementPolicy) -> tuple[PublishedBundle, ...]:
        """The registry's bundles of that environment and policy, yanked ones too, best first.

        The order is that in which a client would take them, see :func:`fi_tunecache.resolution.judge`.
        """
        wanted = (compared_facts(environment), policy)
        found = [
            item
            for item in self.bundles
            if item.row is not None and (compared_facts(item.bundle.environment), item.bundle.policy) == wanted
        ]
        found.reverse()  # of one day, what was published last is the newest
        found.sort(key=lambda item: item.bundle.provenance.created, reverse=True)
        found.sort(key=lambda item: item.bundle.default_raced is not True)
        return tuple(found)


def release_of(environment: Environment) -> Version:
    """FlashInfer's version, to be compared. Raises UsageError where it is none."""
    try:
        return Version(environment.flashinfer_version or "")
    except InvalidVersion:
        raise UsageError(
            f"flashinfer_version {environment.flashinfer_version!r} is not a version", "tune again with a release"
        ) from None


def drops_marks(environment: Environment) -> bool:
    """Whether that FlashInfer saves a pulled v1 file without our marks, which are in the fourth element of a value."""
    return release_of(environment) < _FIRST_THAT_KEEPS_MARKS


def read_published(target: Registry | None, sources: Iterable[Source], cache: UserCache | None) -> Published:
    """Read the bundles that publishing these sources has to be compared with.

    Those are the target's of the same environment and policy. Where FlashInfer drops the mark of what was
    pulled, they are all of the target's and the cache's for that version and GPU. What the cache holds is
    not fetched.

    Parameters
    ----------
    target
        The registry that is published to; None if there is none yet.

    Raises
    ------
    RegistryError, FormatError, IntegrityError
        The target can't be read, or holds what it must not.
    UsageError
        A version or a GPU that no folder can have.
    """
    sections = [
        (environment, section.policy)
        for source in sources
        for section in source.sections
        if (environment := section.environment) is not None and not environment.undetermined()
    ]
    exact = {(compared_facts(environment), policy) for environment, policy in sections}
    folders = dict.fromkeys(Folder.of(environment) for environment, _ in sections)
    searched = {Folder.of(environment) for environment, _ in sections if drops_marks(environment)}

    bundles: dict[str, PublishedBundle] = {}
    if target is not None:
        for folder in folders:
            rows = [
                row
                for row in target.manifest(folder).bundles
                if folder in searched or (compared_facts(row.tuned_in), row.measured_under) in exact
            ]
            held = {row.sha256: cache.read_bundle(row.sha256) for row in rows} if cache is not None else {}
            target.prefetch(folder, (row for row in rows if held.get(row.sha256) is None))
            for row in rows:
                bundle = target.bundle(folder, row, held.get(row.sha256))
                bundles[row.sha256] = PublishedBundle(row.bundle_id, bundle, row)
    for sha256, bundle in _cached(cache) if cache is not None and searched else ():
        if Folder.of(bundle.environment) in searched:
            bundles.setdefault(sha256, PublishedBundle(sha256[:16], bundle))
    return Published(tuple(bundles.values()))


def _cached(cache: UserCache) -> Iterator[tuple[str, Bundle]]:
    for file in cache.files():
        if file.kind == "bundles" and file.path.suffix == ".json":
            data = cache.read_bundle(file.path.stem)
            try:
                if data is not None:
                    yield file.path.stem, read_bundle(data, source=str(file.path))
            except FormatError as error:  # of a newer release, perhaps
                cache.notice(str(error))
