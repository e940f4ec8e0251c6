"""``fi-tunecache needed``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from ..errors import NoMatchError
from ..inquiry import need_of
from ..match_level import MatchLevel
from ..measurement_policy import EXECUTION_MODES, MeasurementPolicy
from ..need import Need
from ..recorded_lookup import RecordedLookup, lookup_json
from ..wording import plural
from ..workload import Workload
from ..workload_record import WorkloadRecord, find_record, kept_records
from .options import as_json, environment_options, opening, target_from, user_cache
from .output import print_json, print_line

__all__ = ["command"]

_NEEDED = 1


@click.command("needed")
@click.argument("workload", metavar="WORKLOAD")
@environment_options
@click.option(
    "--registry",
    "registries",
    multiple=True,
    metavar="NAME",
    help="A registry; repeat, the first has precedence. Default: those when it was recorded.",
)
@click.option(
    "--match",
    type=click.Choice([level.value for level in MatchLevel]),
    help="The match level. Default: that when it was recorded.",
)
@click.option(
    "--execution-mode",
    type=click.Choice(EXECUTION_MODES),
    help="The measurement policy. Default: that when it was recorded.",
)
@as_json
def command(workload: str, match: str | None, execution_mode: str | None, as_json: bool, **arguments: Any) -> int:
    """Tell whether a recorded workload needs autotuning.

    WORKLOAD is what it was recorded as, `name` or `key=value,key=value`, or the beginning of its id. Asks no registry
    and writes nothing.

    Exit code 0 if it needs none, 1 if it does, 3 if that is not known.
    """
    others: Sequence[WorkloadRecord] = ()
    with user_cache() as cache, opening(cache) as opener:
        record = find_record(cache, workload)
        if record is None:
            others = kept_records(cache)
        environment = target_from(arguments, opener).environment
        need = need_of(
            record,
            environment,
            cache,
            registries=arguments["registries"],
            match=match,
            policy=None if execution_mode is None else MeasurementPolicy.from_execution_mode(execution_mode),
        )
    asked = Workload.of(workload) if record is None else record.workload
    if as_json:
        print_json(_builtins(asked, record, need, others))
    else:
        print_line(f"{asked}: {need}")
        _print(record, need, others)
    return {False: 0, True: _NEEDED, None: NoMatchError.exit_code}[need.needed]


def _print(record: WorkloadRecord | None, need: Need, others: Sequence[WorkloadRecord]) -> None:
    for op, lookups in need.missing.items():
        print_line(f"  {op}: {plural(len(lookups), 'lookup')}")
        for (served, reason), count in Counter((lookup.served.value, lookup.reason) for lookup in lookups).items():
            print_line(f"    {count:,} {served}{reason and f': {reason}'}")
    if need.gains_nothing:
        print_line(f"{plural(len(need.gains_nothing), 'lookup')} got the default itself: tuning gains nothing there.")
    if need.skipped:
        ops = ", ".join(sorted({lookup.custom_op for lookup in need.skipped}))
        print_line(f"{plural(len(need.skipped), 'lookup')} not counted, excluded from tuning: {ops}")
    if record is not None:
        print_line(f"Recorded {record.recorded} as {record.workload.id}.")
    elif others:
        print_line("Recorded are:")
        for other in others:
            print_line(f"  {other.workload} ({other.workload.id[:16]}, {other.recorded})")


def _builtins(
    asked: Workload, record: WorkloadRecord | None, need: Need, others: Sequence[WorkloadRecord]
) -> dict[str, Any]:
    return {
        "workload": str(asked),
        "id": asked.id,
        "needed": need.needed,
        "why": need.why,
        "recorded": None if record is None else record.recorded,
        "covered": need.covered,
        "missing": {op: _lookups(lookups) for op, lookups in need.missing.items()},
        "gains_nothing": _lookups(need.gains_nothing),
        "skipped": _lookups(need.skipped),
        "others": [
            {"workload": str(other.workload), "id": other.workload.id, "recorded": other.recorded} for other in others
        ],
    }


def _lookups(lookups: Sequence[RecordedLookup]) -> list[dict[str, Any]]:
    return [lookup_json(lookup) for lookup in lookups]
