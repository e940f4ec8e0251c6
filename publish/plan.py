"""The plan of a publication: what a commit will add to a registry, and what not. Pure: no I/O, no clock."""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from fi_tunecache.bundle import Bundle, read_bundle, write_bundle
from fi_tunecache.environment import Environment
from fi_tunecache.errors import UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import BundleRow, describe_bundle
from fi_tunecache.measurement_policy import MeasurementPolicy
from fi_tunecache.verdict import Verdict
from fi_tunecache.wording import plural

from .comparison import Comparison, compare
from .conflicts import Conflict
from .gather import Gathered
from .left_out import LeftOut, summarise
from .published import Published, PublishedBundle

__all__ = ["OpCounts", "OpenConflictsError", "Plan", "PlannedBundle", "Status", "make_plan"]


class OpenConflictsError(UsageError):
    """Sources disagree, and no rule says which counts; the message shows the first of ``conflicts``."""

    def __init__(self, conflicts: Sequence[Conflict], problem: str, next_step: str = "") -> None:
        super().__init__(problem, next_step)
        self.conflicts = tuple(conflicts)


class Status(str, enum.Enum):
    """``new``: a bundle will be added. ``unchanged``: there is nothing to add."""

    NEW = "new"
    UNCHANGED = "unchanged"


class OpCounts(Struct, frozen=True):
    """The entries of one op: not published yet, published with another answer, published just so, left out."""

    custom_op: str
    new: int = 0
    changed: int = 0
    unchanged: int = 0
    left_out: int = 0


