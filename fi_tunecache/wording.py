"""Words of messages."""

from __future__ import annotations

__all__ = ["at_revision", "count_entries", "plural"]


def plural(count: int, singular: str, many: str | None = None) -> str:
    """``1 bundle``, ``2 bundles``."""
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"


def count_entries(count: int) -> str:
    """``1 entry``, ``2 entries``."""
    return plural(count, "entry", "entries")


def at_revision(name: str, revision: str | None) -> str:
    """A registry and its revision, shortened: ``hf://datasets/org/name@1a2b3c4``, ``hf://…/name@main (1a2b3c4)``."""
    if revision is None:
        return name
    name = name.removesuffix(f"@{revision}")
    return f"{name} ({revision[:7]})" if name.startswith("hf://") and "@" in name else f"{name}@{revision[:7]}"
