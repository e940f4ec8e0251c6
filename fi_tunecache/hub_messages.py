"""What is said between this process and the one that talks to a Hub about one repository: a JSON object a line.

:class:`Asked` brings a question, which is answered by the message of its line below, or by a :class:`Failure`.

========================  =========================
:class:`AskHead`          :class:`Head`
:class:`AskFile`          :class:`File`
:class:`Prefetch`         :class:`Done`
:class:`AskTree`          :class:`Tree`
:class:`AskHistory`       :class:`History`
:class:`CreateRepository` :class:`Done`
:class:`MakeCommit`       :class:`Committed`
========================  =========================
"""

from __future__ import annotations

from typing import Union

from msgspec import Struct

__all__ = [
    "Answer",
    "AskFile",
    "AskHead",
    "AskHistory",
    "AskTree",
    "Asked",
    "Committed",
    "CreateRepository",
    "Done",
    "Failure",
    "File",
    "Head",
    "History",
    "MakeCommit",
    "Prefetch",
    "Question",
    "Tree",
    "TreeFile",
]


class AskHead(Struct, frozen=True, tag=True):
    """Which commit is a branch or tag at? None: the main branch. ``visibility``: tell too who can see it."""

    revision: str | None = None
    visibility: bool = False


class AskFile(Struct, frozen=True, tag=True):
    """A file's bytes at a commit; ``fresh``: not from the hub cache, where it proved damaged."""

    commit: str
    path: str
    limit: int
    fresh: bool = False


class Prefetch(Struct, frozen=True, tag=True):
    """Bring files into the hub cache, several at a time. What fails will fail again when it is asked for."""

    commit: str
    paths: tuple[str, ...]


class AskTree(Struct, frozen=True, tag=True):
    """Which files does a commit hold?"""

    commit: str


class AskHistory(Struct, frozen=True, tag=True):
    """A commit and those before it, newest first; the Hub gives a page of them."""

    commit: str


class CreateRepository(Struct, frozen=True, tag=True):
    """Make the dataset repository; nothing happens where it is there."""

    private: bool


class MakeCommit(Struct, frozen=True, tag=True):
    """Write ``files`` (path in the repository to its bytes) on top of ``parent``, or in a pull request."""

    branch: str | None
    parent: str
    files: dict[str, bytes]
    message: str
    create_pr: bool


Question = Union[AskHead, AskFile, Prefetch, AskTree, AskHistory, CreateRepository, MakeCommit]


class Asked(Struct, frozen=True):
    """A question, and the seconds in which an answer is worth something."""

    question: Question
    timeout: float


class Head(Struct, frozen=True, tag=True):
    """``private`` is None where it was not asked for or is not known."""

    commit: str
    private: bool | None = None


class File(Struct, frozen=True, tag=True):
    """``data`` is None where the commit holds no such file; ``too_large``: it has more bytes than the limit."""

    data: bytes | None
    too_large: bool = False


class Done(Struct, frozen=True, tag=True):
    """It was done; there is nothing to say."""


class TreeFile(Struct, frozen=True):
    """``oid`` names a file's content."""

    path: str
    oid: str


class Tree(Struct, frozen=True, tag=True):
    files: tuple[TreeFile, ...]


class History(Struct, frozen=True, tag=True):
    commits: tuple[str, ...]


class Committed(Struct, frozen=True, tag=True):
    commit: str
    pull_request: str | None = None


class Failure(Struct, frozen=True, tag=True):
    """Why there is no answer: a name of :data:`~fi_tunecache.hub_failure.FAILURES`, and what more is known.

    ``detail`` is a word or line of the library or the Hub, ``retry_after`` seconds.
    """

    kind: str
    status: int | None = None
    detail: str = ""
    retry_after: float | None = None


Answer = Union[Head, File, Done, Tree, History, Committed, Failure]
