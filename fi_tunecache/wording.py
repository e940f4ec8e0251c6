"""Words of messages."""

from __future__ import annotations

__all__ = ["count_entries", "plural"]


def plural(count: int, singular: str, many: str | None = None) -> str:
    """``1 bundle``, ``2 bundles``."""
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"


def count_entries(count: int) -> str:
    """``1 entry``, ``2 entries``."""
    return plural(count, "entry", "entries")
