"""Seeding: put a selection's entries into FlashInfer's managed store, and take them out again.

What FlashInfer has tuned itself is never replaced, removed or overruled. Of several runners it serves
the first in the caller's list that has an entry, so an entry of ours beside one of its own, under
another runner, could win over it. Hence the entries for one op and shape are seeded only where
nothing but what this selection holds is there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct

from .bundle import MARK
from .deadline import Deadline
from .entry import Entry
from .environment import Environment
from .errors import CacheError
from .managed_entry import entry_file_name
from .managed_files import finish_what_was_left, is_marked, remove_file
from .managed_store import environment_folder, environment_folders, read_folder, write_entries
from .measurement_policy import MeasurementPolicy
from .wording import plural

__all__ = [
    "Cleared",
    "Plan",
    "Seeded",
    "clear_store",
    "mark_of",
    "plan_seeding",
    "replaces_rivals",
    "seed_store",
    "withdraw",
]

_REPLACES_RIVALS = "0.7.4"
"""The first that takes other runners' entries out of a store when it tunes (``ManagedAutotuneCache.discard``)."""

_PERMISSIONS = "check its permissions, or name another folder"


class Plan(Struct, frozen=True):
    """What is to be done with a selection's entries.

    ``missing`` are to be written; ``kept`` counts those in whose place, or beside which, stands
    something of FlashInfer's own, ``skipped`` those that were seeded before. ``outdated`` counts the
    entries that are there, marked by us, and not what the selection holds.
    """

    missing: tuple[Entry, ...]
    kept: int
    skipped: int
    outdated: int


class Seeded(Struct, frozen=True):
    """What :func:`seed_store` did in the folder ``path``.

    ``entries`` are those that were seeded now, or by somebody else in this moment;
    ``seeded``, ``kept`` and ``skipped`` add up to the selection's entries; they and ``outdated`` are as
    in a :class:`Plan`. ``problems`` are lines, one for each file there that FlashInfer would not serve.
    """

    path: Path
    seeded: int
    kept: int
    skipped: int
    outdated: int
    problems: tuple[str, ...]
    entries: tuple[Entry, ...] = ()


class Cleared(Struct, frozen=True):
    """What :func:`clear_store` did: (environment's folder, number of entries removed) where there were any.

    ``found`` tells whether there is a store. ``problems`` are lines, one for each folder that leads out
    of the store, or holds what can't be read; that was passed over.
    """

    root: Path
    found: bool
    removed: tuple[tuple[Path, int], ...] = ()
    problems: tuple[str, ...] = ()


def replaces_rivals(flashinfer_version: str) -> bool:
    """Whether that FlashInfer, when it tunes again what a store has, drops the entries of the runners that lost.

    Elsewhere an entry that is to be tuned again must not be seeded: it could be served in the place of the winner.
    """
    from packaging.version import Version

    return Version(flashinfer_version) >= Version(_REPLACES_RIVALS)


def plan_seeding(entries: Iterable[Entry], present: Iterable[Entry]) -> Plan:
    """Decide which entries of a selection to write beside those that are present.

    Parameters
    ----------
    entries
        The selection's, each marked with its bundle.
    present
        The store's, for the same environment and measurement policy.
    """
    wanted = {entry.key.text: entry for entry in entries}
    bundles = [*dict.fromkeys(map(mark_of, wanted.values()))]
    marked, own, old, outdated = set(), set(), set(), 0
    for entry in present:
        mine, mark = wanted.get(entry.key.text), mark_of(entry)
        if mark is None:
            own.add(entry.key.shape)
            continue
        marked.add(entry.key.text)
        if mine is None or mark not in bundles or _answer(mine) != _answer(entry):
            old.add(entry.key.shape)
            outdated += 1
    missing, kept, skipped = [], 0, 0
    for text, entry in wanted.items():
        if text in marked:
            skipped += 1
        elif entry.key.shape in own:
            kept += 1
        elif entry.key.shape in old:
            skipped += 1
        else:
            missing.append(entry)
    return Plan(tuple(missing), kept, skipped, outdated)


def mark_of(entry: Entry) -> Any:
    """The name of the bundle that an entry was taken from; None of one of FlashInfer's own."""
    return (entry.selection or {}).get(MARK)


