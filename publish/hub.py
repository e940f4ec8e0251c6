"""A dataset repository on a Hub as a registry that can be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from fi_tunecache.errors import UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.hub import HubAccess, HubTree, folders_among, hub_errors
from fi_tunecache.hub_failure import hub_error
from fi_tunecache.hub_messages import (
    AskHead,
    AskHistory,
    Committed,
    CreateRepository,
    Done,
    Failure,
    Head,
    History,
    MakeCommit,
)
from fi_tunecache.hub_name import HubName
from fi_tunecache.hub_process import HubError
from fi_tunecache.manifest import Manifest
from fi_tunecache.registry import Registry
from fi_tunecache.registry_tree import DESCRIPTOR

from .registry_edit import CARD, MAX_CARD_BYTES, Snapshot
from .target import StaleError, UncertainError, Written

__all__ = ["HubTarget"]

_UNCERTAIN = ("crashed", "deadline", "server", "unreachable", "not_a_hub")
"""Failures after which a commit may have been made."""


class _Seen(Struct):
    """What was read already, by the name of its content: another attempt reads only what has changed."""

    manifests: dict[str, Manifest]
    cards: dict[str, str]


class HubTarget:
    """One branch of a dataset repository; the repository is made at the first write if there is none."""

    def __init__(self, name: str, access: HubAccess, *, private: bool = False) -> None:
        self._hub = HubName.parse(name)
        if self._hub.commit:
            raise UsageError(f"{name} is a commit, which can't be written", "name a branch, or leave @ out")
        if access.offline:
            raise UsageError(f"{name} can't be written while the Hub may not be asked", "unset HF_HUB_OFFLINE")
        self._name = name
        self._access = access
        self._private = private
        self._process = access.process(name)
        self._seen = _Seen({}, {})

    @property
    def name(self) -> str:
        return self._name

    @property
    def title(self) -> str:
        return str(HubName(self._hub.repository))

    def tree(self, revision: str) -> HubTree:
        """The registry at a commit, to read from."""
        return HubTree(str(self._hub.at(revision)), self._access, self._process)

    def snapshot(self, revision: str | None = None) -> Snapshot:
        commit = revision or self._head()
        if commit is None:
            return Snapshot(None)
        tree = self.tree(commit)
        registry = Registry(tree)
        oids = {file.path: file.oid for file in tree.files()}
        manifests = {}
        for folder in folders_among(oids):
            oid = oids[f"{folder}/manifest.json"]
            if oid not in self._seen.manifests:
                self._seen.manifests[oid] = registry.manifest(folder)
            manifests[folder] = self._seen.manifests[oid]
        descriptor = registry.descriptor() if DESCRIPTOR in oids else None
        card = oids.get(CARD)
        if card is not None and card not in self._seen.cards:
            self._seen.cards[card] = (tree.read(CARD, MAX_CARD_BYTES) or b"").decode(errors="replace")
        return Snapshot(commit, manifests, descriptor, None if card is None else self._seen.cards[card])

    def _head(self) -> str | None:
        try:
            return self._process.ask(AskHead(self._hub.revision), Head).commit
        except HubError as error:
            if error.failure.kind == "no_repository":
                return None
            raise error.error from None

    def write(self, files: Mapping[str, bytes], parent: Snapshot, message: str, *, create_pr: bool) -> Written:
        before, branch = parent.revision, self._hub.revision
        try:
            if before is None:
                self._process.ask(CreateRepository(private=self._private), Done)
                before = self._process.ask(AskHead(branch), Head).commit
            question = MakeCommit(branch, before, dict(files), message, create_pr)
            made = self._process.ask(question, Committed)
        except HubError as error:
            raise self._classified(error) from None
        return Written(made.commit, made.pull_request)

    def _classified(self, error: HubError) -> Exception:
        failure: Failure = error.failure
        if failure.kind in ("stale", "rate"):
            return StaleError(error.error, failure.retry_after)
        if failure.kind in _UNCERTAIN:
            return UncertainError(error.error)
        return error.error

    def between(self, parent: Snapshot, revision: str) -> Sequence[Mapping[Folder, Manifest]]:
        with hub_errors():
            history = self._process.ask(AskHistory(revision), History).commits
        if parent.revision is None:  # it was made here: whatever came before ours is somebody else's
            return [self.snapshot(commit).manifests for commit in history[1:]]
        if parent.revision not in history:
            raise hub_error(self._name, Failure("missing", detail=f"its history does not show {parent.revision[:12]}"))
        return [self.snapshot(commit).manifests for commit in history[1 : history.index(parent.revision)]]
