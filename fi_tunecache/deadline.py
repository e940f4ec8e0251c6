"""A point in time by which something must be done, whatever it consists of."""

from __future__ import annotations

import math
import time

from .errors import UsageError

__all__ = ["Deadline"]


class Deadline:
    """So many ``seconds`` from now. Raises UsageError for what is no positive number."""

    def __init__(self, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds > 0):
            raise UsageError(f"a deadline of {seconds} seconds makes no sense", "give a positive number")
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds that are left, 0 at the least."""
        return max(0.0, self._end - time.monotonic())
