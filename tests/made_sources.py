"""Sources of tuning results, made by name, for tests of publishing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import made

from fi_tunecache.bundle import Bundle, Provenance, write_bundle
from fi_tunecache.entry import Entry
from fi_tunecache.environment import Environment
from fi_tunecache.flashinfer_json import CacheFile, write_cache_file
from fi_tunecache.manifest import Yank, describe_bundle
from fi_tunecache.measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from fi_tunecache.publish.gather import Gathered, gather
from fi_tunecache.publish.left_out import LeftOut
from fi_tunecache.publish.published import Published, PublishedBundle
from fi_tunecache.source import Section, Source, SourceKind

PROVENANCE = Provenance(created="2026-12-01", tool="test")
OF_0_7_2 = made.H200.with_facts({"flashinfer_version": "0.7.2.post1"})


def source(
    name: str,
    entries: Sequence[Entry],
    *,
    environment: Environment = made.H200,
    policy: MeasurementPolicy = DEFAULT_POLICY,
    kind: SourceKind = SourceKind.CACHE_FILE,
    modified: float = 0.0,
    records: int = 0,
    bundles: tuple[str, ...] = (),
) -> Source:
    """A source as it is read, without a file."""
    digest = hashlib.sha256(repr((environment, policy, entries)).encode()).hexdigest()
    section = Section(
        name=name,
        environment=environment,
        policy=policy,
        entries=tuple(entries),
        records=records,
        digest=digest,
        modified=modified,
        bundles=bundles,
    )
    return Source(Path(name), kind, (section,))


def v1_file(path: Path, entries: Sequence[Entry], environment: Environment = made.H200) -> Path:
    """A file as FlashInfer saves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(write_cache_file(CacheFile(tuple(entries), environment.metadata())))
    return path


def published(*bundles: Bundle, yanked: Yank | None = None) -> Published:
    """The registry that holds these bundles."""
    items = []
    for bundle in bundles:
        data, sha256 = write_bundle(bundle)
        row = describe_bundle(bundle, data, sha256)
        items.append(PublishedBundle(row.bundle_id, bundle, type(row)(**{**_fields(row), "yanked": yanked})))
    return Published(tuple(items))


def _fields(row: object) -> dict[str, object]:
    return {name: getattr(row, name) for name in row.__struct_fields__}  # type: ignore[attr-defined]


def gathered(*sources: Source, **how: object) -> Gathered:
    """What one environment and policy gives."""
    (only,) = gather(sources, PROVENANCE, **how)  # type: ignore[arg-type]
    return only


def lines(left_out: Sequence[LeftOut]) -> list[tuple[object, str, int]]:
    """Left out entries as (cause, runner, count)."""
    return [(line.cause, line.runner, line.entries) for line in left_out]
