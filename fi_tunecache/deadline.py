"""A point in time by which something must be done, whatever it consists of."""

from __future__ import annotations

import math
import time

from .errors import UsageError

__all__ = ["Deadline"]


_LONGEST = 86_400.0
"""A day: of 25 of them the system's count of milliseconds overflows."""


class Deadline:
    """So many ``seconds`` from now, a day at the most. Raises UsageError for what is no positive number."""

    def __init__(self, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds > 0):
            raise UsageError(f"a deadline of {seconds} seconds makes no sense", "give a positive number")
        self.seconds = min(seconds, _LONGEST)
        self._end = time.monotonic() + self.seconds

    def remaining(self) -> float:
        """Seconds that are left, 0 at the least."""
        return max(0.0, self._end - time.monotonic())
