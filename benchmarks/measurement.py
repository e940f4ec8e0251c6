"""How things are compared: in turns, in one run, since the speed of a machine changes while it runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

__all__ = ["Row", "Section", "compare", "missing", "row", "seconds_of", "take_turns"]


class Row(Struct, frozen=True, kw_only=True):
    """One thing that was measured.

    ``value`` is the median of the rounds, ``low`` to ``high`` hold 80 % of them; all are in
    ``unit``. ``ratio`` is the median of the rounds' ratios to the section's reference, ``target``
    the most that the value may be. A ``note`` tells why there is no value, or what it is instead.
    """

    what: str
    unit: str = "ms"
    value: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    ratio: float | None = None
    target: float | None = None
    note: str | None = None

    @property
    def met(self) -> bool | None:
        return None if self.target is None or self.value is None else self.value <= self.target


class Section(Struct, frozen=True):
    """What was measured in turns. ``about`` says what exactly, and what ratios are to."""

    title: str
    about: str
    rows: tuple[Row, ...]


_FACTORS = {"ms": 1e3, "s": 1.0, "MB": 1e-6}


def row(
    what: str,
    values: Sequence[float],
    reference: Sequence[float] | None = None,
    *,
    unit: str = "ms",
    target: float | None = None,
    note: str | None = None,
) -> Row:
    """A row from seconds or bytes, one a round; ``target`` is in ``unit``."""
    factor = _FACTORS[unit]
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else list(values)
    return Row(
        what=what,
        unit=unit,
        value=statistics.median(values) * factor,
        low=tenths[0] * factor,
        high=tenths[-1] * factor,
        rounds=len(values),
        ratio=statistics.median(a / b for a, b in zip(values, reference, strict=True)) if reference else None,
        target=target,
        note=note,
    )


def missing(what: str, why: str) -> Row:
    """A row that could not be measured here."""
    return Row(what=what, note=f"not measured: {why}")


def seconds_of(action: Callable[[], object]) -> float:
    """The wall-clock time of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def take_turns(actions: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each action returns, round by round, beginning with another one each time. A first round doesn't count."""
    names = list(actions)
    values: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            value = actions[name]()
            if number >= 0:
                values[name].append(value)
    return values


def compare(
    actions: Mapping[str, Callable[[], float]],
    rounds: int,
    reference: str,
    *,
    unit: str = "ms",
    targets: Mapping[str, float] | None = None,
) -> list[Row]:
    """A row for each action, which returns seconds; they take turns."""
    values = take_turns(actions, rounds)
    return [row(name, values[name], values[reference], unit=unit, target=(targets or {}).get(name)) for name in actions]
