"""The GPU, by the name that FlashInfer stamps into a cache."""

from __future__ import annotations

import re

from msgspec import Struct

from .errors import UsageError

__all__ = ["Device"]

_MAX_NAME = 128


class Device(Struct, frozen=True):
    """One GPU model.

    ``name`` is what ``torch.cuda.get_device_name`` gives (``NVIDIA H200``,
    ``NVIDIA H100 80GB HBM3 MIG 1g.10gb``). Two devices are the same only if their names are
    equal: the slug names a folder and nothing else.
    """

    name: str

    def __post_init__(self) -> None:
        if not self.name.strip() or len(self.name) > _MAX_NAME or not self.name.isprintable():
            raise UsageError(
                f"{self.name[:_MAX_NAME]!r} is not a GPU name",
                "give the name as torch.cuda.get_device_name() or nvidia-smi -L prints it",
            )

    @property
    def slug(self) -> str:
        """Lower case; every run of characters other than a-z and 0-9 becomes one ``-``."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "-"

    def __str__(self) -> str:
        return self.name
