"""The manifest: the bundles for one FlashInfer version and one device; and the registry descriptor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct

from .bundle import Bundle, Workload, bundle_file_name
from .device import Device
from .environment import Environment
from .errors import FormatError, UsageError
from .measurement_policy import MeasurementPolicy

__all__ = [
    "MAX_BUNDLE_BYTES",
    "MAX_MANIFEST_BYTES",
    "BundleRow",
    "Folder",
    "Manifest",
    "RegistryDescriptor",
    "Yank",
    "describe_bundle",
    "read_descriptor",
    "read_manifest",
    "write_descriptor",
    "write_manifest",
]

REGISTRY_FORMAT = 1
MAX_BUNDLE_BYTES = 64 * 1024 * 1024
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
_MAX_ROWS = 10_000

_VERSION = re.compile(r"[0-9A-Za-z](?:[0-9A-Za-z.+!_-]{0,62}[0-9A-Za-z])?")
_SLUG = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_FILE = re.compile(r"[0-9a-f]{16}\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Folder(Struct, frozen=True, order=True):
    """Where the bundles of one FlashInfer version and one device lie: ``0.7.4/nvidia-h200``.

    Both parts are checked, so a folder never leads out of a registry's tree.
    """

    version: str
    slug: str

    def __post_init__(self) -> None:
        if not _VERSION.fullmatch(self.version) or ".." in self.version:
            raise UsageError(f"{self.version[:80]!r} can't be the folder of a FlashInfer version")
        if not _SLUG.fullmatch(self.slug):
            raise UsageError(f"{self.slug[:80]!r} can't be the folder of a device")

    @classmethod
    def parse(cls, text: str) -> Folder:
        """Read ``VERSION/DEVICE``; a device's true name is taken for its slug."""
        version, separator, device = text.partition("/")
        if not separator or not device:
            raise UsageError(f"{text[:80]!r} does not name a version and a device", "write it like 0.7.4/nvidia-h200")
        return cls(version, device if _SLUG.fullmatch(device) else Device(device).slug)

    @classmethod
    def of(cls, environment: Environment) -> Folder:
        """The folder for an environment. Raises UsageError where FlashInfer's version is undetermined."""
        if environment.flashinfer_version is None:
            raise UsageError(
                "FlashInfer's version is not known here",
                "install flashinfer-python, or give it with --fact flashinfer_version=0.7.4",
            )
        return cls(environment.flashinfer_version, environment.device.slug)

    def __str__(self) -> str:
        return f"{self.version}/{self.slug}"


class Yank(Struct, frozen=True):
    """Why and when (UTC date) a bundle was marked unusable."""

    reason: str
    date: str


class BundleRow(Struct, frozen=True, omit_defaults=True):
    """What a manifest says of one bundle: enough to decide whether it is worth fetching.

    ``size`` is in bytes; ``entries`` counts them by custom op and runner class; ``benefit`` is the
    measured time of ours over the default's by custom op, where it was measured.
    """

    file: str
    sha256: str
    size: int
    created: str
    environment: dict[str, str]
    entries: dict[str, dict[str, int]]
    policy: dict[str, str] = {}
    lookups: int = 0
    default_raced: bool | None = None
    tuning_seconds: float | None = None
    benefit: dict[str, float] = {}
    workload: Workload | None = None
    yanked: Yank | None = None

    def __post_init__(self) -> None:
        if not _FILE.fullmatch(self.file):
            raise FormatError(f"{self.file[:80]!r} is not a bundle's file name")
        if not _SHA256.fullmatch(self.sha256) or self.file != bundle_file_name(self.sha256):
            raise FormatError(f"{self.file}: its name is not the start of its sha256")
        if not 0 < self.size <= MAX_BUNDLE_BYTES:
            raise FormatError(f"{self.file}: a size of {self.size} bytes is not between 1 and {MAX_BUNDLE_BYTES}")

    @property
    def bundle_id(self) -> str:
        """The short name by which messages call the bundle: 16 hex digits."""
        return self.sha256[:16]

    @property
    def tuned_in(self) -> Environment:
        return Environment.from_metadata(self.environment, source=self.file)

    @property
    def measured_under(self) -> MeasurementPolicy:
        return MeasurementPolicy.from_fields(self.policy)

    @property
    def entry_count(self) -> int:
        return sum(count for runners in self.entries.values() for count in runners.values())


class Manifest(Struct, frozen=True):
    """All bundles of a :class:`Folder`, in the order in which they were published."""

    bundles: tuple[BundleRow, ...] = ()
    format: int = REGISTRY_FORMAT


class RegistryDescriptor(Struct, frozen=True, omit_defaults=True):
    """``registry.json``: that this tree is a registry, and what its owner has to say."""

    name: str
    format: int = REGISTRY_FORMAT
    notices: tuple[str, ...] = ()


class _Format(Struct, frozen=True):
    format: int


_Read = TypeVar("_Read", Manifest, RegistryDescriptor)


def _read(data: bytes, kind: type[_Read], source: str) -> _Read:
    if len(data) > MAX_MANIFEST_BYTES:
        raise FormatError(f"{len(data)} bytes are more than {MAX_MANIFEST_BYTES}", source=source)
    try:
        found = msgspec.json.decode(data, type=_Format).format
        if found > REGISTRY_FORMAT:
            raise FormatError(
                f"registry format {found} is newer than {REGISTRY_FORMAT}", "upgrade fi-tunecache", source=source
            )
        return msgspec.json.decode(data, type=kind)
    except FormatError as error:
        raise error if error.source else FormatError(error.problem, error.next_step, source=source) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"not a {kind.__name__.lower()} ({error})", source=source) from None


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
    if len(manifest.bundles) > _MAX_ROWS:
        raise FormatError(f"{len(manifest.bundles)} bundles are more than {_MAX_ROWS}", source=source)
    if len({row.file for row in manifest.bundles}) != len(manifest.bundles):
        raise FormatError("a bundle is listed twice", source=source)
    for row in manifest.bundles:
        environment = Environment.from_metadata(row.environment, source=f"{source}: {row.file}")
        if environment.undetermined() or Folder.of(environment) != folder:
            raise FormatError(f"{row.file} was not tuned with what its folder says", source=source)
        MeasurementPolicy.from_fields(row.policy)
    return manifest


def write_manifest(manifest: Manifest) -> bytes:
    """The inverse of :func:`read_manifest`; indented, so that a change shows line by line."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def write_descriptor(descriptor: RegistryDescriptor) -> bytes:
    """The inverse of :func:`read_descriptor`."""
    return msgspec.json.format(msgspec.json.encode(descriptor, order="sorted"), indent=1) + b"\n"


def describe_bundle(bundle: Bundle, data: bytes, sha256: str, benefit: Mapping[str, float] | None = None) -> BundleRow:
    """The manifest row for a bundle and its bytes."""
    entries: dict[str, dict[str, int]] = {}
    for entry in bundle.entries.values():
        runners = entries.setdefault(entry.key.custom_op, {})
        runners[entry.runner] = runners.get(entry.runner, 0) + 1
    return BundleRow(
        file=bundle_file_name(sha256),
        sha256=sha256,
        size=len(data),
        created=bundle.provenance.created,
        environment=bundle.environment.metadata(),
        entries=entries,
        policy=bundle.policy.manifest_fields(),
        lookups=len(bundle.lookups),
        default_raced=bundle.default_raced,
        tuning_seconds=bundle.provenance.tuning_seconds,
        benefit=dict(benefit or {}),
        workload=bundle.provenance.workload,
    )
