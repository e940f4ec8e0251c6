"""The manifest: the bundles for one FlashInfer version and one device; and the registry descriptor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Struct

from .bundle import Bundle, Workload, bundle_file_name, check_date, check_texts
from .environment import Environment
from .errors import FormatError, UsageError
from .flashinfer_json import MAX_ENTRIES
from .folder import Folder
from .json_document import decode_json, naming
from .measurement_policy import MeasurementPolicy
from .registry_tree import MAX_BUNDLE_BYTES, MAX_MANIFEST_BYTES

__all__ = [
    "BundleRow",
    "Manifest",
    "RegistryDescriptor",
    "Yank",
    "describe_bundle",
    "entry_counts",
    "read_descriptor",
    "read_manifest",
    "write_descriptor",
    "write_manifest",
]

REGISTRY_FORMAT = 1
_MAX_ROWS = 10_000
_MAX_SERIAL = 10**9
_MAX_NESTING = 8

_FILE = re.compile(r"[0-9a-f]{16}\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Yank(Struct, frozen=True):
    """Why and when (UTC date) a bundle was marked unusable."""

    reason: str
    date: str

    def __post_init__(self) -> None:
        check_date(self.date)


_Count = Annotated[int, msgspec.Meta(ge=0, le=10 * MAX_ENTRIES)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class BundleRow(Struct, frozen=True, omit_defaults=True):
    """What a manifest says of one bundle: enough to decide whether it is worth fetching.

    ``size`` is in bytes, ``created`` a UTC date; ``entries`` counts them by custom op and runner
    class; ``benefit`` is the measured time of ours over the default's by custom op, where it was measured.
    ``round_trip`` names what loaded and served every entry before it was published: ``flashinfer 0.7.4``,
    or ``fi-tunecache 0.1.0`` where that FlashInfer was not at hand.
    """

    file: str
    sha256: str
    size: int
    created: str
    environment: dict[str, str]
    entries: dict[str, dict[str, _Count]]
    policy: dict[str, str] = {}
    lookups: _Count = 0
    default_raced: bool | None = None
    tuning_seconds: float | None = None
    benefit: dict[str, _Positive] = {}
    workload: Workload | None = None
    round_trip: str | None = None
    yanked: Yank | None = None

    def __post_init__(self) -> None:
        if not _FILE.fullmatch(self.file):
            raise FormatError(f"{self.file[:80]!r} is not a bundle's file name")
        if not _SHA256.fullmatch(self.sha256) or self.file != bundle_file_name(self.sha256):
            raise FormatError(f"{self.file}: its name is not the start of its sha256")
        if not 0 < self.size <= MAX_BUNDLE_BYTES:
            raise FormatError(f"{self.file}: a size of {self.size} bytes is not between 1 and {MAX_BUNDLE_BYTES}")
        check_date(self.created)

    @property
    def bundle_id(self) -> str:
        """The short name by which messages call the bundle: 16 hex digits."""
        return self.sha256[:16]

    @property
    def tuned_in(self) -> Environment:
        return Environment.from_metadata(self.environment)

    @property
    def measured_under(self) -> MeasurementPolicy:
        return MeasurementPolicy.from_fields(self.policy)

    @property
    def entry_count(self) -> int:
        return sum(count for runners in self.entries.values() for count in runners.values())


class Manifest(Struct, frozen=True):
    """All bundles of a :class:`Folder`, in the order in which they were published.

    ``serial`` counts the changes, so that an older manifest of a branch can be told from a newer one;
    ``notices`` are lines for whoever pulls from the folder.
    """

    bundles: tuple[BundleRow, ...] = ()
    format: int = REGISTRY_FORMAT
    serial: Annotated[int, msgspec.Meta(ge=0, le=_MAX_SERIAL)] = 0
    notices: tuple[str, ...] = ()

    def with_rows(self, rows: Iterable[BundleRow], *, after: int = 0) -> Manifest:
        """Add rows, or mark rows as yanked that are there; the manifest itself where that changes nothing.

        A row that is there stays as it is, unless it becomes yanked; nothing is ever taken away. So the
        order in which the rows of several publishers arrive does not matter, and adding them twice does no harm.
        A changed manifest has a higher serial than this one and than ``after``, which a serial must not be below.
        """
        found = {row.file: row for row in self.bundles}
        for row in rows:
            there = found.setdefault(row.file, row)
            if row.yanked and not there.yanked:
                found[row.file] = msgspec.structs.replace(there, yanked=row.yanked)
        bundles = tuple(found.values())
        if bundles == self.bundles and self.serial >= after:
            return self
        return msgspec.structs.replace(self, bundles=bundles, serial=max(self.serial, after) + 1)


class RegistryDescriptor(Struct, frozen=True):
    """``registry.json``: that this tree is a registry, and what its owner has to say."""

    name: str
    format: int = REGISTRY_FORMAT
    notices: tuple[str, ...] = ()


class _Format(Struct, frozen=True):
    format: Annotated[int, msgspec.Meta(ge=1)]


_Read = TypeVar("_Read", Manifest, RegistryDescriptor)


def _read(data: bytes, kind: type[_Read], source: str) -> _Read:
    document = decode_json(data, max_bytes=MAX_MANIFEST_BYTES, max_nesting=_MAX_NESTING, source=source)
    with naming(source):
        check_texts(document)
        try:
            found = msgspec.convert(document, _Format).format
            if found > REGISTRY_FORMAT:
                raise FormatError(f"registry format {found} is newer than {REGISTRY_FORMAT}", "upgrade fi-tunecache")
            return msgspec.convert(document, kind)
        except msgspec.ValidationError as error:
            name = "manifest" if kind is Manifest else "registry descriptor"
            raise FormatError(f"not a {name} ({error})", "tell the publisher") from None


def read_descriptor(data: bytes, *, source: str = "registry.json") -> RegistryDescriptor:
    """Raises FormatError for anything but a registry descriptor of a format that we know."""
    return _read(data, RegistryDescriptor, source)


def read_manifest(data: bytes, folder: Folder, *, source: str = "") -> Manifest:
    """Parse a manifest and check that each row belongs into its folder.

    Raises FormatError for malformed rows, unknown formats, a row of another FlashInfer version or
    device, and the same bundle twice.
    """
    source = source or f"{folder}/manifest.json"
    manifest = _read(data, Manifest, source)
    with naming(source):
        if len(manifest.bundles) > _MAX_ROWS:
            raise FormatError(f"{len(manifest.bundles)} bundles are more than {_MAX_ROWS}", "tell the publisher")
        if len({row.file for row in manifest.bundles}) != len(manifest.bundles):
            raise FormatError("a bundle is listed twice", "tell the publisher")
    for row in manifest.bundles:
        with naming(f"{source}: {row.file}"):
            _check_row(row, folder)
    return manifest


def _check_row(row: BundleRow, folder: Folder) -> None:
    environment = row.tuned_in
    if undetermined := environment.undetermined():
        raise FormatError(f"names no {', '.join(undetermined)}", "tell the publisher")
    try:
        belongs = Folder.of(environment) == folder
    except UsageError:  # a version or a GPU that no folder can have
        belongs = False
    if not belongs:
        raise FormatError(
            f"was tuned with flashinfer {environment.flashinfer_version} on {environment.gpu}, not for {folder}",
            "tell the publisher",
        )
    MeasurementPolicy.from_fields(row.policy)


def write_manifest(manifest: Manifest) -> bytes:
    """The inverse of :func:`read_manifest`; indented, so that a change shows line by line."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def write_descriptor(descriptor: RegistryDescriptor) -> bytes:
    """The inverse of :func:`read_descriptor`."""
    return msgspec.json.format(msgspec.json.encode(descriptor, order="sorted"), indent=1) + b"\n"


def entry_counts(bundle: Bundle) -> dict[str, dict[str, int]]:
    """The number of a bundle's entries by custom op and runner class."""
    counts: dict[str, dict[str, int]] = {}
    for entry in bundle.entries.values():
        runners = counts.setdefault(entry.key.custom_op, {})
        runners[entry.runner] = runners.get(entry.runner, 0) + 1
    return counts


def describe_bundle(bundle: Bundle, data: bytes, sha256: str, benefit: Mapping[str, float] | None = None) -> BundleRow:
    """The manifest row for a bundle and its bytes."""
    return BundleRow(
        file=bundle_file_name(sha256),
        sha256=sha256,
        size=len(data),
        created=bundle.provenance.created,
        environment=bundle.environment.metadata(),
        entries=entry_counts(bundle),
        policy=bundle.policy.manifest_fields(),
        lookups=len(bundle.lookups),
        default_raced=bundle.default_raced,
        tuning_seconds=bundle.provenance.tuning_seconds,
        benefit=dict(benefit or {}),
        workload=bundle.provenance.workload,
    )
