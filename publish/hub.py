"""A dataset repository on a Hub as a registry that can be written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
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
from fi_tunecache.manifest import Manifest, RegistryDescriptor
from fi_tunecache.registry import Registry
from fi_tunecache.registry_tree import DESCRIPTOR

from .registry_edit import CARD, Snapshot, read_card
from .target import StaleError, UncertainError, Written

__all__ = ["HubTarget"]

_UNCERTAIN = ("crashed", "deadline", "server", "unreachable", "not_a_hub")
"""Failures after which a commit may have been made."""


class _Seen(Struct):
    """What was read already, by the name of its content: another attempt reads only what has changed."""

    manifests: dict[tuple[Folder, str], Manifest]
    descriptors: dict[str, RegistryDescriptor]
    cards: dict[str, str | None]


class HubTarget:
    """One branch of a dataset repository; the repository is made at the first write if there is none."""

    def __init__(self, name: str, access: HubAccess, *, private: bool = False) -> None:
        self._hub = HubName.parse(name)
        if self._hub.commit:
            raise UsageError(f"{name} is a commit, which can't be written", "name a branch, or leave @ out")
        if access.offline:
            raise UsageError(f"{name} can't be written while the Hub may not be asked", "unset HF_HUB_OFFLINE")
        self._name = name
        self.title = self.address = str(HubName(self._hub.repository))
        self.visibility = ""
        self._access = access
        self._private = private
        self._process = access.process(name)
        self._seen = _Seen({}, {}, {})

    @property
    def name(self) -> str:
        return self._name

    def tree(self, snapshot: Snapshot) -> HubTree:
        return self._at(snapshot.revision or "")

    def _at(self, commit: str) -> HubTree:
        return HubTree(str(self._hub.at(commit)), self._access, self._process)

    def snapshot(self) -> Snapshot:
        try:
            head = self._process.ask(AskHead(self._hub.revision, visibility=self._private), Head)
        except HubError as error:
            if error.failure.kind == "no_repository":
                seen_by = "private" if self._private else "public unless the organisation's default is private"
                self.visibility = f" (it will be made, {seen_by})"
                return Snapshot(None)
            raise error.error from None
        if head.private is False:  # None: it was not asked for, or this Hub does not tell
            raise UsageError(f"{self._name} is there, and public", "leave out --private, or make it private on the Hub")
        return self._snapshot_at(head.commit)

    def _snapshot_at(self, commit: str) -> Snapshot:
        tree, seen = self._at(commit), self._seen
        registry = Registry(tree)
        oids = {file.path: file.oid for file in tree.files()}
        wanted = {(folder, oids[f"{folder}/manifest.json"]): None for folder in folders_among(oids)}
        unseen = [at for at in wanted if at not in seen.manifests]
        tree.prefetch(f"{folder}/manifest.json" for folder, _ in unseen)
        seen.manifests.update({(folder, oid): registry.manifest(folder) for folder, oid in unseen})
        descriptor, card = oids.get(DESCRIPTOR), oids.get(CARD)
        if descriptor is not None and descriptor not in seen.descriptors:
            seen.descriptors[descriptor] = registry.descriptor()
        if card is not None and card not in seen.cards:
            seen.cards[card] = read_card(tree)
        return Snapshot(
            commit,
            {folder: seen.manifests[folder, oid] for folder, oid in wanted},
            None if descriptor is None else seen.descriptors[descriptor],
            None if card is None else seen.cards[card],
        )

    def manifests(self, revision: str, folders: Iterable[Folder]) -> Mapping[Folder, Manifest]:
        registry = Registry(self._at(revision))
        return {folder: registry.manifest(folder) for folder in folders}

    def write(self, files: Mapping[str, bytes], parent: Snapshot, message: str, *, create_pr: bool) -> Written:
        try:
            commit = parent.revision or self._create(parent)
            question = MakeCommit(self._hub.revision, commit, dict(files), message, create_pr)
            made = self._process.ask(question, Committed)
        except HubError as error:
            raise self._classified(error) from None
        return Written(made.commit, made.pull_request)

    def _create(self, parent: Snapshot) -> str:
        """Make the repository; its first commit. Raises StaleError where somebody else has, and written there."""
        self._process.ask(CreateRepository(private=self._private), Done)
        commit = self._process.ask(AskHead(self._hub.revision), Head).commit
        if msgspec.structs.replace(self._snapshot_at(commit), revision=None) != parent:
            raise StaleError(hub_error(self._name, Failure("stale")))
        return commit

    def _classified(self, error: HubError) -> Exception:
        failure: Failure = error.failure
        if failure.kind in ("stale", "rate"):
            return StaleError(error.error, failure.retry_after)
        if failure.kind in _UNCERTAIN:
            return UncertainError(error.error)
        return error.error

    def between(
        self, parent: Snapshot, revision: str, folders: Iterable[Folder]
    ) -> Sequence[Mapping[Folder, Manifest]]:
        with hub_errors():
            history = self._process.ask(AskHistory(revision), History).commits
        if parent.revision is None:  # it was made here: whatever came before ours is somebody else's
            return [self.manifests(commit, folders) for commit in history[1:]]
        if parent.revision not in history:
            raise hub_error(self._name, Failure("missing", detail=f"its history does not show {parent.revision[:12]}"))
        return [self.manifests(commit, folders) for commit in history[1 : history.index(parent.revision)]]
