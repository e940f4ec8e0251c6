"""The repositories of a Hub and who may come: what a test reads and changes without a client."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .repository import Repository

__all__ = ["Account", "Hub"]


@dataclass(frozen=True)
class Account:
    """Whom a token stands for; ``granted``: private and gated repositories are open to it."""

    name: str = "somebody"
    write: bool = True
    granted: bool = True


class Hub:
    """The repositories below ``folder``; safe to use from many threads.

    Attributes
    ----------
    endpoint
        Where it is served.
    tokens
        Who may come. Without any, everybody may do everything; else who has no token may read what is public,
        and an unknown token is refused.
    require_token
        Reading what is public needs a token too.
    ignore_parent_commit
        Commit on top of whatever there is, as some servers do.
    page_size
        Rows of a page of files or commits.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoint = ""
        self.tokens: dict[str, Account] = {}
        self.require_token = False
        self.ignore_parent_commit = False
        self.page_size = 1000
        self._lock = threading.Lock()
        self._repositories: dict[str, Repository] = {}

    def repository(self, name: str) -> Repository | None:
        """The repository ``owner/name``, or None."""
        folder = self._folder(name)
        with self._lock:
            if folder and name not in self._repositories and folder.is_dir():
                self._repositories[name] = Repository(folder)
            return self._repositories.get(name)

    def create(self, name: str, *, private: bool = False, gated: bool = False) -> bool:
        """Make a repository with its initial commit; False where it exists."""
        folder = self._folder(name)
        if folder is None:
            raise ValueError(f"not owner/name: {name}")
        with self._lock:
            if folder.is_dir():
                return False
            self._repositories[name] = Repository.create(folder, "hub", private=private, gated=gated)
            return True

    def put(self, name: str, changes: Mapping[str, bytes | None], message: str = "Put", *, branch: str = "main") -> str:
        """Commit the files, None deletes; returns the commit, the same as before where nothing changes."""
        found = self._existing(name)
        with found.lock:
            reference, head = found.reference(branch)
            return found.commit(reference, head, changes, message, "hub")

    def read(self, name: str, path: str, revision: str = "main") -> bytes:
        """Raises KeyError where there is no such file."""
        found = self._existing(name)
        return found.read(found.files(found.resolve(revision))[path].oid)

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Every file by its path."""
        found = self._existing(name)
        nodes = found.files(found.resolve(revision))
        return {path: found.read(node.oid) for path, node in nodes.items() if node.size is not None}

    def head(self, name: str, revision: str = "main") -> str:
        """The commit that a revision stands for."""
        return self._existing(name).resolve(revision)

    def commits(self, name: str, revision: str = "main") -> list[str]:
        """Newest first; the last is the initial one."""
        found = self._existing(name)
        return [commit.oid for commit in found.history(found.resolve(revision))]

    def references(self, name: str) -> dict[str, str]:
        """Commits by the full names of what stands for them."""
        return self._existing(name).references()

    def force(self, name: str, branch: str, commit: str) -> None:
        """Set a branch, back in time or anywhere, or make it."""
        if not self._existing(name).move(f"refs/heads/{branch}", commit):
            raise ValueError(f"cannot set {branch} of {name} to {commit}")

    def _existing(self, name: str) -> Repository:
        found = self.repository(name)
        if found is None:
            raise KeyError(name)
        return found

    def _folder(self, name: str) -> Path | None:
        return self.folder / f"{name}.git" if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) else None