class PlannedBundle(Struct, frozen=True, kw_only=True):
    """What becomes of one environment and policy, or of one bundle that was given.

    ``row`` and ``data`` are those of the bundle that will be added, None where nothing will be.
    ``new_lookups`` counts recorded lookups that are not published yet; ``held_by`` are the ids of the published
    bundles that have the unchanged entries. ``same`` counts entries that several sources have just so. ``verdict``
    is what a client in the same environment will make of the bundle, beside what is published.
    """

    folder: Folder
    status: Status
    environment: Environment
    policy: MeasurementPolicy
    sources: tuple[str, ...]
    ops: tuple[OpCounts, ...]
    same: int
    new_lookups: int = 0
    left_out: tuple[LeftOut, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    held_by: tuple[str, ...] = ()
    row: BundleRow | None = None
    data: bytes | None = None
    verdict: Verdict | None = None

    def builtins(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "folder": str(self.folder),
            "status": self.status.value,
            "environment": self.environment.metadata(),
            "policy": self.policy.manifest_fields(),
            "sources": list(self.sources),
            "file": None if self.row is None else self.row.file,
            "sha256": None if self.row is None else self.row.sha256,
            "bytes": 0 if self.row is None else self.row.size,
            "entries": 0 if self.row is None else self.row.entry_count,
            "lookups": 0 if self.row is None else self.row.lookups,
            "default_raced": None if self.row is None else self.row.default_raced,
            "round_trip": None if self.row is None else self.row.round_trip,
            "client": None
            if self.verdict is None
            else {"taken": self.verdict.taken, "elsewhere": self.verdict.elsewhere, "line": str(self.verdict)},
            "ops": [msgspec.to_builtins(counts) for counts in self.ops],
            "new_lookups": self.new_lookups,
            "same": self.same,
            "held_by": list(self.held_by),
            "left_out": [line.builtins() for line in self.left_out],
            "conflicts": [conflict.builtins() for conflict in self.conflicts],
        }


class Plan(Struct, frozen=True):
    """All that a publication will do; what a commit needs are ``rows`` and ``files``."""

    bundles: tuple[PlannedBundle, ...]

    @property
    def new(self) -> tuple[PlannedBundle, ...]:
        return tuple(item for item in self.bundles if item.status is Status.NEW)

    @property
    def rows(self) -> dict[Folder, tuple[BundleRow, ...]]:
        """The manifest rows to add."""
        rows: dict[Folder, tuple[BundleRow, ...]] = {}
        for item in self.bundles:
            if item.row is not None:
                rows[item.folder] = (*rows.get(item.folder, ()), item.row)
        return rows

    @property
    def files(self) -> dict[str, bytes]:
        """The bytes of the bundles to add, by their path in the registry."""
        return {
            f"{item.folder}/{item.row.file}": item.data
            for item in self.bundles
            if item.row is not None and item.data is not None
        }

    def checked(self, round_trips: Mapping[str, str]) -> Plan:
        """The plan with what checked each new bundle written into its row; ``round_trips`` is by path, as ``files``."""

        def check(item: PlannedBundle) -> PlannedBundle:
            if item.row is None:
                return item
            row = msgspec.structs.replace(item.row, round_trip=round_trips[f"{item.folder}/{item.row.file}"])
            return msgspec.structs.replace(item, row=row)

        return Plan(tuple(map(check, self.bundles)))

    def builtins(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "new": len(self.new),
            "unchanged": len(self.bundles) - len(self.new),
            "entries": sum(row.entry_count for rows in self.rows.values() for row in rows),
            "bytes": sum(map(len, self.files.values())),
            "bundles": [item.builtins() for item in self.bundles],
        }


def make_plan(gathered: Iterable[Gathered], published: Published) -> Plan:
    """Compare what was gathered with what is published, and say what to add.

    Where nothing is new or changed, or where the same sources are published already, nothing is added.

    Parameters
    ----------
    published
        As read from the registry that is published to, see :func:`~fi_tunecache.publish.published.read_published`.

    Raises
    ------
    UsageError
        A conflict is open (an OpenConflictsError has them all); what is to be added is published and yanked; no
        folder can have a version or a device.
    FormatError
        More entries or bytes than a bundle may have.
    """
    gathered = tuple(gathered)
    _refuse_open_conflicts([item for group in gathered for item in group.conflicts if item.chosen is None])
    return Plan(tuple(_plan(group, published.comparable(group.environment, group.policy)) for group in gathered))


def _refuse_open_conflicts(conflicts: Sequence[Conflict]) -> None:
    if conflicts:
        raise OpenConflictsError(
            conflicts,
            f"sources have different answers to {plural(len(conflicts), 'key')}, the first {conflicts[0]}",
            "decide with --on-conflict fastest or newest, or leave a source out",
        )


def _plan(gathered: Gathered, published: Sequence[PublishedBundle]) -> PlannedBundle:
    left_out, comparison, row, data = gathered.left_out, None, None, None
    if gathered.bundle is not None:
        _refuse_yanked(gathered, gathered.bundle, published)
        standing = [item for item in published if item.row is not None and item.row.yanked is None]
        comparison = compare(gathered.bundle, standing, as_it_is=gathered.data is not None)
        left_out = (*left_out, *summarise(comparison.left_out))
        if comparison.adds:
            data, sha256 = write_bundle(comparison.bundle)
            row = describe_bundle(read_bundle(data), data, sha256)  # as read again: a bundle keeps the rules
    return PlannedBundle(
        folder=Folder.of(gathered.environment),
        status=Status.UNCHANGED if row is None else Status.NEW,
        environment=gathered.environment,
        policy=gathered.policy,
        sources=gathered.sources,
        ops=_op_counts(comparison, left_out),
        same=gathered.same,
        new_lookups=0 if comparison is None else comparison.new_lookups,
        left_out=left_out,
        conflicts=gathered.conflicts,
        held_by=() if comparison is None else comparison.held_by,
        row=row,
        data=data,
        verdict=None if comparison is None or row is None else comparison.verdict,
    )


def _refuse_yanked(gathered: Gathered, bundle: Bundle, published: Sequence[PublishedBundle]) -> None:
    """A bundle that was yanked must not come back, be it itself or gathered again from one of its sources."""
    sha256 = None if gathered.data is None else hashlib.sha256(gathered.data).hexdigest()
    digests = {*bundle.provenance.digests} if gathered.data is None else set()
    for item in published:
        if item.row is None or item.row.yanked is None:
            continue
        if item.row.sha256 == sha256 or digests & {*item.bundle.provenance.digests}:
            more = f" and {len(gathered.sources) - 1} more" if len(gathered.sources) > 1 else ""
            raise UsageError(
                f"{gathered.sources[0]}{more} can't be published: it went into bundle {item.bundle_id}, which was "
                f"yanked on {item.row.yanked.date}: {item.row.yanked.reason}",
                "tune again, and leave this source out",
            )


def _op_counts(comparison: Comparison | None, left_out: Iterable[LeftOut]) -> tuple[OpCounts, ...]:
    new, changed, unchanged = (
        Counter(entry.key.custom_op for entry in entries)
        for entries in (
            ((), (), ()) if comparison is None else (comparison.new, comparison.changed, comparison.unchanged)
        )
    )
    dropped: Counter[str] = Counter()
    for line in left_out:
        if line.runner:
            dropped[line.custom_op] += line.entries
    return tuple(
        OpCounts(op, new[op], changed[op], unchanged[op], dropped[op])
        for op in sorted({*new, *changed, *unchanged, *dropped})
    )
