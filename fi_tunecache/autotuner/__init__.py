"""The one adapter to FlashInfer: whatever of it is private is named in this package and nowhere else."""

from __future__ import annotations

from .module import collect_metadata
from .rehearsal import Autotuner, LoadedEntry

__all__ = ["Autotuner", "LoadedEntry", "collect_metadata"]
