"""A registry in memory that can be written, and goes wrong on demand: a Hub without HTTP."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from fi_tunecache.deadline import Deadline
from fi_tunecache.errors import IntegrityError, RegistryError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import Manifest
from fi_tunecache.publish.registry_edit import Snapshot, read_card
from fi_tunecache.publish.target import StaleError, UncertainError, Written
from fi_tunecache.registry import Registry
from fi_tunecache.registry_tree import DESCRIPTOR

__all__ = ["FAULT", "Clock", "Fault", "MemoryTarget", "TreeInMemory", "fails_after", "fails_before", "limits"]

Fault = Callable[[Callable[[], str]], str]
"""Is called instead of a write with what makes the commit; gives its revision."""

FAULT = RegistryError("the Hub has a fault", "try again later")


class Clock(Deadline):
    """A deadline on a clock that only moves on while somebody sleeps."""

    def __init__(self, seconds: float = 60.0) -> None:
        super().__init__(seconds)
        self.left = seconds
        self.slept: list[float] = []

    def remaining(self) -> float:
        return max(0.0, self.left)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.left -= seconds


class TreeInMemory:
    """The files of a commit, to read from."""

    name = "memory"
    branch = None

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def revision(self, folder: Folder) -> str | None:
        return None

    def folders(self) -> tuple[Folder, ...]:
        paths = (path.removesuffix("/manifest.json") for path in self._files if path.endswith("/manifest.json"))
        return tuple(sorted(map(Folder.parse, paths)))

    def read(self, path: str, limit: int) -> bytes | None:
        data = self._files.get(path)
        if data is not None and len(data) > limit:
            raise IntegrityError(f"{path} has more than {limit} bytes")
        return data

    def prefetch(self, paths: Iterable[str]) -> None:
        pass

    def discard(self, path: str) -> bool:
        return False


class MemoryTarget:
    """Every commit is kept, a branch is a list of them; a write replaces whole files, as a Hub's does.

    Parameters
    ----------
    checks_parent
        Whether a write on top of an older commit is refused; some servers let it pass.

    Attributes
    ----------
    main
        The commits of the branch, oldest first; each is all files by path.
    proposed
        The same of pull requests, one commit each.
    faults
        What happens to the next writes, one for each; None is a write that goes well.
    step
        Called before everything that is asked of the target: where others may come in between.
    """

    name = title = "memory"
    address = "hf://datasets/team/tuned"
    visibility = ""

    def __init__(self, *, checks_parent: bool = True) -> None:
        self.checks_parent = checks_parent
        self.main: list[dict[str, bytes]] = []
        self.proposed: list[dict[str, bytes]] = []
        self.faults: deque[Fault | None] = deque()
        self.step: Callable[[], None] = lambda: None

    @property
    def head(self) -> str | None:
        return str(len(self.main)) if self.main else None

    def files(self, revision: str) -> dict[str, bytes]:
        kind, _, number = revision.rpartition("/")
        return (self.proposed if kind else self.main)[int(number) - 1]

    def snapshot(self) -> Snapshot:
        self.step()
        if self.head is None:
            return Snapshot(None)
        tree = TreeInMemory(self.files(self.head))
        registry = Registry(tree)
        manifests = {folder: registry.manifest(folder) for folder in registry.folders()}
        descriptor = registry.descriptor() if tree.read(DESCRIPTOR, 1000) else None
        return Snapshot(self.head, manifests, descriptor, read_card(tree))

    def tree(self, snapshot: Snapshot) -> TreeInMemory:
        return TreeInMemory(self.files(snapshot.revision) if snapshot.revision else {})

    def manifests(self, revision: str, folders: Iterable[Folder]) -> dict[Folder, Manifest]:
        self.step()
        return self._manifests(revision, folders)

    def _manifests(self, revision: str, folders: Iterable[Folder]) -> dict[Folder, Manifest]:
        registry = Registry(TreeInMemory(self.files(revision)))
        return {folder: registry.manifest(folder) for folder in folders}

    def write(self, files: Mapping[str, bytes], parent: Snapshot, message: str, *, create_pr: bool) -> Written:
        self.step()

        def make() -> str:
            if self.checks_parent and self.head != parent.revision:
                raise StaleError(RegistryError("somebody else has published meanwhile", "try again"))
            commits = self.proposed if create_pr else self.main
            commits.append({**(self.files(self.head) if self.head else {}), **files})
            return f"refs/pr/{len(commits)}" if create_pr else str(len(commits))

        fault = self.faults.popleft() if self.faults else None
        revision = make() if fault is None else fault(make)
        return Written(revision, f"pull request {len(self.proposed)}" if create_pr else None)

    def between(
        self, parent: Snapshot, revision: str, folders: Iterable[Folder]
    ) -> Sequence[Mapping[Folder, Manifest]]:
        self.step()
        first = int(parent.revision or 0) + 1
        folders = tuple(folders)
        return [
            self._manifests(str(number), folders)
            for number in itertools.islice(itertools.count(first), int(revision) - first)
        ]


def fails_before(make: Callable[[], str]) -> str:
    """A failure that leaves it open whether it was written; it was not."""
    raise UncertainError(FAULT)


def fails_after(make: Callable[[], str]) -> str:
    """A failure that leaves it open whether it was written; it was."""
    make()
    raise UncertainError(FAULT)


def limits(pause: float | None) -> Fault:
    """The target asks to wait, for so many seconds if it says."""

    def refuse(make: Callable[[], str]) -> str:
        raise StaleError(RegistryError("the Hub limits the number of requests", "wait"), pause)

    return refuse
