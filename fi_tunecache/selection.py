"""The selection: the entries chosen for this machine, as one file in the user cache.

A selection file is a FlashInfer v1 file whose metadata holds the facts as they are compared, and
our object: id, registries with the revision they were read at, bundles, counts, and a digest of
the file itself. A hit reads that one file, and of it only our object. It is no file for FlashInfer
(another virtual environment on the same machine may share it):
:func:`~fi_tunecache.materialisation.stamped` makes one for a given environment.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

from .environment import Environment
from .errors import FormatError
from .match_level import MatchLevel
from .measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from .runner_families import rules_version

__all__ = [
    "BLANK_DIGEST",
    "SELECTION_FORMAT",
    "OtherLevel",
    "Request",
    "Selection",
    "SelectionBundle",
    "read_selection",
    "replace_digest",
]

SELECTION_FORMAT = 1
BLANK_DIGEST = "0" * 64
"""What stands in the place of the digest while it is computed."""

_RULES = 2
"""Raised with every change of :mod:`resolution` or :mod:`compatibility` that chooses differently."""


class Request(Struct, frozen=True, kw_only=True):
    """Everything that decides a selection and is known without asking a registry.

    ``registries`` are names in order of precedence; ``lock`` is the sha256 of a file that pins
    commits and bundles.
    """

    environment: Environment
    registries: tuple[str, ...]
    level: MatchLevel = MatchLevel.EXACT
    policy: MeasurementPolicy = DEFAULT_POLICY
    skip_ops: frozenset[str] = frozenset()
    lock: str | None = None

    @property
    def selection_id(self) -> str:
        """32 hex digits; equal for equal requests under equal rules, and for nothing else."""
        identity = {
            "environment": self.environment.identity(),
            "registries": self.registries,
            "level": self.level.value,
            "policy": self.policy.manifest_fields(),
            "skip_ops": sorted(self.skip_ops),
            "lock": self.lock,
            "rules": [_RULES, rules_version(), SELECTION_FORMAT],
        }
        return hashlib.sha256(msgspec.json.encode(identity, order="deterministic")).hexdigest()[:32]


class SelectionBundle(Struct, frozen=True):
    """A bundle that provides entries of a selection. ``mapped_cublas`` is as in its provenance."""

    bundle_id: str
    sha256: str
    registry: str
    entries: int
    default_raced: bool | None
    mapped_cublas: str | None = None


class OtherLevel(Struct, frozen=True):
    """What the other match level would have given."""

    level: MatchLevel
    entries: int
    bundles: int


class Selection(Struct, frozen=True, kw_only=True):
    """What a selection file says of itself.

    ``registries`` are (name, revision of the folder that was read, None if it had none) in order of precedence.
    ``marks`` name the bundle, by key, of each entry that has no room for a mark of its own, where
    there are several bundles.
    """

    format: int
    id: str
    tool: str
    created: str
    gpu: str
    flashinfer_version: str
    level: MatchLevel
    policy: dict[str, str]
    registries: tuple[tuple[str, str | None], ...]
    bundles: tuple[SelectionBundle, ...]
    entries: int
    other_level: OtherLevel
    marks: dict[str, str] = {}
    digest: str = BLANK_DIGEST


class _Metadata(Struct, frozen=True):
    fi_tunecache: Selection


class _Header(Struct, frozen=True):
    metadata: _Metadata = msgspec.field(name="_metadata")


_header = msgspec.json.Decoder(_Header)


def read_selection(data: bytes, *, source: str = "") -> Selection:
    """Check a selection file's digest and read what it says of itself; its entries are not parsed.

    Raises FormatError if the file was changed since it was written, or is none.
    """
    try:
        selection = _header.decode(data).metadata.fi_tunecache
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"not a selection ({error})", source=source) from None
    if hashlib.sha256(replace_digest(data, selection.digest, BLANK_DIGEST)).hexdigest() != selection.digest:
        raise FormatError("its digest is wrong: the file was changed", "pull again", source=source)
    if selection.format != SELECTION_FORMAT:
        raise FormatError(f"selection format {selection.format} is not {SELECTION_FORMAT}", source=source)
    return selection


def replace_digest(data: bytes, old: str, new: str) -> bytes:
    """A selection file's bytes with another digest in the place of ``old``.

    It is the last field of that name with that value: names are sorted, so our object comes after
    the entries, which may hold anything.
    """
    before, found, after = data.rpartition(f'"digest":"{old}"'.encode())
    return before + f'"digest":"{new}"'.encode() + after if found else data
