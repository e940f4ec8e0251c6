"""A bundle: an immutable FlashInfer v1 cache file with its provenance.

Provenance is the object ``fi_tunecache`` inside ``_metadata``, where FlashInfer ignores fields
that it does not know: an unmodified FlashInfer in the same environment can load a bundle as it is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from .entry import Entry, Lookup
from .environment import Environment
from .errors import FormatError
from .flashinfer_json import CacheFile, read_cache_file, write_cache_file
from .json_document import naming
from .key import Key, parse_extras
from .measurement_policy import MeasurementPolicy

__all__ = [
    "BUNDLE_FORMAT",
    "MARK",
    "Bundle",
    "Provenance",
    "Workload",
    "bundle_file_name",
    "check_date",
    "check_texts",
    "read_bundle",
    "write_bundle",
]

BUNDLE_FORMAT = 1
MARK = "fi_tunecache"
"""The field under which we mark what is ours, in metadata and in an entry's fourth element."""

_MAX_LOOKUPS = 200_000
_MAX_TEXT = 4096
_DATE = re.compile(r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])")


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
    ``power_limit_w`` in watts. ``digests`` are the sha256 of what it was gathered from, by which the
    same source is known when it is published again.
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
    digests: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_date(self.created)


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
    format: Annotated[int, msgspec.Meta(ge=1)]


def check_date(text: str) -> None:
    """Raises FormatError for anything but a date like ``2026-12-01``: dates are compared as text."""
    if not _DATE.fullmatch(text):
        raise FormatError(f"{text[:40]!r} is not a date like 2026-12-01")


def check_texts(document: object) -> None:
    """Raises FormatError for a text in decoded JSON that could break a line or a terminal, names included."""
    if isinstance(document, str):
        if len(document) > _MAX_TEXT or not document.isprintable():
            raise FormatError(
                f"holds a text that is not one printable line of at most {_MAX_TEXT} characters: {document[:40]!r}",
                "tell the publisher",
            )
    elif isinstance(document, Mapping):
        for name, value in document.items():
            check_texts(name)
            check_texts(value)
    elif isinstance(document, list):
        for value in document:
            check_texts(value)


def bundle_file_name(sha256: str) -> str:
    """A bundle's name in a registry: the first 16 hex digits of its sha256."""
    return f"{sha256[:16]}.json"


def read_bundle(data: bytes, *, source: str = "") -> Bundle:
    """Parse and check a bundle. Does not check its hash: the caller knows which one it must have.

    Raises
    ------
    FormatError
        Not a v1 file, no or indeterminate metadata, no provenance, a newer format, no entries,
        something beside them that only FlashInfer would read, an entry of another runner than its
        key's, or a lookup that is malformed or whose winner has no entry.
    """
    file = read_cache_file(data, source=source)
    with naming(source):
        environment = file.environment()
        if undetermined := environment.undetermined():
            raise FormatError(f"a bundle must name every fact; missing: {', '.join(undetermined)}", "tune again")
        stored = _read_provenance((file.metadata or {}).get(MARK))
        if file.legacy:
            raise FormatError("keys without extras never hit", "tune again with FlashInfer 0.7.1 or newer")
        if not file.entries:
            raise FormatError("no entries", "tell the publisher")
        if file.records:
            raise FormatError("holds _records: a bundle has entries only", "tell the publisher")
        entries = {entry.key.text: entry for entry in file.entries}
        for entry in file.entries:
            if entry.runner != entry.key.runner:
                raise FormatError(
                    f"a value names {entry.runner[:80]}, its key {entry.key.runner[:80]}: {entry.key.text[:120]}",
                    "FlashInfer never serves it; tune again",
                )
        return Bundle(
            environment=environment,
            entries=entries,
            provenance=stored.provenance,
            policy=MeasurementPolicy.from_fields(stored.policy),
            lookups=tuple(_read_lookup(lookup, entries) for lookup in stored.lookups),
            default_raced=stored.default_raced,
        )


def _read_provenance(value: object) -> _StoredProvenance:
    if not isinstance(value, Mapping):
        raise FormatError("no provenance: a v1 file, not a bundle", "name a bundle of a registry")
    check_texts({name: part for name, part in value.items() if name != "lookups"})
    try:
        found = msgspec.convert(value, _Format).format
        if found > BUNDLE_FORMAT:
            raise FormatError(f"bundle format {found} is newer than {BUNDLE_FORMAT}", "upgrade fi-tunecache")
        stored = msgspec.convert(value, _StoredProvenance)
    except msgspec.ValidationError as error:
        raise FormatError(f"no provenance that can be read ({error})", "only fi-tunecache writes bundles") from None
    if len(stored.lookups) > _MAX_LOOKUPS:
        raise FormatError(f"{len(stored.lookups)} lookups are more than {_MAX_LOOKUPS}", "split the bundle")
    return stored


def _read_lookup(stored: _StoredLookup, entries: Mapping[str, Entry]) -> Lookup:
    texts = [f"('{stored.custom_op}', '{runner}', {stored.profile}, {extras})" for runner, extras in stored.runners]
    if not 0 <= stored.winner < len(texts) or texts[stored.winner] not in entries:
        raise FormatError(f"a lookup of {stored.custom_op[:80]} has no entry for its winner", "tell the publisher")
    won = entries[texts[stored.winner]].key
    # The entry's key was parsed. If op, runner and extras are its own, so is the profile between them.
    runner, extras = stored.runners[stored.winner]
    if stored.custom_op != won.custom_op or runner != won.runner or parse_extras(extras) != won.extras:
        raise FormatError(
            f"a lookup of {stored.custom_op[:80]} is not what its winner's key says", "tell the publisher"
        )
    for runner, _ in stored.runners:
        if not runner or not runner.isprintable() or "'" in runner or "\\" in runner:
            raise FormatError(
                f"a lookup of {stored.custom_op[:80]} has {runner[:80]!r} for a runner class", "tell the publisher"
            )
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
        # On Python 3.10 tuple() of nothing may be another () than the default, and would be written out.
        lookups=tuple(_stored_lookup(lookup) for lookup in bundle.lookups) or (),
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
