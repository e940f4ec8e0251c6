"""A registry that is a dataset repository on a Hugging Face Hub, at one commit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec import Struct

from .branch_record import read_record
from .deadline import Deadline
from .errors import IntegrityError, RegistryError, UsageError
from .folder import Folder
from .hub_messages import AskFile, AskHead, AskTree, Done, File, Head, Prefetch, Tree, TreeFile
from .hub_name import HubName
from .hub_process import HubError, HubProcess
from .user_cache import UserCache

__all__ = ["HubAccess", "HubTree", "folders_among", "hub_errors", "hub_is_offline"]


def hub_is_offline(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the variables by which huggingface_hub goes offline are set (``constants.py``, 0.34 to 2.4)."""
    value = environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def _silent(_: str) -> None:
    pass


class HubAccess(Struct, frozen=True):
    """How a Hub may be used: until when, over which cache, whether at all; ``progress`` is told what is fetched."""

    cache: UserCache
    deadline: Deadline
    offline: bool = False
    progress: Callable[[str], None] = _silent

    def process(self, name: str) -> HubProcess:
        """The process that will talk to the Hub about a registry; it is started when it is first asked."""
        repository = HubName.parse(name).repository
        return HubProcess(name, repository, self.cache.hub_path, self.deadline, offline=self.offline)


class HubTree:
    """A dataset repository at the commit that its branch had when it was first asked.

    Nothing is asked before it is needed, and nothing twice: a commit never changes.
    """

    def __init__(self, name: str, access: HubAccess, process: HubProcess | None = None) -> None:
        self._hub = HubName.parse(name)
        self._name = name
        self._access = access
        self._commit = self._hub.commit
        self._files: tuple[TreeFile, ...] | None = None
        self._damaged: set[str] = set()
        self._process = process or access.process(name)

    @property
    def name(self) -> str:
        return self._name

    @property
    def branch(self) -> str | None:
        if self._hub.commit:
            return None
        return str(HubName(self._hub.repository) if self._hub.revision == "main" else self._hub)

    @property
    def commit(self) -> str:
        """The commit that is read. One request for a branch or tag, none where the name holds a commit."""
        if self._commit is None:
            self._commit = self._recorded_commit() if self._access.offline else self._asked_commit()
        return self._commit

    def _asked_commit(self) -> str:
        self._access.progress(f"asking {self._name} for its commit")
        with hub_errors():
            return self._process.ask(AskHead(self._hub.revision), Head).commit

    def _recorded_commit(self) -> str:
        record = read_record(self._access.cache, self.branch or "")
        if record is None:
            raise RegistryError(
                f"{self._name} was never read on this machine, and the Hub may not be asked",
                "pull once without --offline and HF_HUB_OFFLINE",
            )
        return record.commit

    def revision(self, folder: Folder) -> str | None:
        return self.commit

    def files(self) -> tuple[TreeFile, ...]:
        """Every file at the commit."""
        if self._files is None:
            with hub_errors():
                self._files = self._process.ask(AskTree(self.commit), Tree).files
        return self._files

    def folders(self) -> tuple[Folder, ...]:
        self._access.progress(f"listing {self._name}")
        return folders_among(file.path for file in self.files())

    def read(self, path: str, limit: int) -> bytes | None:
        self._access.progress(f"fetching {path} of {self._name}")
        with hub_errors():
            question = AskFile(self.commit, path, limit, fresh=path in self._damaged)
            file = self._process.ask(question, File)
        if file.too_large:
            raise IntegrityError(
                f"{path} has more than {limit} bytes", "fetch it again or tell the publisher", source=self._name
            )
        return file.data

    def prefetch(self, paths: Iterable[str]) -> None:
        paths = tuple(paths)
        if len(paths) < 2 or self._access.offline:
            return
        self._access.progress(f"fetching {len(paths)} files of {self._name}")
        with hub_errors():
            self._process.ask(Prefetch(self.commit, paths), Done)

    def discard(self, path: str) -> bool:
        if path in self._damaged or self._access.offline:
            return False
        self._damaged.add(path)
        return True

    def moved_on(self) -> bool:
        if self._hub.commit or self._access.offline:
            return False
        before = self.commit
        with contextlib.suppress(RegistryError):  # what was found wrong before is what is to be told
            self._commit, self._files = self._asked_commit(), None
        return self._commit != before


@contextlib.contextmanager
def hub_errors() -> Iterator[None]:
    """What goes wrong with a Hub, as the error that whoever uses a registry expects."""
    try:
        yield
    except HubError as error:
        raise error.error from None


def folders_among(paths: Iterable[str]) -> tuple[Folder, ...]:
    """The folders of a registry whose files have these paths, sorted."""
    found = []
    for path in paths:
        version, _, below = path.partition("/")
        slug, _, name = below.partition("/")
        with contextlib.suppress(UsageError):  # not ours: a repository may hold other things
            if name == "manifest.json":
                found.append(Folder(version, slug))
    return tuple(sorted(found))
