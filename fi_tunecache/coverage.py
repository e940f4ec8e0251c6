"""Coverage: who answered the lookups of a program, and why nobody did where nobody did. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from .recorded_lookup import RecordedLookup, Served
from .selection import Selection
from .wording import at_revision, count_entries, plural

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["MissCount", "Report", "RunnerCount", "coverage"]


class RunnerCount(Struct, frozen=True):
    """The lookups of one op that one runner got, by who answered them. Of a default it is the caller's first runner."""

    custom_op: str
    runner: str
    served: Mapping[Served, int]

    @property
    def lookups(self) -> int:
        return sum(self.served.values())


class MissCount(Struct, frozen=True):
    """The lookups of one op that were tuned, skipped or left to the default for one reason, and how many questions that
    were."""

    custom_op: str
    reason: str
    lookups: int
    questions: int


class Report(Struct, frozen=True):
    """What was looked up. ``selections`` are those that were in use; ``notes`` tell what is not in the counts.

    ``str()`` is the text; the other forms are :meth:`builtins` and :meth:`table`.
    """

    runners: tuple[RunnerCount, ...]
    misses: tuple[MissCount, ...]
    questions: int
    selections: tuple[Selection, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def served(self) -> Mapping[Served, int]:
        """All lookups, by who answered them."""
        total: Counter[Served] = Counter()
        for row in self.runners:
            total.update(row.served)
        return {served: total[served] for served in Served}

    @property
    def lookups(self) -> int:
        return sum(self.served.values())

    def builtins(self) -> dict[str, Any]:
        """The JSON form.

        ``lookups`` and ``questions`` (different ones) are numbers; ``served`` has a number for each member of
        :class:`~fi_tunecache.recorded_lookup.Served`, also in each of ``runners`` (``custom_op``, ``runner``,
        ``lookups``, ``served``). ``misses`` have ``custom_op``, ``reason``, ``lookups`` and ``questions``;
        ``selections`` have ``id``, ``gpu``, ``match``, ``entries`` and ``registries``; ``notes`` are lines.
        """
        return {
            "lookups": self.lookups,
            "questions": self.questions,
            "served": _counts(self.served),
            "runners": [
                {
                    "custom_op": row.custom_op,
                    "runner": row.runner,
                    "lookups": row.lookups,
                    "served": _counts(row.served),
                }
                for row in self.runners
            ],
            "misses": [
                {"custom_op": row.custom_op, "reason": row.reason, "lookups": row.lookups, "questions": row.questions}
                for row in self.misses
            ],
            "selections": [
                {
                    "id": selection.id,
                    "gpu": selection.gpu,
                    "match": selection.level.value,
                    "entries": selection.entries,
                    "registries": [at_revision(*registry) for registry in selection.registries],
                }
                for selection in self.selections
            ],
            "notes": list(self.notes),
        }

    def table(self) -> Table:
        """A table for ``rich``: a row an op and runner, a column for each that has answered anything."""
        from rich.table import Table
        from rich.text import Text

        columns = self._columns()
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("op", "runner"):
            table.add_column(name, overflow="fold")
        for name in ("lookups", *(served.value for served in columns)):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.runners:
            counts = (row.lookups, *(row.served.get(served, 0) for served in columns))
            table.add_row(Text(row.custom_op), Text(row.runner), *(f"{count:,}" for count in counts))
        return table

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{plural(self.lookups, 'lookup')} of {plural(self.questions, 'question')}: {_text(self.served)}"
        for selection in self.selections:
            names = ", ".join(at_revision(*registry) for registry in selection.registries)
            yield f"with {count_entries(selection.entries)} for {selection.gpu} ({selection.level}) from {names}"
        for row in self.runners:
            yield f"  {row.custom_op}, {row.runner}: {_text(row.served)}"
        if self.misses:
            yield "not answered:"
        for miss in self.misses:
            what = f"{plural(miss.lookups, 'lookup')} of {plural(miss.questions, 'question')}"
            yield f"  {miss.custom_op}: {miss.reason}: {what}"
        yield from self.notes

    def _columns(self) -> list[Served]:
        return [served for served, count in self.served.items() if count]


def coverage(
    lookups: Sequence[RecordedLookup], selections: Iterable[Selection] = (), notes: Iterable[str] = ()
) -> Report:
    """Count recorded lookups, by op and runner, those with a reason also by reason; sorted by name."""
    runners: dict[tuple[str, str], Counter[Served]] = {}
    reasons: Counter[tuple[str, str]] = Counter()
    questions: dict[tuple[str, str], set[object]] = {}
    for lookup in lookups:
        runners.setdefault((lookup.custom_op, lookup.runner), Counter())[lookup.served] += lookup.count
        if lookup.reason:
            reasons[lookup.custom_op, lookup.reason] += lookup.count
            questions.setdefault((lookup.custom_op, lookup.reason), set()).add(lookup.keys)
    return Report(
        runners=tuple(RunnerCount(*name, dict(counts)) for name, counts in sorted(runners.items())),
        misses=tuple(MissCount(*name, count, len(questions[name])) for name, count in sorted(reasons.items())),
        questions=len({lookup.keys for lookup in lookups}),
        selections=tuple(selections),
        notes=tuple(notes),
    )


def _counts(served: Mapping[Served, int]) -> dict[str, int]:
    return {each.value: served.get(each, 0) for each in Served}


def _text(counts: Mapping[Served, int]) -> str:
    return ", ".join(f"{counts[served]:,} {served.value}" for served in Served if counts.get(served)) or "none"
