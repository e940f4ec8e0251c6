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
import inspect
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
from typing import Any

import msgspec

from .hub_failure import without_tokens
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
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EEXIST,
        errno.EFBIG,
        errno.EIO,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
        errno.ESTALE,
    }
)
_STATUS_KINDS = {401: "unauthorized", 403: "forbidden", 404: "missing", 412: "stale", 416: "garbled", 429: "rate"}
_FAULTS_OF_A_CACHE = frozenset({"disk", "garbled"})
"""Kinds of failures that may be those of the hub cache: a lock file of another user, or half a file of other bytes."""

_INCONSISTENT = re.compile(r"Consistency check failed: (file should be of size \d+ but has size \d+)")
"""How the library says that a file has another size than was announced."""

_MAX_DETAIL = 300
_BAD_ADDRESS = frozenset({"InvalidSchema", "InvalidURL", "LocationParseError", "MissingSchema", "UnsupportedProtocol"})
"""What HTTP clients raise for an address that is none."""


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
            offline = mode == OFFLINE
            cache = _usable(Path(hub_cache), offline) or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            hub = _Hub(repository, cache, offline=offline)
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


def _is_beyond(error: BaseException, limit: int) -> bool:
    """Whether a file could not be written because it has more than ``limit`` bytes, not because the disk is full."""
    if not isinstance(error, OSError) or error.errno != errno.EFBIG:
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_FSIZE)[0] > limit


def _usable(folder: Path, offline: bool) -> Path | None:
    try:
        if not offline:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if offline or os.access(folder, os.W_OK) else None


class _Broken:
    """Answers everything with why huggingface_hub can't be used."""

    def __init__(self, error: Exception) -> None:
        detail = without_tokens(f"{type(error).__name__}: {error}")
        self._failure = Failure("no_client", detail=detail[:_MAX_DETAIL])

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
        errors = huggingface_hub.errors
        self._kinds: dict[type[Exception], str | None] = {
            errors.GatedRepoError: "gated",
            errors.RepositoryNotFoundError: "no_repository",
            errors.RevisionNotFoundError: "no_revision",
            errors.LocalEntryNotFoundError: None,
            errors.FileMetadataError: "not_a_hub",
            errors.OfflineModeIsEnabled: "not_cached",
        }
        _disable_retries(huggingface_hub.utils)
        self._token: str | None = None

    def answer(self, asked: Asked) -> Answer:
        """The one place where the library's exceptions are caught and given a name."""
        question, end = asked.question, time.monotonic() + asked.timeout
        for attempt in range(_ATTEMPTS):
            try:
                self._token = self._hub.get_token()
            except (OSError, ValueError) as error:  # its file is unreadable, or not text
                return Failure("token_file", detail=f"{self._hub.constants.HF_TOKEN_PATH}: {type(error).__name__}")
            try:
                return self._try(question, max(0.1, end - time.monotonic()))
            except Exception as error:  # noqa: BLE001 - each major of the library brings another HTTP client's tree
                if isinstance(question, AskFile) and any(_is_beyond(cause, question.limit) for cause in _chain(error)):
                    return File(None, too_large=True)
                failure = self._failure(error)
            if isinstance(question, AskFile) and not question.fresh and failure.kind in _FAULTS_OF_A_CACHE:
                question = msgspec.structs.replace(question, fresh=True)
                continue
            if isinstance(question, MakeCommit) or not _may_pass(failure):
                break  # a commit that failed may have been made: whoever asked looks before it is tried again
            pause = failure.retry_after or 0.3 * 2**attempt * random.uniform(0.5, 1.5)
            if attempt + 1 == _ATTEMPTS or time.monotonic() + pause >= end:
                break
            time.sleep(pause)
        return failure

    def _try(self, question: Question, timeout: float) -> Answer:
        api, repository = self._api, self._repository
        match question:
            case AskHead(revision=revision, visibility=visibility):
                expand: list[Any] = ["sha", "private"] if visibility else ["sha"]
                info = api.dataset_info(repository, revision=revision, timeout=timeout, expand=expand)
                return Head(_commit(info.sha), info.private if visibility else None)
            case AskFile():
                return self._file(question, timeout)
            case Prefetch(commit=commit, paths=paths):
                with ThreadPoolExecutor(_THREADS) as pool:
                    for path in paths:
                        pool.submit(self._download, commit, path, timeout)
                return Done()
            case AskTree(commit=commit) if self._offline:
                kept = self._cache / f"datasets--{repository.replace('/', '--')}" / "snapshots" / commit
                if not kept.is_dir():
                    return Failure("not_cached")
                found = sorted(path for path in kept.rglob("*") if path.is_file())
                return Tree(tuple(TreeFile(path.relative_to(kept).as_posix(), "") for path in found))
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
                status = getattr(response, "status_code", None)
                detail = getattr(cause, "server_message", None) or _reason(cause)
                return Failure(
                    kind,
                    status=status,
                    detail=self._scrubbed(str(detail or ("" if status else type(cause).__name__))),
                    retry_after=_retry_after(response),
                )
        return Failure("not_cached" if self._offline else "unreachable", detail=type(error).__name__)

    def _kind(self, error: BaseException) -> str | None:
        for kind_of_error, kind in self._kinds.items():
            if isinstance(error, kind_of_error):
                return kind
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int) and status >= 400:
            return _STATUS_KINDS.get(status, "server" if status >= 500 else "refused")
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            return "disk"
        if isinstance(error, OSError) and _INCONSISTENT.match(str(error)):
            return "garbled"
        if type(error).__name__ in _BAD_ADDRESS:
            return "endpoint"
        if isinstance(error, UnicodeEncodeError):
            return "unauthorized"  # of what goes into a header only the token is not ours
        if "JSONDecode" in type(error).__name__ or isinstance(error, _FAULTS_OF_AN_ANSWER):
            return "not_a_hub"
        # All that is left are transport errors and faults of the library: its name tells which.
        return "unreachable"

    def _scrubbed(self, text: str) -> str:
        text = text.replace(self._token, "***") if self._token else text
        return " ".join(text.split())[:_MAX_DETAIL]


_FAULTS_OF_AN_ANSWER = (AttributeError, LookupError, TypeError, ValueError)
"""What code raises that takes an answer's form for granted."""


def _disable_retries(utils: object) -> None:
    """Leave it to :meth:`_Hub.answer` to try again: the library would wait in silence, for as long as a Hub says."""
    for name in ("http_backoff", "http_stream_backoff"):
        defaults = getattr(inspect.unwrap(getattr(utils, name, print)), "__kwdefaults__", None) or {}
        if "max_retries" in defaults:
            defaults["max_retries"] = 0


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


def _reason(error: BaseException) -> str:
    """What the system says of an error of the network or the disk, such as ``Connection refused``; of sizes, which."""
    if inconsistent := _INCONSISTENT.match(str(error)):
        return inconsistent[1]
    reasons = [cause.strerror for cause in _chain(error) if isinstance(cause, OSError) and cause.strerror]
    return reasons[-1] if reasons else ""


def _may_pass(failure: Failure) -> bool:
    return failure.kind == "unreachable" or failure.status in _TRANSIENT


def _retry_after(response: object) -> float | None:
    """Seconds, of the header that every server may send or of the one that huggingface.co does."""
    headers = getattr(response, "headers", {})
    found = re.fullmatch(r"([0-9]{1,5})", headers.get("Retry-After", "")) or re.search(
        r";\s*t=([0-9]{1,5})\b", headers.get("RateLimit", "")
    )
    return float(found[1]) if found else None
