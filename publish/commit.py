"""Bring an edit into a registry that others write at the same time: nobody's rows get lost, or it is said."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from fi_tunecache.deadline import Deadline
from fi_tunecache.errors import FiTuneCacheError, RegistryError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import Manifest

from .registry_edit import Edit, Snapshot, files_to_write
from .target import StaleError, Target, UncertainError, Written

__all__ = ["Outcome", "commit"]

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_MAX_UNCERTAIN = 3


class Outcome(Struct, frozen=True):
    """``revision`` holds the edit; ``changed`` is False where it did before; ``notices`` tell what was odd."""

    revision: str
    changed: bool
    attempts: int
    pull_request: str | None = None
    notices: tuple[str, ...] = ()


def commit(
    target: Target,
    edit: Edit,
    message: str,
    *,
    deadline: Deadline,
    create_pr: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Write an edit in one commit, again and again until it is in or the deadline has come.

    Where somebody else has written meanwhile, it waits a random while and applies the edit to what is there now.
    Where the target failed without saying whether it wrote, it looks first. What was written is read back. A target
    that lets a stale write pass is found out by its history: rows that this write has overwritten are put back by
    another one.

    Raises
    ------
    RegistryError
        The target can't be reached, refuses, is too busy, or does not hold what was written to it.
    """
    notices: list[str] = []
    attempts = uncertain = 0
    changed = False
    unchecked: Snapshot | None = None
    while True:
        snapshot = target.snapshot()
        written: Written | None = None
        files = files_to_write(edit, snapshot, target.title)
        if files:
            attempts += 1
            try:
                written = target.write(files, snapshot, message, create_pr=create_pr)
            except StaleError as error:
                _pause(error, attempts, deadline, sleep)
                continue
            except UncertainError as error:
                uncertain += 1
                if create_pr or uncertain > _MAX_UNCERTAIN or not deadline.remaining():
                    raise RegistryError(
                        f"{error.error.problem}; it may have written all the same",
                        f"look at {target.name}, or publish again: nothing is written twice",
                    ) from None
                unchecked = unchecked or snapshot
                _pause(StaleError(error.error), attempts, deadline, sleep)
                continue
            changed = True
            unchecked = unchecked or snapshot
        elif unchecked is not None and snapshot.revision is not None:
            changed = True
            written = Written(snapshot.revision)
            notices.append(f"{target.name} reported a failure, but had written")
        if written is None:
            return Outcome(snapshot.revision or "", changed, attempts, notices=tuple(notices))
        _check(target, edit, written)
        if unchecked is not None and not create_pr:
            overwritten = _overwritten(target, unchecked, written, notices)
            unchecked = None
            if overwritten:
                notices.append(f"{target.name} let a stale write pass: what others had published is put back")
                for manifests in overwritten:
                    edit = edit.with_manifests(manifests)
                continue
        return Outcome(written.revision, changed, attempts, written.pull_request, tuple(notices))


def _pause(error: StaleError, attempts: int, deadline: Deadline, sleep: Callable[[float], None]) -> None:
    if error.pause is None:
        pause = random.uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempts))
    else:
        pause = error.pause * random.uniform(1, 1.2)
    if pause >= deadline.remaining():
        raise error.error from None
    sleep(pause)


def _check(target: Target, edit: Edit, written: Written) -> None:
    if not edit.done_in(target.snapshot(written.revision).manifests):
        raise RegistryError(
            f"{target.name}: what was written is not there when it is read back, at {written.revision[:12]}",
            "publish again; tell whoever runs the Hub",
        )


def _overwritten(
    target: Target, parent: Snapshot, written: Written, notices: list[str]
) -> list[Mapping[Folder, Manifest]]:
    """The states in between of which what was written does not hold everything."""
    try:
        between = target.between(parent, written.revision)
        now = target.snapshot(written.revision).manifests if between else {}
    except FiTuneCacheError as error:
        notices.append(f"it can't be told whether others' rows were overwritten ({error})")
        return []
    return [
        manifests
        for manifests in between
        if not Edit({folder: manifest.bundles for folder, manifest in manifests.items()}).done_in(now)
    ]
