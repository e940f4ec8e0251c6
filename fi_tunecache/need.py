"""Whether a recorded workload needs autotuning. Pure: no I/O, no clock.

What was observed decides, not what is declared: a new op, an op that begins to autotune and a new shape are lookups
that nobody answered. Where something has changed since, nobody knows, and no answer is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from .environment import Environment
from .recorded_lookup import RecordedLookup, Served
from .selection import Selection
from .wording import plural
from .workload_record import RecordedSelection, WorkloadRecord

__all__ = ["Need", "judge"]


class Need(Struct, frozen=True, kw_only=True):
    """The answer, and what it rests on. It is true unless autotuning is known not to be needed.

    ``needed`` is None where that is not known; ``why`` then says why not, in one line, and the rest is empty.
    Of each question that a new process would have to tune, or to leave to the default, ``missing`` has one outcome,
    by custom op. ``skipped`` are those that the operator has excluded from tuning. ``covered`` counts the
    questions that a new process finds answered. ``gains_nothing`` are questions, covered or missing, to which the
    answer was the caller's default itself.
    """

    needed: bool | None
    why: str = ""
    missing: Mapping[str, tuple[RecordedLookup, ...]] = {}
    covered: int = 0
    gains_nothing: tuple[RecordedLookup, ...] = ()
    skipped: tuple[RecordedLookup, ...] = ()

    def __bool__(self) -> bool:
        return self.needed is not False

    def __str__(self) -> str:
        if self.needed is None:
            return f"not known whether autotuning is needed: {self.why}"
        missing = sum(map(len, self.missing.values()))
        where = f" of {', '.join(self.missing)}" if missing else ""
        answer = "needed" if self.needed else "not needed"
        return f"autotuning is {answer}: {plural(missing, 'lookup')} missing{where}, {self.covered:,} covered"


_MISSING = (Served.MEMORY, Served.TUNED, Served.DEFAULT)


def judge(record: WorkloadRecord | None, environment: Environment, selection: Selection | None) -> Need:
    """Decide from what was recorded.

    A question are keys in the caller's order, whether the default would race, and how an entry would be timed. It
    is covered where the last of its outcomes to come up was an answer that lasts: what answered before that did not
    keep it from being tuned, or left to the default.

    Parameters
    ----------
    record
        What was looked up; None where nothing is recorded.
    environment, selection
        The facts that hold now, and the selection that is there now for them.
    """
    if record is None:
        return _unknown("nothing is recorded for this workload; run it with record_lookups(workload=...)")
    if not record.lookups:
        return _unknown("no lookup was recorded; record it while it does what it will do")
    unknown = [name for name in environment.undetermined() if record.environment.raw(name) is not None]
    if unknown:
        return _unknown(
            f"{', '.join(unknown)}: not known here; "
            "ask where it serves, or bring all facts with --environment FILE or --like"
        )
    changed = list(_changed_facts(record.environment, environment))
    changed = changed or list(_changed_selection(record.selection, selection))  # which is another one for other facts
    if changed:
        return _unknown(f"{', and '.join(changed)}; record the workload again")
    if record.selection is None and any(lookup.served is Served.REGISTRY for lookup in record.lookups):
        return _unknown("entries of a registry answered, and it is not recorded which; record the workload again")
    excluded = {lookup.keys for lookup in record.lookups if lookup.served is Served.SKIPPED}
    missing: dict[str, list[RecordedLookup]] = {}
    gains_nothing: list[RecordedLookup] = []
    skipped: list[RecordedLookup] = []
    covered = 0
    for outcomes in _questions(record.lookups):
        answers = [lookup for lookup in outcomes if lookup.served.answers]
        if _is_covered(outcomes):
            covered += 1
        elif not answers and outcomes[0].keys in excluded:
            skipped.append(outcomes[0])
        else:
            first = next(lookup for lookup in outcomes if lookup.served in _MISSING)
            missing.setdefault(first.custom_op, []).append(first)
        if answers and all(lookup.is_default for lookup in answers):
            gains_nothing.append(answers[-1])
    return Need(
        needed=bool(missing),
        missing={op: tuple(lookups) for op, lookups in sorted(missing.items())},
        covered=covered,
        gains_nothing=tuple(gains_nothing),
        skipped=tuple(skipped),
    )


def _unknown(why: str) -> Need:
    return Need(needed=None, why=why)


def _questions(lookups: Iterable[RecordedLookup]) -> Iterable[Sequence[RecordedLookup]]:
    """The outcomes of each question."""
    found: dict[tuple[object, ...], list[RecordedLookup]] = {}
    for lookup in lookups:
        found.setdefault((lookup.keys, lookup.raced, lookup.policy), []).append(lookup)
    return found.values()


def _is_covered(outcomes: Sequence[RecordedLookup]) -> bool:
    """Whether the last outcome to come up was an answer that lasts; what this process had in memory says nothing."""
    for lookup in reversed(outcomes):
        if lookup.served.lasts or lookup.served in (Served.TUNED, Served.DEFAULT):
            return lookup.served.lasts
    return False


def _changed_facts(recorded: Environment, now: Environment) -> Iterator[str]:
    """A line for each fact that is not the same, or not known, which equals nothing."""
    before, after = recorded.identity(), now.identity()
    for name in dict.fromkeys((*before, *after)):
        was, here = before.get(name), after.get(name)
        if was is None or was != here:
            yield f"{name}: recorded {was or 'not known'}, here {here or 'not known'}"


def _changed_selection(recorded: RecordedSelection | None, now: Selection | None) -> Iterator[str]:
    if recorded is None and now is not None:
        yield "there was no selection when it was recorded, now there is one"
    elif recorded is not None and now is None:
        yield "there was a selection when it was recorded, now there is none"
    elif recorded is not None and now is not None and (recorded.id, recorded.digest) != (now.id, now.digest):
        yield "the selection is another one than when it was recorded"
