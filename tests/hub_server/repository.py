"""A bare git repository: immutable snapshots of files, and references that move by compare-and-swap."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .answer import Refusal
from .objects import Node, Objects

__all__ = ["NO_COMMIT", "Commit", "Repository"]

NO_COMMIT = "0" * 40
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REFERENCE = re.compile(r"(?!.*(\.\.|//))refs/[\w./-]+")  # nothing that leaves the folder
_ATTRIBUTES = b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"


@dataclass(frozen=True)
class Commit:
    oid: str
    tree: str
    parent: str | None
    author: str
    seconds: int
    message: str


class Repository:
    """One repository; safe to use from many threads. ``private`` and ``gated`` are marker files in its folder.

    Reading starts no process and a commit starts one: ``git update-ref REF NEW OLD``.
    """

    def __init__(self, folder: Path) -> None:
        self.lock = threading.Lock()
        self._folder = folder
        self._objects = Objects(folder / "objects")
        self._snapshots: dict[str, Mapping[str, Node]] = {}

    @classmethod
    def create(cls, folder: Path, author: str, *, private: bool = False, gated: bool = False) -> Repository:
        """With an initial commit, as the Hub makes one."""
        folder.mkdir(parents=True)
        found = cls(folder)
        if not found._git("init", "--quiet", "--bare", "--initial-branch=main", "--template="):
            raise RuntimeError(f"git init failed in {folder}")
        for name, wanted in (("private", private), ("gated", gated)):
            if wanted:
                (folder / name).touch()
        with found.lock:
            found.commit("refs/heads/main", None, {".gitattributes": _ATTRIBUTES}, "initial commit", author)
        return found

    @property
    def private(self) -> bool:
        return (self._folder / "private").exists()

    @property
    def gated(self) -> bool:
        return (self._folder / "gated").exists()

    def target(self, reference: str) -> str | None:
        """The commit of a full reference name, straight from its file."""
        if not _REFERENCE.fullmatch(reference):
            return None
        try:
            return (self._folder / reference).read_text().strip()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def reference(self, revision: str) -> tuple[str, str]:
        """The full name of a branch, of a tag, or of ``refs/...``, and the commit that it stands for now."""
        for name in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if target := self.target(name):
                return name, target
        raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def resolve(self, revision: str) -> str:
        """The commit that a revision is, or stands for now."""
        if _COMMIT.fullmatch(revision) and self._is_commit(revision):
            return revision
        return self.reference(revision)[1]

    def references(self) -> dict[str, str]:
        files = [path for path in sorted((self._folder / "refs").rglob("*")) if path.is_file()]
        names = [path.relative_to(self._folder).as_posix() for path in files if path.suffix != ".lock"]
        return {name: target for name in names if (target := self.target(name))}

    def move(self, reference: str, new: str, old: str | None = None) -> bool:
        """Compare and swap; ``NO_COMMIT`` as ``old`` creates, as ``new`` deletes; without ``old`` it is just set."""
        return self._git("update-ref", reference, new, *([old] if old else []))

    def files(self, commit: str) -> Mapping[str, Node]:
        """Every file and folder of a commit by its path, in git's order."""
        if commit not in self._snapshots:
            self._snapshots[commit] = dict(self._objects.walk(self.details(commit).tree))
        return self._snapshots[commit]

    def read(self, oid: str) -> bytes:
        return self._objects.read(oid)

    def details(self, commit: str) -> Commit:
        head, _, message = self.read(commit).decode().partition("\n\n")
        fields = dict(line.split(" ", 1) for line in head.splitlines())
        author, seconds, _ = fields["author"].rsplit(" ", 2)
        name = author.partition(" <")[0]
        return Commit(commit, fields["tree"], fields.get("parent"), name, int(seconds), message.rstrip("\n"))

    def history(self, commit: str) -> Iterator[Commit]:
        """The commit and its ancestors, newest first."""
        following: str | None = commit
        while following:
            details = self.details(following)
            yield details
            following = details.parent

    def commit(
        self, reference: str, parent: str | None, changes: Mapping[str, bytes | None], message: str, author: str
    ) -> str:
        """Put a commit with the changes on top of ``parent`` and move ``reference`` there; hold ``lock``.

        None as a change deletes, whatever is below a folder too. Returns ``parent`` where nothing changes.
        """
        before = self.files(parent) if parent else {}
        after = {path: node.oid for path, node in before.items() if node.size is not None}
        for path, data in changes.items():
            if data is None:
                self._delete(after, path.rstrip("/"))
            elif {"", ".", "..", ".git"} & set(path.split("/")):
                raise Refusal(400, "", f"Invalid path: {path}")
            else:
                after[path] = self._objects.write("blob", data)
        try:
            tree = self._objects.write_tree(after)
        except ValueError as error:
            raise Refusal(400, "", str(error)) from error
        if parent and tree == self.details(parent).tree:
            return parent
        parents = f"parent {parent}\n" if parent else ""
        by = f"{author} <{author}@hub.test> {int(time.time())} +0000"
        text = f"tree {tree}\n{parents}author {by}\ncommitter {by}\n\n{message}\n"
        commit = self._objects.write("commit", text.encode())
        if not self.move(reference, commit, parent if self.target(reference) else NO_COMMIT):
            raise Refusal(412, "", "A commit has happened since. Please refresh and try again.")
        return commit

    def _delete(self, files: dict[str, str], path: str) -> None:
        below = [name for name in files if name == path or name.startswith(path + "/")]
        if not below:
            raise Refusal(404, "EntryNotFound", f"A file with this name doesn't exist: {path}")
        for name in below:
            del files[name]

    def _is_commit(self, oid: str) -> bool:
        try:
            return self.read(oid).startswith(b"tree ")
        except FileNotFoundError:
            return False

    def _git(self, *arguments: str) -> bool:
        # An environment of its own: inside a git hook, GIT_DIR and others would name another repository.
        environment = {"PATH": os.environ["PATH"], "HOME": str(self._folder), "GIT_CONFIG_NOSYSTEM": "1"}
        command = ["git", f"--git-dir={self._folder}", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
