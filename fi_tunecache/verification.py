"""Check that a registry, a bundle or the user cache is what it should be: every problem, one line each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from msgspec import Struct

from .bundle import read_bundle
from .errors import FiTuneCacheError, FormatError
from .folder import Folder
from .manifest import BundleRow, describe_bundle
from .registry import Registry
from .selection import read_selection
from .source import read_source
from .user_cache import UserCache
from .workload_record import read_record

__all__ = ["Report", "verify_cache", "verify_file", "verify_registry"]

_NOT_IN_A_BUNDLE = ("benefit", "round_trip", "yanked")
"""What only a manifest's row tells, so that it can't be compared."""


class Report(Struct, frozen=True):
    """How many things of which sort were checked (``file`` or ``entry``), and what is wrong with them."""

    checked: int
    problems: tuple[str, ...]
    sort: str = "file"


def verify_registry(registry: Registry) -> Report:
    """Check the descriptor, each manifest, and each bundle's hash, schema and row. Does not stop at a problem."""
    checked = 1
    problems = list(_problem(registry.descriptor))
    for folder in registry.folders():
        checked += 1
        try:
            rows = registry.manifest(folder).bundles
        except FiTuneCacheError as error:
            problems.append(str(error))
            continue
        for row in rows:
            checked += 1
            problems += _verify_row(registry, folder, row)
    return Report(checked, tuple(problems))


def _verify_row(registry: Registry, folder: Folder, row: BundleRow) -> list[str]:
    try:
        data = registry.bundle_bytes(folder, row)
        described = describe_bundle(registry.bundle(folder, row, data), data, row.sha256)
    except FiTuneCacheError as error:
        return [str(error)]
    told = [name for name in row.__struct_fields__ if name not in _NOT_IN_A_BUNDLE]
    wrong = [name for name in told if getattr(row, name) != getattr(described, name)]
    where = f"{registry.name}/{folder}/{row.file}"
    return [f"{where}: the manifest is wrong about its {', '.join(wrong)}; tell the publisher"] if wrong else []


def verify_file(path: Path) -> Report:
    """Check a bundle, a v1 file or a store as :func:`~fi_tunecache.source.read_source` reads it."""
    try:
        source = read_source(path)
    except FormatError as error:
        return Report(1, (str(error),))
    problems = [*source.problems, *(problem for section in source.sections for problem in section.problems)]
    entries = sum(len(section.entries) + len(section.legacy) for section in source.sections)
    return Report(entries, tuple(problems), "entry")


def verify_cache(cache: UserCache) -> Report:
    """Check each cached bundle against the hash in its name, each selection against its digest, and the records."""
    checked = 0
    problems: list[str] = []
    for file in cache.files():
        name = file.path.name
        if file.kind == "bundles" and file.path.suffix == ".json":
            checked += 1
            problems += _problem(partial(_check_bundle, cache, file.path))
        elif file.kind == "selections" and name.endswith(".json") and not name.endswith(".resolution.json"):
            checked += 1
            problems += _problem(partial(_check_selection, cache, file.path))
        elif file.kind == "workloads" and file.path.suffix == ".json":
            checked += 1
            problems += _problem(partial(_check_record, cache, file.path))
        elif name.endswith(".corrupt"):
            problems.append(f"{file.path} was damaged and set aside; remove it when you have looked at it")
    return Report(checked, tuple(problems))


def _check_bundle(cache: UserCache, path: Path) -> None:
    data = cache.read(path) or b""
    if hashlib.sha256(data).hexdigest() != path.stem:
        raise FormatError("the file was changed", "the next pull sets it aside and makes it again", source=str(path))
    read_bundle(data, source=str(path))


def _check_selection(cache: UserCache, path: Path) -> None:
    selection = read_selection(cache.read(path) or b"", source=str(path))
    if selection.id != path.stem:
        raise FormatError("its id is not its name", "pull again", source=str(path))


def _check_record(cache: UserCache, path: Path) -> None:
    record = read_record(cache.read(path) or b"", source=str(path))
    if record.workload.id != path.stem:
        raise FormatError("its id is not its name", "record the workload again", source=str(path))


def _problem(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except FiTuneCacheError as error:
        yield str(error)
