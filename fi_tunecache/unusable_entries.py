"""Entries that this process may not use, though they are valid for its environment."""

from __future__ import annotations

from collections.abc import Callable

from .autotuner.served_entry import Unusable
from .entry import DEFAULT_TACTIC, Tactic
from .mapped_library import mapped_cublas
from .runner_families import family_of
from .selection import Selection

__all__ = ["unusable_entries"]


def unusable_entries(
    selection: Selection, blocked: Callable[[str, str, Tactic], bool] | None, say: Callable[[str], None]
) -> Unusable | None:
    """Tells which entries of a selection may not be used in this process; None where that is none.

    Those are positions in the list of another cuBLASLt than this process has mapped, where the bundle says with which
    it was tuned (the environment names the one that a loader finds first).

    Parameters
    ----------
    blocked
        Tells of an op, a runner and a tactic whether FlashInfer's blocklist forbids it; None where it forbids nothing.
    say
        Told, in one line, of each bundle whose cuBLASLt is another.
    """
    mapped = mapped_cublas() if any(bundle.mapped_cublas for bundle in selection.bundles) else None
    others = {
        bundle.bundle_id: bundle.mapped_cublas
        for bundle in selection.bundles
        if mapped is not None and bundle.mapped_cublas not in (None, mapped)
    }
    for bundle, theirs in others.items():
        say(f"bundle {bundle} was tuned with cuBLASLt {theirs}, here {mapped} is mapped: its tactics are left out")
    if blocked is None and not others:
        return None

    def unusable(bundle: str, custom_op: str, runner: str, tactic: Tactic) -> bool:
        if bundle in others and family_of(custom_op, runner).name == "cublaslt" and tactic != DEFAULT_TACTIC:
            return True
        return blocked is not None and blocked(custom_op, runner, tactic)

    return unusable