def _answer(entry: Entry) -> tuple[object, ...]:
    return entry.runner, entry.tactic, entry.policy


def seed_store(
    root: Path,
    environment: Environment,
    policy: MeasurementPolicy,
    entries: Iterable[Entry],
    deadline: Deadline | None = None,
) -> Seeded:
    """Put a selection's entries where FlashInfer in that environment and policy will find them.

    Never replaces anything, and writes nothing where all is there. What FlashInfer publishes in this
    moment, under another runner, is not seen.

    Parameters
    ----------
    root
        The store's root; made where it is missing.
    environment, policy
        All facts must be determined, the fingerprint whole.
    entries
        Each marked with its bundle.
    deadline
        When to stop; what is seeded then stays.

    Raises
    ------
    UsageError
        Undetermined facts.
    FormatError
        An entry that a managed store has no form for; nothing is written then.
    CacheError
        The disk refuses, a link leads out of the store, or the deadline is over. What was seeded before stays.
    """
    folder = environment_folder(root, environment, policy)
    if _leads_out(folder / "entries", root):
        raise CacheError(
            f"{folder / 'entries'} leads out of the store by a link",
            "name the root that it leads to, --to flashinfer:DIR",
        )
    with contextlib.suppress(OSError):  # a store that can't be written may hold everything
        _finish(folder)
    entries, seeded = tuple(entries), 0
    before: tuple[Entry, ...] = ()
    tried: dict[str, Entry] = {}
    while True:
        present = read_folder(folder)
        plan = plan_seeding(entries, present.entries)
        skipped = max(plan.skipped - seeded, 0)
        tried.update((entry.key.text, entry) for entry in plan.missing)
        written = (
            write_entries(root, environment, policy, plan.missing, deadline=deadline).written if plan.missing else 0
        )
        seeded += written
        if written == len(plan.missing) or plan.missing == before:
            kept = plan.kept + len(plan.missing) - written
            return Seeded(folder, seeded, kept, skipped, plan.outdated, present.problems, tuple(tried.values()))
        before = plan.missing  # somebody was faster, or what has the name is no entry: look again


def withdraw(seeded: Seeded) -> None:
    """Remove the entries that were seeded, as far as they still bear our mark. Raises CacheError."""
    try:
        for entry in seeded.entries:
            remove_file(seeded.path / "entries" / entry_file_name(entry.key.text), is_marked)
    except OSError as error:
        raise CacheError(f"{error.filename} can't be removed ({error.strerror})", _PERMISSIONS) from error


def clear_store(root: Path) -> Cleared:
    """Remove the entries that bear our mark, in every environment of a store, and nothing else.

    An entry that FlashInfer replaces by its own in this moment stays, also if this process is killed:
    then the next seeding or clearing puts it back. Folders and manifests stay. No link is followed
    out of the store.

    Raises
    ------
    CacheError
        The disk refuses. What was removed before is gone.
    """
    root = Path(os.path.realpath(root))
    removed: list[tuple[Path, int]] = []
    problems: list[str] = []
    try:
        folders = environment_folders(root)
        for folder in folders or ():
            if _leads_out(folder / "entries", root):
                problems.append(f"{folder / 'entries'} leads out of the store by a link, which is not followed")
                continue
            if count := _clear(folder):
                removed.append((folder, count))
            if unread := [path for path in _files(folder) if not os.access(path, os.R_OK, effective_ids=True)]:
                problems.append(f"{plural(len(unread), 'file')} can't be read, seeded or not, e.g. {unread[0]}")
    except OSError as error:
        raise CacheError(f"{error.filename or root} can't be cleared ({error.strerror})", _PERMISSIONS) from error
    return Cleared(root, folders is not None, tuple(removed), tuple(problems))


def _clear(folder: Path) -> int:
    removed = _finish(folder)
    try:
        for path in _files(folder):
            removed += remove_file(path, is_marked)
    except BaseException:
        with contextlib.suppress(OSError):
            _finish(folder)
        raise
    return removed


def _files(folder: Path) -> list[Path]:
    return sorted((folder / "entries").glob("*.json"))


def _finish(folder: Path) -> int:
    return sum(finish_what_was_left(path) for path in (folder, folder / "entries") if path.is_dir())


def _leads_out(path: Path, root: Path) -> bool:
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))
