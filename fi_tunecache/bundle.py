"""A bundle: an immutable FlashInfer v1 cache file with its provenance.

Provenance is the object ``fi_tunecache`` inside ``_metadata``, where FlashInfer ignores fields
that it does not know: an unmodified FlashInfer in the same environment can load a bundle as it is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from .entry import Entry, Lookup
from .environment import Environment
from .errors import FormatError
from .flashinfer_json import CacheFile, read_cache_file, write_cache_file
from .key import Key, parse_extras
from .measurement_policy import MeasurementPolicy

__all__ = [
    "BUNDLE_FORMAT",
    "MARK",
    "Bundle",
    "Provenance",
    "Workload",
    "bundle_file_name",
    "read_bundle",
    "write_bundle",
]

BUNDLE_FORMAT = 1
MARK = "fi_tunecache"
"""The field under which we mark what is ours, in metadata and in an entry's fourth element."""

_MAX_LOOKUPS = 200_000
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


class Workload(Struct, frozen=True, omit_defaults=True):
    """What was being served when the lookups were recorded; every field is optional."""

    model: str | None = None
    engine: str | None = None
    tensor_parallel: int | None = None
    expert_parallel: int | None = None
    note: str | None = None


class Provenance(Struct, frozen=True, omit_defaults=True):
    """Where a bundle comes from. Only these fields exist, so nothing else can leak into a registry.

    ``created`` is a UTC date, ``tuning_seconds`` the time that tuning took, ``mapped_cublas`` the
    cuBLASLt version that the process had loaded (``cublasLtGetVersion``; ``cublas_version`` of
    the environment is what the loader finds first), ``driver`` the NVIDIA driver's version,
    ``power_limit_w`` in watts.
    """

    created: str
    tool: str = ""
    source: str | None = None
    tuning_seconds: float | None = None
    driver: str | None = None
    mapped_cublas: str | None = None
    power_limit_w: float | None = None
    torch: str | None = None
    python: str | None = None
    workload: Workload | None = None

    def __post_init__(self) -> None:
        if not _DATE.fullmatch(self.created):
            raise FormatError(f"created is {self.created[:40]!r}, not a date like 2026-12-01")


class Bundle(Struct, frozen=True):
    """Entries that one tuning run gave in one environment under one measurement policy.

    ``lookups`` are the recorded ones (empty: none were recorded); each one's winning key is in
    ``entries``, which maps a key's text to its entry. ``default_raced`` tells whether
    FlashInfer's default took part in the race (None: not known).
    """

    environment: Environment
    entries: Mapping[str, Entry]
    provenance: Provenance
    policy: MeasurementPolicy = MeasurementPolicy()
    lookups: tuple[Lookup, ...] = ()
    default_raced: bool | None = None


class _StoredLookup(Struct, frozen=True):
    custom_op: str
    profile: str
    runners: tuple[tuple[str, str], ...]
    winner: int


class _StoredProvenance(Struct, frozen=True, omit_defaults=True):
    format: int
    provenance: Provenance
    policy: dict[str, str] = {}
    default_raced: bool | None = None
    lookups: tuple[_StoredLookup, ...] = ()


class _Format(Struct, frozen=True):
    format: int


def bundle_file_name(sha256: str) -> str:
    """A bundle's name in a registry: the first 16 hex digits of its sha256."""
    return f"{sha256[:16]}.json"


def read_bundle(data: bytes, *, source: str = "") -> Bundle:
    """Parse and check a bundle. Does not check its hash: the caller knows which one it must have.

    Raises
    ------
    FormatError
        Not a v1 file, no or indeterminate metadata, no provenance, a newer format, no entries,
        an entry of another runner than its key's, or a lookup whose winner has no entry.
    """
    file = read_cache_file(data, source=source)
    if file.metadata is None:
        raise FormatError("no _metadata: nobody can say where it was tuned", source=source)
    environment = Environment.from_metadata(file.metadata, source=source)
    if undetermined := environment.undetermined():
        raise FormatError(f"a bundle must name every fact; missing: {', '.join(undetermined)}", source=source)
    stored = _read_provenance(file.metadata.get(MARK), source)
    if file.legacy or not file.entries:
        raise FormatError("no entries" if not file.legacy else "keys without extras never hit", source=source)
    entries = {entry.key.text: entry for entry in file.entries}
    for entry in file.entries:
        if entry.runner != entry.key.runner:
            raise FormatError(f"the value names {entry.runner}, its key {entry.key.runner}: {entry.key}", source=source)
    return Bundle(
        environment=environment,
        entries=entries,
        provenance=stored.provenance,
        policy=MeasurementPolicy.from_fields(stored.policy),
        lookups=tuple(_read_lookup(lookup, entries, source) for lookup in stored.lookups),
        default_raced=stored.default_raced,
    )


def _read_provenance(value: object, source: str) -> _StoredProvenance:
    try:
        found = msgspec.convert(value, _Format).format
        if found > BUNDLE_FORMAT:
            raise FormatError(
                f"bundle format {found} is newer than {BUNDLE_FORMAT}", "upgrade fi-tunecache", source=source
            )
        stored = msgspec.convert(value, _StoredProvenance)
    except msgspec.ValidationError as error:
        raise FormatError(
            f"no provenance that can be read ({error})", "only `fi-tunecache` writes bundles", source=source
        ) from None
    if len(stored.lookups) > _MAX_LOOKUPS:
        raise FormatError(f"{len(stored.lookups)} lookups are more than {_MAX_LOOKUPS}", source=source)
    return stored


def _read_lookup(stored: _StoredLookup, entries: Mapping[str, Entry], source: str) -> Lookup:
    texts = [f"('{stored.custom_op}', '{runner}', {stored.profile}, {extras})" for runner, extras in stored.runners]
    if not 0 <= stored.winner < len(texts) or texts[stored.winner] not in entries:
        raise FormatError(f"a lookup of {stored.custom_op[:80]} has no entry for its winner", source=source)
    won = entries[texts[stored.winner]].key  # its op and profile were checked when the entry was read
    if stored.custom_op != won.custom_op:
        raise FormatError(f"a lookup of {stored.custom_op[:80]} names another op than its winner", source=source)
    keys = tuple(
        won if index == stored.winner else Key(won.custom_op, runner, won.profile, parse_extras(extras), texts[index])
        for index, (runner, extras) in enumerate(stored.runners)
    )
    return Lookup(keys, stored.winner)


def write_bundle(bundle: Bundle) -> tuple[bytes, str]:
    """The canonical bytes of a bundle and their sha256 (64 hex digits). The inverse of :func:`read_bundle`."""
    stored = _StoredProvenance(
        format=BUNDLE_FORMAT,
        provenance=bundle.provenance,
        policy=bundle.policy.manifest_fields(),
        default_raced=bundle.default_raced,
        lookups=tuple(_stored_lookup(lookup) for lookup in bundle.lookups),
    )
    metadata: dict[str, Any] = {**bundle.environment.metadata(), MARK: msgspec.to_builtins(stored)}
    data = write_cache_file(
        CacheFile(entries=tuple(bundle.entries.values()), metadata=metadata, records={}, generation=None, legacy=())
    )
    return data, hashlib.sha256(data).hexdigest()


def _stored_lookup(lookup: Lookup) -> _StoredLookup:
    return _StoredLookup(
        custom_op=lookup.custom_op,
        profile=str(lookup.profile),
        runners=tuple((key.runner, str(key.extras)) for key in lookup.keys),
        winner=lookup.winner,
    )
