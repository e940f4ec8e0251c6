"""A source of tuning results: whatever holds entries, read into one shape."""

from __future__ import annotations

import enum
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from .bundle import MARK, Provenance, read_bundle
from .bundled_module import MAX_MODULE_BYTES, read_bundled_module
from .entry import Entry, LegacyEntry, Lookup
from .environment import Environment
from .errors import FormatError, UsageError
from .flashinfer_json import MAX_FILE_BYTES, read_cache_file
from .json_document import repeated_names
from .managed_store import read_entries, read_store
from .measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from .wording import count_entries, plural

__all__ = ["Section", "Source", "SourceKind", "read_source"]


class SourceKind(str, enum.Enum):
    """What a source is."""

    CACHE_FILE = "FlashInfer v1 file"
    BUNDLE = "bundle"
    PULLED = "v1 file made by fi-tunecache"
    STORE = "FlashInfer managed store"
    MODULE = "module bundled with FlashInfer"


class Section(Struct, frozen=True, kw_only=True):
    """The entries of one environment and one measurement policy.

    ``environment`` is None where the source does not name it; ``policy`` is the default where the
    format has no place for it. ``records`` counts the results of operations that tune themselves.
    ``provenance`` and ``default_raced`` are a bundle's. ``problems`` are lines, one for each thing
    that FlashInfer would not serve. ``digest`` is the sha256 of the file, or of the names and bytes of the
    files of a store's environment, ``modified`` the time of its last change (Unix seconds). ``bundles``
    are those that a file made by fi-tunecache names as where it comes from.
    """

    name: str
    environment: Environment | None
    policy: MeasurementPolicy = DEFAULT_POLICY
    entries: tuple[Entry, ...] = ()
    legacy: tuple[LegacyEntry, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    records: int = 0
    provenance: Provenance | None = None
    default_raced: bool | None = None
    problems: tuple[str, ...] = ()
    digest: str = ""
    modified: float = 0.0
    bundles: tuple[str, ...] = ()


class Source(Struct, frozen=True):
    """All sections of a source, and problems that belong to none of them."""

    path: Path
    kind: SourceKind
    sections: tuple[Section, ...]
    problems: tuple[str, ...] = ()


def read_source(path: Path) -> Source:
    """Read a v1 file, a bundle, a managed store (root or one environment) or a bundled module.

    Parameters
    ----------
    path
        A directory is a store; a file is what it holds.

    Raises
    ------
    UsageError
        Nothing there, it can't be read, or it is nothing of the sort.
    FormatError
        It is of the sort but malformed.
    """
    try:
        data, modified = _read_file(path)
    except IsADirectoryError:
        return _read_store(path)
    if path.suffix == ".py":
        legacy = read_bundled_module(data[: MAX_MODULE_BYTES + 1], source=str(path))
        section = Section(
            name=path.name,
            environment=None,
            legacy=legacy,
            problems=(f"{plural(len(legacy), 'key')} without extras: {LegacyEntry.STATEMENT}",),
        )
        return Source(path, SourceKind.MODULE, (section,))
    return _read_cache_file(path, data, modified)


def _read_file(path: Path) -> tuple[bytes, float]:
    """The bytes and the time of the last change."""
    try:
        if path.is_fifo():  # opening one would wait for its writer
            raise UsageError(f"{path} is a pipe", "name a v1 file, a store, a bundle or a bundled module")
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_size > MAX_FILE_BYTES:
                raise FormatError(
                    f"{status.st_size} bytes are more than {MAX_FILE_BYTES}", "check what wrote it", source=str(path)
                )
            return stream.read(MAX_FILE_BYTES + 1), status.st_mtime
    except IsADirectoryError:
        raise
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", "name a v1 file, a store, a bundle or a bundled module") from None
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror})", "check its permissions") from error


def _read_store(path: Path) -> Source:
    store = read_store(path)
    sections = []
    for environment in store.environments:
        contents = read_entries(environment)
        sections.append(
            Section(
                name=environment.env_hash,
                environment=environment.environment,
                policy=environment.policy,
                entries=contents.entries,
                records=len(contents.records),
                problems=(*environment.problems, *contents.problems, *_entry_problems(contents.entries)),
                digest=contents.digest,
                modified=contents.modified,
            )
        )
    return Source(path, SourceKind.STORE, tuple(sections), store.problems)


def _read_cache_file(path: Path, data: bytes, modified: float) -> Source:
    file = read_cache_file(data, source=str(path))
    digest = hashlib.sha256(data).hexdigest()
    ours = (file.metadata or {}).get(MARK)
    if isinstance(ours, Mapping) and "provenance" in ours:
        bundle = read_bundle(data, source=str(path))
        section = Section(
            name=path.name,
            environment=bundle.environment,
            policy=bundle.policy,
            entries=tuple(bundle.entries.values()),
            lookups=bundle.lookups,
            provenance=bundle.provenance,
            default_raced=bundle.default_raced,
            problems=tuple(_entry_problems(file.entries)),
            digest=digest,
            modified=modified,
        )
        return Source(path, SourceKind.BUNDLE, (section,))
    problems = _entry_problems(file.entries)
    problems += [f"{name[:200]} stands there twice, and the last counts" for name in repeated_names(data)]
    if file.legacy:
        problems.insert(0, f"{plural(len(file.legacy), 'key')} without extras: {LegacyEntry.STATEMENT}")
    environment, said = _environment(file.metadata)
    section = Section(
        name=path.name,
        environment=environment,
        entries=file.entries,
        legacy=file.legacy,
        records=len(file.records),
        problems=(*said, *problems),
        digest=digest,
        modified=modified,
        bundles=_bundles(ours),
    )
    return Source(path, SourceKind.CACHE_FILE if ours is None else SourceKind.PULLED, (section,))


def _bundles(mark: object) -> tuple[str, ...]:
    """The ids of the bundles that the mark of a pulled file names."""
    named = mark.get("bundles") if isinstance(mark, Mapping) else None
    digests = re.findall(r"\b[0-9a-f]{64}\b", " ".join(map(str, named)) if isinstance(named, list) else "")
    return tuple(dict.fromkeys(digest[:16] for digest in digests))


def _environment(metadata: Mapping[str, Any] | None) -> tuple[Environment | None, tuple[str, ...]]:
    """The facts, and what FlashInfer would make of them."""
    if metadata is None:
        return None, ("no _metadata: FlashInfer accepts the file blindly, on any GPU and any version",)
    try:
        environment = Environment.from_metadata(metadata)
    except FormatError as error:
        return None, (str(error),)
    if undetermined := environment.undetermined():
        line = f"{', '.join(undetermined)} not known: FlashInfer ignores the file and replaces it at its next save"
        return environment, (line,)
    return environment, ()


def _entry_problems(entries: tuple[Entry, ...]) -> list[str]:
    """What FlashInfer loads and never serves, or does not load: a line for each sort."""
    problems = []
    mismatched = [entry for entry in entries if entry.runner != entry.key.runner]
    if mismatched:
        first = mismatched[0]
        problems.append(
            f"{count_entries(len(mismatched))} with another runner than in the key, never served, "
            f"e.g. {first.runner} at {first.key.text[:120]}"
        )
    ordinal = sum(entry.is_cudnn_ordinal for entry in entries)
    if ordinal:
        problems.append(
            f"{count_entries(ordinal)} of cuDNN with a plan's position as tactic, dropped by FlashInfer since 0.6.16"
        )
    return problems
