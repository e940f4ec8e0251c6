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
        The target can't be reached, refuses, is too busy, or does not hold what was written to it. The message
        says so where it may have been written, or is.
    FormatError, CacheError, UsageError
        What the target raises; nothing is published then.
    """
    attempt = _Attempt(target, edit, message, deadline, create_pr, sleep)
    try:
        return attempt.run()
    except FiTuneCacheError as error:
        if attempt.doubt is None:
            raise
        state, next_step = attempt.doubt
        raise RegistryError(f"{error.problem}; {state}", next_step) from error


class _Attempt:
    """``doubt`` is what whoever gets an error must be told too, and what to do then."""

    def __init__(
        self,
        target: Target,
        edit: Edit,
        message: str,
        deadline: Deadline,
        create_pr: bool,
        sleep: Callable[[float], None],
    ) -> None:
        self._target = target
        self._edit = edit
        self._message = message
        self._deadline = deadline
        self._create_pr = create_pr
        self._sleep = sleep
        self._attempts = 0
        self._uncertain = self._missing = 0
        self._unchecked: Snapshot | None = None
        """What the first write was built on of which it is not known yet what it has overwritten."""
        self._notices: list[str] = []
        self._owed: tuple[str, str] | None = None
        """What to tell as long as others' rows are to be put back."""
        self.doubt: tuple[str, str] | None = None

    def run(self) -> Outcome:
        changed = False
        while True:
            began = self._deadline.remaining()
            snapshot = self._target.snapshot()
            files = files_to_write(self._edit, snapshot, self._target.title, self._target.address)
            if files:
                written = self._write(files, snapshot, began)
                if written is None or not self._is_there(written):
                    continue
            else:
                written = Written(snapshot.revision or "")
                if self._unchecked is not None and self._uncertain:
                    self._notices.append(f"{self._target.name} reported a failure, but had written")
            changed = changed or self._unchecked is not None
            if not self._has_overwritten(written):
                return Outcome(written.revision, changed, self._attempts, written.pull_request, tuple(self._notices))

    def _write(self, files: Mapping[str, bytes], snapshot: Snapshot, began: float) -> Written | None:
        """None where it is worth another try, and there is time for one that takes as long as this."""
        self._attempts += 1
        self.doubt = self._owed
        try:
            written = self._target.write(files, snapshot, self._message, create_pr=self._create_pr)
        except StaleError as error:
            self._pause(error.error, error.pause or 0.0, leave=began - self._deadline.remaining())
            return None
        except UncertainError as error:
            self._uncertain += 1
            self._unchecked = self._unchecked or snapshot
            next_step = "look for its pull request first" if self._create_pr else "publish again: it does no harm"
            self.doubt = self._owed or ("it may have written all the same", next_step)
            if self._create_pr or self._uncertain > _MAX_UNCERTAIN:
                raise error.error from None
            self._pause(error.error)
            return None
        self._unchecked = self._unchecked or snapshot
        return written

    def _pause(self, error: FiTuneCacheError, at_least: float = 0.0, *, leave: float = 0.0) -> None:
        pause = at_least + random.uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._attempts, 10)))
        if pause + leave >= self._deadline.remaining():
            raise error
        self._sleep(pause)

    def _is_there(self, written: Written) -> bool:
        """Read back what was written.

        A client leaves out a file that is there already when it looks. Where somebody else replaces that one before
        the commit is made, and the target lets a stale write pass, the commit lacks it: then it is written again.
        """
        commit = written.revision[:12]
        self.doubt = self._owed or (f"it was written, at {commit}, but not read back", "publish again: it does no harm")
        there = self._target.manifests(written.revision, self._edit.rows)
        self.doubt = self._owed
        if self._edit.done_in(there):
            return True
        self._missing += 1
        error = RegistryError(
            f"{self._target.name}: what was written is not there when it is read back, at {commit}",
            "publish again; tell whoever runs the Hub",
        )
        if self._create_pr or self._missing > _MAX_UNCERTAIN:
            raise error
        self._pause(error)
        return False

    def _has_overwritten(self, written: Written) -> bool:
        """Whether others' rows are to be put back, which the edit will do then."""
        parent, self._unchecked = self._unchecked, None
        if parent is None or self._create_pr:
            return False
        lost = self._overwritten(parent, written)
        for manifests in lost:
            self._edit = self._edit.with_manifests(manifests)
        if lost:
            self._notices.append(f"{self._target.name} let a stale write pass: what others had published is put back")
            self.doubt = self._owed = (
                "what others had published meanwhile was overwritten, and may not be put back",
                "let them publish again, and tell whoever runs the Hub that it ignores parent_commit",
            )
        return bool(lost)

    def _overwritten(self, parent: Snapshot, written: Written) -> list[Mapping[Folder, Manifest]]:
        """The states in between of which what was written does not hold everything."""
        folders = self._edit.rows
        try:
            between = self._target.between(parent, written.revision, folders)
            now = self._target.manifests(written.revision, folders) if between else {}
        except FiTuneCacheError as error:
            self._notices.append(f"it can't be told whether others' rows were overwritten ({error})")
            return []
        return [manifests for manifests in between if not Edit({}).with_manifests(manifests).done_in(now)]
