"""The process that talks to a Hub: the only place where huggingface_hub is imported.

It is a process of its own because huggingface_hub has waits without limit (file locks, requests
that hang, 23 seconds for a refused connection): whoever asks kills it at the deadline. It also keeps
that library, its HTTP client and the token out of a serving process.

Questions come on the standard input, answers go to the standard output, one line of JSON each
(:mod:`~fi_tunecache.hub_messages`). It ends when its standard input does, also in mid-download, so
it never outlives the process that asks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import msgspec

from .hub_messages import (
    Answer,
    Asked,
    AskFile,
    AskHead,
    AskHistory,
    AskTree,
    Committed,
    CreateRepository,
    Done,
    Failure,
    File,
    Head,
    History,
    MakeCommit,
    Prefetch,
    Question,
    Tree,
    TreeFile,
)

__all__ = ["OFFLINE", "main"]

OFFLINE = "offline"

_MAX_FILE_BYTES = 65 * 1024 * 1024
"""No file that this process writes may grow beyond: a Hub can't fill the disk."""

_THREADS = 8
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRANSIENT = frozenset({429, 500, 502, 503, 504})
_ATTEMPTS = 4
_DISK_ERRORS = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS}
)
_STATUS_KINDS = {401: "unauthorized", 403: "forbidden", 404: "missing", 412: "stale", 429: "rate"}
_MAX_DETAIL = 300


def main(repository: str, hub_cache: str, mode: str) -> None:
    """Answer questions about a dataset repository until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to everyone; the asking process decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    _limit_file_size()
    questions: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read_questions, args=(questions,), daemon=True).start()
    with contextlib.ExitStack() as stack:
        hub: _Hub | _Broken
        try:
            cache = _writable(Path(hub_cache)) or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            hub = _Hub(repository, cache, offline=mode == OFFLINE)
        except Exception as error:  # noqa: BLE001 - it may be missing, too old, or break in any way
            hub = _Broken(error)
        while line := questions.get():
            answers.write(msgspec.json.encode(hub.answer(msgspec.json.decode(line, type=Asked))) + b"\n")
            answers.flush()
    os._exit(0)  # whoever asked may wait for it; there is nothing to take down


def _read_questions(questions: SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        questions.put(line)
    questions.put(b"")
    time.sleep(1.0)  # enough to leave in good order where nothing is going on
    os._exit(0)


def _limit_file_size() -> None:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY or soft > _MAX_FILE_BYTES:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, hard))


def _writable(folder: Path) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


class _Broken:
    """Answers everything with why huggingface_hub can't be used."""

    def __init__(self, error: Exception) -> None:
        self._failure = Failure("no_client", detail=f"{type(error).__name__}: {error}"[:_MAX_DETAIL])

    def answer(self, asked: Asked) -> Answer:
        return self._failure


