"""The name of a registry on a Hugging Face Hub: ``hf://datasets/organisation/name[@revision]``."""

from __future__ import annotations

import re

from msgspec import Struct

from .errors import UsageError
from .registry_tree import HUB_SCHEME

__all__ = ["HubName"]

_PART = r"\w(?:[\w.-]{0,94}\w)?"
_REPOSITORY = re.compile(rf"(?!.*(?:--|\.\.)){_PART}/{_PART}(?<!\.git)", re.ASCII)
_REVISION = re.compile(r"(?!/)(?!.*(?:\.\.|//))[\w./-]{1,255}(?<![/.])", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubName(Struct, frozen=True):
    """A dataset repository, and the branch, tag or commit that is meant (None: its main branch)."""

    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, name: str) -> HubName:
        """Raises UsageError for anything but such a name; its parts go into addresses and paths."""
        prefix = f"{HUB_SCHEME}datasets/"
        repository, separator, revision = name.removeprefix(prefix).partition("@")
        if not name.startswith(prefix) or not _REPOSITORY.fullmatch(repository):
            raise UsageError(
                f"{name[:120]!r} does not name a dataset repository", f"write it like {prefix}organisation/name"
            )
        if separator and not _REVISION.fullmatch(revision):
            raise UsageError(
                f"{revision[:80]!r} is not a branch, tag or commit", f"write it like {prefix}{repository}@main"
            )
        return cls(repository, revision if separator else None)

    @property
    def commit(self) -> str | None:
        """The revision, where it is a whole commit: what it holds never changes."""
        return self.revision if self.revision and _COMMIT.fullmatch(self.revision) else None

    def at(self, revision: str) -> HubName:
        """The same repository at another revision."""
        return HubName(self.repository, revision)

    def __str__(self) -> str:
        return f"{HUB_SCHEME}datasets/{self.repository}" + (f"@{self.revision}" if self.revision else "")
