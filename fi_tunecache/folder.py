"""A registry's folder: the bundles of one FlashInfer version and one device."""

from __future__ import annotations

import re

from msgspec import Struct

from .device import Device
from .environment import Environment
from .errors import UsageError

__all__ = ["Folder"]

_VERSION = re.compile(r"[0-9A-Za-z](?:[0-9A-Za-z.+!_-]{0,62}[0-9A-Za-z])?")
_SLUG = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")


class Folder(Struct, frozen=True, order=True):
    """Where the bundles of one FlashInfer version and one device lie: ``0.7.4/nvidia-h200``.

    Both parts are checked, so a folder never leads out of a registry's tree.
    """

    version: str
    slug: str

    def __post_init__(self) -> None:
        if not _VERSION.fullmatch(self.version) or ".." in self.version:
            raise UsageError(
                f"{self.version[:80]!r} can't be the folder of a FlashInfer version", "write a version like 0.7.4"
            )
        if not _SLUG.fullmatch(self.slug):
            raise UsageError(f"{self.slug[:80]!r} can't be the folder of a device", "write it like nvidia-h200")

    @classmethod
    def parse(cls, text: str) -> Folder:
        """Read ``VERSION/DEVICE``; a device's true name is taken for its slug."""
        version, _, device = text.partition("/")
        if not device:
            raise UsageError(f"{text[:80]!r} does not name a version and a device", "write it like 0.7.4/nvidia-h200")
        return cls(version, Device(device).slug)

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