class _Hub:
    def __init__(self, repository: str, cache: Path, *, offline: bool) -> None:
        import huggingface_hub

        self._repository = repository
        self._cache = cache
        self._offline = offline
        self._hub = huggingface_hub
        self._api = huggingface_hub.HfApi()
        self._token: str | None = None

    def answer(self, asked: Asked) -> Answer:
        """The one place where the library's exceptions are caught and given a name."""
        end = time.monotonic() + asked.timeout
        for attempt in range(_ATTEMPTS):
            try:
                self._token = self._hub.get_token()
            except (OSError, ValueError) as error:  # its file is unreadable, or not text
                return Failure("token_file", detail=f"{self._hub.constants.HF_TOKEN_PATH}: {type(error).__name__}")
            try:
                return self._try(asked.question, max(0.1, end - time.monotonic()))
            except Exception as error:  # noqa: BLE001 - each major of the library brings another HTTP client's tree
                failure = self._failure(error)
            if isinstance(asked.question, MakeCommit) or not _may_pass(failure):
                break  # a commit that failed may have been made: whoever asked looks before it is tried again
            pause = failure.retry_after or 0.3 * 2**attempt * random.uniform(0.5, 1.5)
            if attempt + 1 == _ATTEMPTS or time.monotonic() + pause >= end:
                break
            time.sleep(pause)
        return failure

    def _try(self, question: Question, timeout: float) -> Answer:
        api, repository = self._api, self._repository
        match question:
            case AskHead(revision=revision):
                info = api.dataset_info(repository, revision=revision, timeout=timeout, expand=["sha"])
                return Head(_commit(info.sha))
            case AskFile():
                return self._file(question, timeout)
            case Prefetch(commit=commit, paths=paths):
                with ThreadPoolExecutor(_THREADS) as pool:
                    for path in paths:
                        pool.submit(self._download, commit, path, timeout)
                return Done()
            case AskTree(commit=commit):
                listed = api.list_repo_tree(repository, repo_type="dataset", revision=commit, recursive=True)
                return Tree(tuple(TreeFile(item.path, item.blob_id) for item in listed if hasattr(item, "blob_id")))
            case AskHistory(commit=commit):
                commits = api.list_repo_commits(repository, repo_type="dataset", revision=commit)
                return History(tuple(_commit(item.commit_id) for item in commits))
            case CreateRepository(private=private):
                api.create_repo(repository, repo_type="dataset", private=private, exist_ok=True)
                return Done()
            case MakeCommit():
                made = api.create_commit(
                    repository,
                    [
                        self._hub.CommitOperationAdd(path_in_repo=path, path_or_fileobj=data)
                        for path, data in question.files.items()
                    ],
                    repo_type="dataset",
                    commit_message=question.message,
                    revision=question.branch,
                    parent_commit=question.parent,
                    create_pr=question.create_pr,
                )
                return Committed(_commit(made.oid), made.pr_url)

    def _file(self, question: AskFile, timeout: float) -> File:
        where = (question.commit, question.path, timeout)
        if not question.fresh:
            return _bounded(self._download(*where), question.limit)
        # What was damaged may be damaged again by whoever shares the cache: take it out, and go round it.
        with contextlib.suppress(OSError):
            self._forget(question)
        with tempfile.TemporaryDirectory() as folder:
            return _bounded(self._download(*where, cache=Path(folder)), question.limit)

    def _download(self, commit: str, path: str, timeout: float, cache: Path | None = None) -> Path | None:
        try:
            found = self._hub.hf_hub_download(
                self._repository,
                path,
                repo_type="dataset",
                revision=commit,
                cache_dir=str(cache or self._cache),
                etag_timeout=min(timeout, 10.0),
                local_files_only=self._offline,
            )
        except self._hub.errors.EntryNotFoundError as error:
            if isinstance(error, self._hub.errors.LocalEntryNotFoundError):
                raise  # it is not that the Hub has no such file, but that the Hub did not answer
            return None
        return Path(found)

    def _forget(self, question: AskFile) -> None:
        cached = self._hub.try_to_load_from_cache(
            self._repository, question.path, self._cache, question.commit, "dataset"
        )
        if isinstance(cached, str):
            for path in (Path(cached).resolve(), Path(cached)):
                if path.is_relative_to(self._cache.resolve()):
                    path.unlink(missing_ok=True)

    def _failure(self, error: Exception) -> Failure:
        """The cause that tells most: wrappers that only say that something failed are passed over."""
        for cause in _chain(error):
            kind = self._kind(cause)
            if kind is not None:
                response = getattr(cause, "response", None)
                detail = getattr(cause, "server_message", None) or type(cause).__name__
                return Failure(
                    kind,
                    status=getattr(response, "status_code", None),
                    detail=self._scrubbed(str(detail)),
                    retry_after=_retry_after(response),
                )
        return Failure("not_cached" if self._offline else "unreachable", detail=type(error).__name__)

    def _kind(self, error: BaseException) -> str | None:
        errors = self._hub.errors
        named = {
            errors.GatedRepoError: "gated",
            errors.RepositoryNotFoundError: "no_repository",
            errors.RevisionNotFoundError: "no_revision",
            errors.LocalEntryNotFoundError: None,
            errors.FileMetadataError: "not_a_hub",
            errors.OfflineModeIsEnabled: "not_cached",
        }
        for kind_of_error, kind in named.items():
            if isinstance(error, kind_of_error):
                return kind
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int) and status >= 400:
            return _STATUS_KINDS.get(status, "server" if status >= 500 else "refused")
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            return "disk"
        if isinstance(error, _NotACommitError) or "JSONDecode" in type(error).__name__:
            return "not_a_hub"
        # All that is left are transport errors and faults of the library: its name tells which.
        return "unreachable"

    def _scrubbed(self, text: str) -> str:
        text = text.replace(self._token, "***") if self._token else text
        return " ".join(text.split())[:_MAX_DETAIL]


class _NotACommitError(ValueError):
    """A Hub named something as a commit that is none."""


def _commit(text: str | None) -> str:
    if text is None or not _COMMIT.fullmatch(text):
        raise _NotACommitError(text)
    return text


def _bounded(path: Path | None, limit: int) -> File:
    if path is None:
        return File(None)
    with path.open("rb") as stream:
        data = stream.read(limit + 1)
    return File(None, too_large=True) if len(data) > limit else File(data)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _may_pass(failure: Failure) -> bool:
    return failure.kind == "unreachable" or failure.status in _TRANSIENT


def _retry_after(response: object) -> float | None:
    value = getattr(response, "headers", {}).get("Retry-After", "")
    return float(value) if re.fullmatch(r"[0-9]{1,5}", value) else None
