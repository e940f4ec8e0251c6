"""FlashInfer's managed store: one small JSON file an entry, in a folder named after the environment.

::

    <root>/v2/<environment hash>/manifest.json
                                 entries/<hash of the key>.json

Format: ``ManagedAutotuneCache``, ``flashinfer/autotune_cache.py``, 0.7.0 to 0.7.4. FlashInfer
never reads the manifest: it computes the hash from its own facts and looks into that folder. It
takes a bad entry for a miss, so here a bad entry is a line among the problems, never an exception.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from .deadline import Deadline
from .entry import Entry
from .environment import Environment
from .errors import CacheError, FormatError, UsageError
from .flashinfer_json import MAX_ENTRIES
from .json_document import decode_json, naming
from .key import Profile
from .managed_entry import (
    MAX_ENTRY_BYTES,
    MAX_ENTRY_NESTING,
    ProtocolRecord,
    entry_file,
    json_bytes,
    read_entry,
    record_file,
)
from .managed_files import create_files
from .measurement_policy import MeasurementPolicy

__all__ = [
    "ManagedStore",
    "StoreContents",
    "StoreEnvironment",
    "WriteReport",
    "environment_folder",
    "environment_folders",
    "environment_hash",
    "read_entries",
    "read_folder",
    "read_store",
    "write_entries",
]

_SCHEMA = "v2"
_MANIFEST = "manifest.json"
_MISPLACED = "FlashInfer finds these entries with other facts, which nobody knows: tune again"
_ENVIRONMENT_HASH = re.compile(r"[0-9a-f]{16}")


class StoreEnvironment(Struct, frozen=True):
    """One environment's folder in a store.

    ``env_hash`` is the folder's name, ``manifest`` the facts as they stand in the file.
    ``problems`` is not empty where they contradict each other: then nobody can say where the
    entries were tuned.
    """

    path: Path
    env_hash: str
    environment: Environment
    policy: MeasurementPolicy
    manifest: Mapping[str, str]
    problems: tuple[str, ...] = ()


class ManagedStore(Struct, frozen=True):
    """The environments of a store, by hash, and one line for each folder that can't be read."""

    path: Path
    environments: tuple[StoreEnvironment, ...]
    problems: tuple[str, ...] = ()


class StoreContents(Struct, frozen=True):
    """One environment's entries and records, and one line for each file that FlashInfer would not serve.

    ``digest`` is the sha256 of the names and bytes of all its files, ``modified`` the time of the last change of
    one (Unix seconds).
    """

    entries: tuple[Entry, ...]
    records: tuple[ProtocolRecord, ...]
    problems: tuple[str, ...] = ()
    digest: str = ""
    modified: float = 0.0


class WriteReport(Struct, frozen=True):
    """How many entries and records were ``written``, and how many not, since what was there was ``kept``."""

    path: Path
    written: int
    kept: int


def environment_hash(manifest_fields: Mapping[str, str]) -> str:
    """The name of an environment's folder, as FlashInfer computes it.

    Parameters
    ----------
    manifest_fields
        The facts and the measurement policy's fields; ``cache_schema`` is added.
    """
    fields = {**manifest_fields, "cache_schema": _SCHEMA}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()[:16]


def environment_folder(root: str | Path, environment: Environment, policy: MeasurementPolicy) -> Path:
    """Where FlashInfer in that environment and policy looks for entries; there or not.

    Raises UsageError for undetermined facts.
    """
    return Path(root) / _SCHEMA / environment_hash(_manifest(environment, policy))


def _manifest(environment: Environment, policy: MeasurementPolicy) -> dict[str, str]:
    if undetermined := environment.undetermined():
        raise UsageError(
            f"can't name the store's folder: {', '.join(undetermined)} not known", "give every fact with --environment"
        )
    return {**environment.metadata(), **policy.manifest_fields(), "cache_schema": _SCHEMA}


