"""The match level: how much of the environment must be equal."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from .errors import UsageError

__all__ = ["MatchLevel"]


class MatchLevel(str, enum.Enum):
    """*exact*: every fact; *compatible*: those that a tactic depends on. See :mod:`fi_tunecache.compatibility`."""

    EXACT = "exact"
    COMPATIBLE = "compatible"

    @classmethod
    def parse(cls, text: str) -> MatchLevel:
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"match level {text[:40]!r} is not known", "use exact or compatible") from None

    @classmethod
    def in_use(cls, given: str | None, environ: Mapping[str, str]) -> MatchLevel:
        """The level that is given, else that of ``FI_TUNECACHE_MATCH``, else exact. Raises UsageError."""
        named = environ.get("FI_TUNECACHE_MATCH")
        if given is None and named:
            try:
                return cls.parse(named)
            except UsageError as error:
                raise UsageError(f"FI_TUNECACHE_MATCH: {error.problem}", error.next_step) from None
        return cls.parse(given or "exact")

    @property
    def other(self) -> MatchLevel:
        return MatchLevel.COMPATIBLE if self is MatchLevel.EXACT else MatchLevel.EXACT

    def __str__(self) -> str:
        return self.value
