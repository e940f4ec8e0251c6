"""``fi-tunecache publish``."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..bundle import Provenance
from ..deadline import Deadline
from ..errors import UsageError
from ..publish.commit import Outcome, commit
from ..publish.conflicts import OnConflict
from ..publish.plan import OpenConflictsError, Plan, PlannedBundle
from ..publish.publication import Publication, check_words, names_here, open_target, prepare, secrets_of
from ..publish.registry_edit import Edit
from ..publish.workload import parse_workload
from ..wording import count_entries, plural
from .options import as_json, note, timeout_option, user_cache
from .output import print_json, print_line, print_table, progress

__all__ = ["command"]

_MOST_CONFLICTS = 50
_RACED = {"yes": True, "no": False, "unknown": None}


@click.command("publish")
@click.argument("sources", nargs=-1, type=click.Path(path_type=Path), metavar="SOURCE...")
@click.option("--from", "source", type=click.Choice(["cache"]), help="Also the bundles of the user cache, as they are.")
@click.option(
    "--to",
    "target",
    required=True,
    metavar="REGISTRY",
    help="hf://datasets/ORGANISATION/NAME[@BRANCH], or a directory (/…, ./…); made if there is none.",
)
@click.option(
    "--lookups",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Recorded lookups, or a recorded workload.",
)
@click.option(
    "--on-conflict",
    type=click.Choice(["error", "fastest", "newest"]),
    default="error",
    show_default=True,
    help="Where sources have different tactics for one key.",
)
@click.option("--skip-pulled", is_flag=True, help="Leave out what came from a registry, instead of refusing it.")
@click.option(
    "--default-raced",
    type=click.Choice(list(_RACED)),
    default="unknown",
    help="Whether FlashInfer's default raced, as under autotune_v2. Default: yes for managed stores, else what "
    "recorded lookups tell.",
)
@click.option(
    "--workload",
    multiple=True,
    metavar="KEY=VALUE",
    help="What was served: model, engine, tensor_parallel, expert_parallel, note; repeat.",
)
@click.option("--message", metavar="TEXT", help="The commit's message.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of writing to the branch.")
@click.option("--private", is_flag=True, help="Make the repository private, if it is made.")
@click.option("--dry-run", is_flag=True, help="Show the plan, write nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@timeout_option
@as_json
def command(
    sources: tuple[Path, ...],
    source: str | None,
    target: str,
    message: str | None,
    create_pr: bool,
    private: bool,
    dry_run: bool,
    yes: bool,
    timeout: float,
    as_json: bool,
    **arguments: Any,
) -> int:
    """Publish tuned entries: v1 files, managed stores, the per-rank files of vLLM and SGLang, bundles.

    Sources are gathered by environment and measurement policy, compared with what is published, loaded in a fresh
    process as a check, and shown as a plan; then one commit adds the bundles. Publishing the same again does nothing.

    Exit code 2 if a source must not be published (pulled entries, unknown facts, conflicts), 4 if the registry
    can't be reached or refuses, 5 if a source is damaged.
    """
    if not sources and source is None:
        raise UsageError("there is nothing to publish", "name a source, or --from cache")
    if message is not None:
        check_words("--message", message, os.environ)
    publication = Publication(
        sources=sources,
        provenance=_provenance(arguments["workload"]),
        from_cache=source == "cache",
        lookups=arguments["lookups"],
        on_conflict=OnConflict(arguments["on_conflict"]),
        skip_pulled=arguments["skip_pulled"],
        default_raced=_RACED[arguments["default_raced"]],
    )
    with user_cache() as cache:
        opened = partial(open_target, target, cache=cache, private=private, create_pr=create_pr)
        try:
            with progress() as say:
                reader = opened(deadline=Deadline(timeout), progress=say)
                plan, notices = prepare(publication, reader, cache, secrets=secrets_of(os.environ), progress=say)
        except OpenConflictsError as error:
            for conflict in error.conflicts[1:_MOST_CONFLICTS]:  # the first stands in the error itself
                note(f"another conflict: {conflict}")
            raise
        for notice in notices:
            note(notice)
        if not as_json:
            _print_plan(plan, target)
        outcome = None
        if plan.new and not dry_run:
            if not yes:
                _confirm(target, reader.visibility, is_shown=not as_json)
            with progress() as say:  # what was asked may have taken a while: the time for writing begins now
                until = Deadline(timeout)
                writer, edit = opened(deadline=until, progress=say), Edit(plan.rows, plan.files)
                outcome = commit(writer, edit, message or _message(plan), deadline=until, create_pr=create_pr)
            for notice in outcome.notices:
                note(notice)
    if as_json:
        print_json({**plan.builtins(), "target": target, **_written(outcome)})
    elif outcome is not None:
        _print_outcome(outcome, target)
    elif not plan.new:
        print_line(f"Nothing to add to {target}.")
    return 0


def _provenance(workload: tuple[str, ...]) -> Provenance:
    return Provenance(
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        tool=f"fi-tunecache {__version__}",
        workload=parse_workload(workload, names=names_here()) if workload else None,
    )


def _message(plan: Plan) -> str:
    gpus = ", ".join(sorted({item.environment.gpu or "" for item in plan.new}))
    versions = ", ".join(sorted({item.environment.flashinfer_version or "" for item in plan.new}))
    entries = sum(item.row.entry_count for item in plan.new if item.row is not None)
    return f"Publish {count_entries(entries)} for {gpus}, flashinfer {versions}"


def _confirm(target: str, visibility: str, *, is_shown: bool) -> None:
    if not is_shown or sys.stdin is None or not sys.stdin.isatty():
        what = "there is no terminal to ask at" if is_shown else "--json shows the plan when all is done"
        raise UsageError(what, "give --yes, or look first with --dry-run")
    if not click.confirm(f"Publish this to {target}{visibility}?", err=True):
        raise click.Abort


def _print_plan(plan: Plan, target: str) -> None:
    for item in plan.bundles:
        _print_bundle(item)
    if not plan.new:
        return
    new = plan.builtins()
    print_line(
        f"{plural(len(plan.new), 'bundle')} with {count_entries(new['entries'])}, {new['bytes']:,} bytes, to be added "
        f"to {target}"
    )


def _print_bundle(item: PlannedBundle) -> None:
    name = "nothing new" if item.row is None else f"new bundle {item.row.bundle_id}, {item.row.size:,} bytes"
    print_line(f"{item.folder} ({item.environment.gpu}), policy {item.policy}: {name}")
    for source in item.sources:
        print_line(f"  from {source}")
    print_table(
        ("  op", "new", "changed", "unchanged", "left out"),
        [(f"  {op.custom_op}", op.new, op.changed, op.unchanged, op.left_out) for op in item.ops],
        numbers=("new", "changed", "unchanged", "left out"),
        wrap=("  op",),
    )
    if item.held_by:
        bundles = "bundle" if len(item.held_by) == 1 else "bundles"
        print_line(f"  unchanged ones are in {bundles} {', '.join(item.held_by)}")
    if item.same:
        print_line(f"  {count_entries(item.same)} more than one source has")
    for line in (*item.left_out, *item.conflicts):
        print_line(f"  {line}")
    if item.row is not None:
        lookups = plural(item.row.lookups, "recorded lookup") if item.row.lookups else "no recorded lookups"
        if item.verdict is not None:
            print_line(f"  in that environment a client takes: {item.verdict}")
        print_line(f"  {lookups}; every entry was loaded and served by {item.row.round_trip}")


def _written(outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {"written": False, "revision": None, "pull_request": None, "notices": []}
    return {
        "written": outcome.changed,
        "revision": outcome.revision,
        "pull_request": outcome.pull_request,
        "notices": list(outcome.notices),
    }


def _print_outcome(outcome: Outcome, target: str) -> None:
    if outcome.pull_request is not None:
        print_line(f"Opened {outcome.pull_request}")
        return
    if not outcome.changed:
        print_line(f"Nothing was added to {target}: somebody else has published the same meanwhile.")
        return
    print_line(f"Published to {target} at {outcome.revision[:12]}")
    print_line(f"Get it where it serves: fi-tunecache pull --registry {shlex.quote(target)}")