def environment_folders(root: Path) -> tuple[Path, ...] | None:
    """The folders in a root that are named like an environment's, sorted; None where there is no store.

    Raises OSError if they can't be listed.
    """
    below = root / _SCHEMA
    if not below.is_dir():
        return None
    return tuple(sorted(folder for folder in below.iterdir() if _ENVIRONMENT_HASH.fullmatch(folder.name)))


def read_store(path: str | Path) -> ManagedStore:
    """Find the environments of a store. Does not read entries; :func:`read_entries` does.

    Parameters
    ----------
    path
        The store's root, its ``v2`` folder, or one environment's folder. Links that lead out of
        it are not followed.

    Raises
    ------
    UsageError
        None of the three, or it can't be read.
    """
    root = Path(os.path.realpath(path))
    try:
        folders = _named_folders(root)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}", "check the path and its permissions") from None
    environments: list[StoreEnvironment] = []
    problems: list[str] = []
    for folder in folders:
        try:
            environment = _read_environment(folder, root)
        except FormatError as error:
            problems.append(str(error))
            continue
        environments.append(environment)
    return ManagedStore(root, tuple(environments), tuple(problems))


def _named_folders(root: Path) -> tuple[Path, ...]:
    if (root / _MANIFEST).is_file():
        return (root,)
    folders = environment_folders(root.parent if root.name == _SCHEMA else root)
    if folders is None:
        raise UsageError(
            f"{root} is not a managed store of FlashInfer",
            f"give the folder that holds {_SCHEMA}, or one environment's folder with its {_MANIFEST}",
        )
    return folders


def _read_environment(folder: Path, root: Path) -> StoreEnvironment:
    path = folder / _MANIFEST
    _refuse_link_out(folder, root)
    manifest = decode_json(
        _read_file(path, folder)[0], max_bytes=MAX_ENTRY_BYTES, max_nesting=MAX_ENTRY_NESTING, source=str(path)
    )
    with naming(str(path)):
        if not isinstance(manifest, dict) or not all(isinstance(value, str) for value in manifest.values()):
            raise FormatError("not an object of strings", "tune again into an empty store")
        policy = {name: value for name, value in manifest.items() if name.startswith("measure_")}
        facts = {name: value for name, value in manifest.items() if name not in policy and name != "cache_schema"}
        expected = environment_hash(manifest)
        return StoreEnvironment(
            path=folder,
            env_hash=folder.name,
            environment=Environment.from_metadata(facts),
            policy=MeasurementPolicy.from_fields(policy),
            manifest=manifest,
            problems=() if folder.name == expected else (f"{path}: its facts have the hash {expected}; {_MISPLACED}",),
        )


def read_entries(environment: StoreEnvironment) -> StoreContents:
    """Read all entries of one environment; see :func:`read_folder`."""
    return read_folder(environment.path)


def read_folder(path: Path) -> StoreContents:
    """Read all entries of one environment's folder, in the order of their files' names.

    Never raises for what a file holds: every file that is not an entry FlashInfer serves gives a
    line in ``problems``. Files that don't end in ``.json`` (temporary ones) are passed over.
    """
    entries: list[Entry] = []
    records: list[ProtocolRecord] = []
    problems: list[str] = []
    digest, modified = hashlib.sha256(), 0.0
    folder = path / "entries"
    try:
        _refuse_link_out(folder, path)
        files = sorted(file for file in folder.iterdir() if file.suffix == ".json")
    except FileNotFoundError:
        files = []
    except (FormatError, OSError) as error:
        return StoreContents((), (), (f"{folder} can't be listed: {error}",))
    if len(files) > MAX_ENTRIES:
        problems.append(f"{path}: of {len(files)} entries only {MAX_ENTRIES} are read")
    for file in files[:MAX_ENTRIES]:
        try:
            data, changed = _read_file(file, path)
            digest.update(os.fsencode(file.name) + b"\0%d\0" % len(data) + data)
            modified = max(modified, changed)
            found = read_entry(data, file.name, source=str(file))
        except FormatError as error:
            problems.append(str(error))
            continue
        if isinstance(found, Entry):
            entries.append(found)
        else:
            records.append(found)
    return StoreContents(tuple(entries), tuple(records), tuple(problems), digest.hexdigest(), modified)


