"""Deadlines: how much time is left, and what is none."""

from __future__ import annotations

import math
import time

import pytest

from fi_tunecache.deadline import Deadline
from fi_tunecache.errors import UsageError


def test_what_is_left_becomes_less_and_never_less_than_nothing() -> None:
    deadline = Deadline(0.05)
    first = deadline.remaining()
    time.sleep(0.01)
    second = deadline.remaining()
    time.sleep(0.05)

    assert 0.05 >= first >= second + 0.01
    assert deadline.remaining() == 0.0
    assert deadline.seconds == 0.05


@pytest.mark.parametrize("seconds", [0, 0.0, -1, -1e-9, math.nan, math.inf, -math.inf])
def test_what_is_no_deadline(seconds: float) -> None:
    with pytest.raises(UsageError, match=r"^a deadline of .* seconds makes no sense; give a positive number$"):
        Deadline(seconds)


def test_more_than_a_day_is_a_day() -> None:
    """A selector takes no more than the milliseconds that an int of C can hold."""
    deadline = Deadline(1e300)
    assert 86_399 < deadline.remaining() <= deadline.seconds == 86_400


def test_a_clock_that_is_set_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline(10)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert deadline.remaining() > 9
