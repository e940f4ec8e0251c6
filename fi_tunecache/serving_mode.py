"""What ``FI_TUNECACHE`` says: whether a program that serves may use us."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from .errors import UsageError

__all__ = ["ServingMode"]


class ServingMode(Enum):
    """``OBSERVE`` finds out what would be served, and serves nothing."""

    OFF = "off"
    OBSERVE = "observe"
    ON = "on"

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> ServingMode:
        """``on`` where the variable is not set. Raises UsageError for a word that is none of the three."""
        said = environ.get("FI_TUNECACHE", "").strip().lower()
        try:
            return cls(said or "on")
        except ValueError:
            raise UsageError(f"FI_TUNECACHE={said[:40]} is not known", "set it to off, observe or on") from None
