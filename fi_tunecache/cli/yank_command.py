"""``fi-tunecache yank``."""

from __future__ import annotations

import os
import shlex
from datetime import datetime, timezone

import click
import msgspec

from ..deadline import Deadline
from ..errors import NoMatchError, RegistryError, UsageError
from ..folder import Folder
from ..manifest import BundleRow, Manifest, Yank
from ..publish.commit import commit
from ..publish.publication import check_words, open_target
from ..publish.registry_edit import Edit, Snapshot
from ..wording import plural
from .options import as_json, note, timeout_option, user_cache
from .output import print_json, print_line, progress

__all__ = ["command"]


@click.command("yank")
@click.argument("bundle", metavar="VERSION/DEVICE/BUNDLE")
@click.option("--from", "target", required=True, metavar="REGISTRY", help="The registry, as for publish --to.")
@click.option("--reason", required=True, metavar="TEXT", help="Why; everybody who would have used it reads this.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of writing to the branch.")
@timeout_option
@as_json
def command(bundle: str, target: str, reason: str, create_pr: bool, timeout: float, as_json: bool) -> int:
    """Mark a published bundle as unusable. It stays where it is; clients leave it out from their next pull on.

    A fleet that pulls with --locked goes on with what its lock holds. There is no way back: publish anew instead.
    """
    folder, identifier = _parse(bundle)
    yank = _yank(reason)
    deadline = Deadline(timeout)
    with user_cache() as cache, progress() as say:
        registry = open_target(target, cache=cache, deadline=deadline, create_pr=create_pr, progress=say)
        row = _find(registry.snapshot(), folder, identifier, target)
        edit = Edit({folder: (msgspec.structs.replace(row, yanked=yank),)})
        outcome = commit(registry, edit, f"Yank {folder}/{row.bundle_id}", deadline=deadline, create_pr=create_pr)
    for notice in outcome.notices:
        note(notice)
    if as_json:
        print_json(
            {
                "target": target,
                "folder": str(folder),
                "bundle": row.bundle_id,
                "reason": (row.yanked or yank).reason,
                "date": (row.yanked or yank).date,
                "written": outcome.changed,
                "revision": outcome.revision,
                "pull_request": outcome.pull_request,
                "notices": list(outcome.notices),
            }
        )
    elif row.yanked is not None:
        print_line(f"{row.bundle_id} is yanked since {row.yanked.date}: {row.yanked.reason}")
    elif outcome.pull_request is not None:
        print_line(f"Opened {outcome.pull_request}")
    else:
        print_line(f"Yanked {folder}/{row.bundle_id} of {target}: {yank.reason}")
    return 0


def _parse(text: str) -> tuple[Folder, str]:
    folder, _, identifier = text.rpartition("/")
    identifier = identifier.removesuffix(".json")
    if folder.count("/") != 1 or len(identifier) < 4:
        raise UsageError(f"{text[:120]!r} names no bundle", "write it like 0.7.4/nvidia-h200/3f9a1c0e52d77b10")
    return Folder.parse(folder), identifier


def _yank(reason: str) -> Yank:
    if not reason.strip():
        raise UsageError("the reason is empty", "say why, in a line")
    check_words("--reason", reason.strip(), os.environ)
    return Yank(reason.strip(), datetime.now(timezone.utc).strftime("%Y-%m-%d"))


def _find(snapshot: Snapshot, folder: Folder, identifier: str, target: str) -> BundleRow:
    if snapshot.revision is None:
        raise RegistryError(f"{target} is not a registry, or can't be seen", "check the name; see `hf auth login`")
    rows = snapshot.manifests.get(folder, Manifest()).bundles
    found = [row for row in rows if row.sha256.startswith(identifier)]
    if len(found) > 1:
        raise UsageError(f"{identifier} is the start of {plural(len(found), 'bundle')}", "give more of its digits")
    if not found:
        raise NoMatchError(
            f"{target} has no bundle {folder}/{identifier[:64]}",
            f"see `fi-tunecache list --registry {shlex.quote(target)}`",
        )
    return found[0]
