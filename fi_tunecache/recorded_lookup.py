"""What was asked of the autotuner while somebody watched, and what became of it."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from .entry import ProfilingPolicy, Tactic
from .key import Key, Profile

__all__ = ["RecordedLookup", "Served"]


class Served(Enum):
    """Who answered a lookup.

    ``MEMORY`` are winners that this process has tuned and kept nowhere else; a winner in memory that lies
    in a file or store too counts as coming from there.
    """

    REGISTRY = "registry"
    MEMORY = "memory"
    FILE = "file"
    STORE = "store"
    BUNDLED = "bundled"
    TUNED = "tuned"
    DEFAULT = "default"
    SKIPPED = "skipped"

    @property
    def lasts(self) -> bool:
        """Whether a new process finds the same answer without tuning."""
        return self in (Served.REGISTRY, Served.FILE, Served.STORE, Served.BUNDLED)


class RecordedLookup(Struct, frozen=True, kw_only=True):
    """One question, asked ``count`` times with the same outcome.

    ``keys`` are those that FlashInfer looks for, one a runner, in the caller's order; they share the custom
    op and the profile. ``runner`` and ``tactic`` are the answer, of ``DEFAULT`` and ``SKIPPED`` the first
    runner and -1. ``raced`` tells whether the caller's context would race the default, ``tuning`` whether it
    would tune, ``policy`` how it would time an entry (None: not known).
    ``reason`` says why nobody but the tuning or the default answered; it is empty where somebody did.
    """

    keys: tuple[Key, ...]
    served: Served
    runner: str
    tactic: Tactic
    raced: bool = False
    tuning: bool = False
    policy: ProfilingPolicy | None = None
    reason: str = ""
    count: int = 1

    @property
    def custom_op(self) -> str:
        return self.keys[0].custom_op

    @property
    def profile(self) -> Profile:
        return self.keys[0].profile