def _refuse_link_out(path: Path, inside: Path) -> None:
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(inside)):
        raise FormatError("a link that leaves the store is not followed", "copy what it leads to", source=str(path))


def _read_file(path: Path, inside: Path) -> tuple[bytes, float]:
    """The bytes and the time of the last change."""
    try:
        _refuse_link_out(path, inside)
        if not path.is_file():
            raise FormatError("missing, or not a file", "remove it, or tune again", source=str(path))
        status = path.stat()
        if status.st_size > MAX_ENTRY_BYTES:
            raise FormatError(f"{status.st_size} bytes are more than {MAX_ENTRY_BYTES}", "remove it", source=str(path))
        return path.read_bytes(), status.st_mtime
    except OSError as error:
        raise FormatError(f"can't be read: {error.strerror}", "check its permissions", source=str(path)) from None


def write_entries(
    root: str | Path,
    environment: Environment,
    policy: MeasurementPolicy,
    entries: Iterable[Entry],
    records: Iterable[ProtocolRecord] = (),
    mark: str | None = None,
    deadline: Deadline | None = None,
) -> WriteReport:
    """Add entries to a store, where FlashInfer in that environment and policy will find them.

    Never replaces or removes anything: where a name is taken, be it by another process in this
    moment, what is there stays. Of the given entries for one op and shape all are written or none,
    since FlashInfer serves the first runner that has one, whichever was meant to win. A reader sees
    a whole file or none (where the file system has no hard links, for a moment a part). Nothing is
    synced to the disk: after a loss of power an entry may be empty, which FlashInfer takes for a
    miss. A process of FlashInfer that has already missed a key does not look again.

    Parameters
    ----------
    root
        The folder that holds ``v2``; made where it is missing.
    environment, policy
        Name the folder. All facts must be determined.
    entries, records
        A ``selection`` is not kept, except a mark of ours in it: a managed store has no place for it.
    mark
        Written into every file in the place of any mark it has: the name of the bundle it comes from.
    deadline
        When to stop; what is written then stays.

    Raises
    ------
    UsageError
        Undetermined facts: FlashInfer would look into another folder.
    FormatError
        An entry that could not be read back, for its size or because JSON has no form for a tactic or
        value; nothing is written then.
    CacheError
        The disk refuses, or the deadline is over. Entries that are written already stay; no temporary file does.
    """
    manifest = _manifest(environment, policy)
    folder = environment_folder(root, environment, policy)
    shapes: dict[tuple[str, Profile], dict[Path, bytes]] = {}
    for entry in entries:
        shape = shapes.setdefault(entry.key.shape, {})
        shape.setdefault(*_file(folder, entry_file(entry, mark)))
    groups = [*shapes.values(), *(dict([_file(folder, record_file(record, mark))]) for record in records)]
    try:
        (folder / "entries").mkdir(parents=True, exist_ok=True)
        create_files({folder / _MANIFEST: json_bytes(manifest)})
        written = 0
        for files in groups:
            if deadline is not None and not deadline.remaining():
                raise CacheError(
                    f"{folder} is too slow: {written:,} of {sum(map(len, groups)):,} entries are written in time",
                    "write them before the start, with `fi-tunecache pull --to flashinfer`",
                )
            written += len(files) if create_files(files) else 0
    except CacheError:
        raise
    except OSError as error:
        raise CacheError(
            f"{error.filename or folder} can't be written: {error.strerror}",
            "free space, check the permissions, or name another folder",
        ) from error
    return WriteReport(folder, written, sum(map(len, groups)) - written)


def _file(folder: Path, file: tuple[str, bytes]) -> tuple[Path, bytes]:
    name, data = file
    if len(data) > MAX_ENTRY_BYTES:
        raise FormatError(f"an entry of {len(data)} bytes is more than {MAX_ENTRY_BYTES}", "leave it out")
    return folder / "entries" / name, data
