"""The ranks of a process group install the same bytes, or none of them installs any.

The group's rank 0 leads. It posts its bytes, with their sha256 and size, in the key-value store that torch.distributed
keeps for the group. Every other rank follows: it waits for them, checks that it can use them, and says that it is
ready. There is no collective, and a follower asks nobody for anything: a rank that never takes part, or dies, costs
the others no more than their deadline.

The decision is one key, written by compare-and-set. Whoever comes first writes it for all: the leader ``install`` once
every follower is ready, anyone ``none`` as soon as it can't go on or its time is over; whoever comes later gets what
stands there. So a leader that decides at the moment at which a follower gives up can't disagree with it.

What holds while the store answers
    Of the ranks that return from :meth:`Ranks.agree`, either all are told to install, have the same bytes and have
    accepted them, or none is. It matters neither how long each rank's deadline is and when it began, nor who is late,
    stopped for a while, dead, or without this package.
What does not
    A rank that the store does not answer installs nothing. So where the store dies (a TCPStore dies with the process
    that opened it, mostly rank 0's), or is out of some rank's reach until that one's deadline, just after ``install``
    was written, those that have read it install and the others do not. All ranks look every 10 milliseconds (some more
    in a large group), so this takes a failure in just these. Nothing rules it out altogether (two generals).
Always
    ``agree`` is back at the deadline, or 0.5 seconds after it where the store has gone silent, provided that ``make``
    and ``accept`` keep to the deadline themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Protocol, TypeVar

import msgspec

from .deadline import Deadline
from .errors import FiTuneCacheError, FormatError, IntegrityError, UsageError
from .flashinfer_json import MAX_FILE_BYTES

__all__ = ["Agreed", "Ranks", "many_ranks"]

_INSTALL = "install"
_CHUNK = 1024 * 1024
"""Bytes in one value. At more than 8 MiB TCPStore's server (torch 2.13, libuv) closes the rank's connection."""
_GRACE = 0.5
"""Seconds that a call of the store gets at the least, even when the deadline is over."""
_MAX_DECISION = 500
"""Bytes."""

# The share of its time in which a rank waits for others. What is left is for the store to take and tell the decision;
# the leader is the first to give up, since it can say who is missing.
_LEADER_WAITS = 0.85
_FOLLOWER_WAITS = 0.95

_T = TypeVar("_T")


class Agreed(msgspec.Struct, frozen=True):
    """What this rank does: install ``data``, whose sha256 is given, or nothing, for a ``reason`` of one line."""

    install: bool
    data: bytes | None = None
    sha256: str = ""
    reason: str = ""


class Ranks:
    """The ranks of one process group, and the store behind it. ``rank`` and ``size`` are those within the group."""

    def __init__(self, rank: int, size: int, store: _Store) -> None:
        self.rank = rank
        self.size = size
        self._store = store

    @classmethod
    def of(cls, group: object) -> Ranks:
        """The ranks of a ``torch.distributed.ProcessGroup``; True is the default group. Asks the store nothing.

        Raises
        ------
        UsageError
            torch.distributed is not initialised, this process is not in the group, or the group has no store (MPI).
        """
        dist = _initialised()
        if dist is None:
            raise UsageError("torch.distributed is not initialised in this process", "initialise it first")
        if group is True:
            group = dist.group.WORLD
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise UsageError("this process is not in the group", "give a group that it is in")
        if not isinstance(group, dist.ProcessGroup):
            raise UsageError(f"{group!r:.80} is no process group", "give a torch.distributed.ProcessGroup, or True")
        return cls(group.rank(), group.size(), _store_of(group, dist))

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0 of the group, whose bytes the others install."""
        return self.rank == 0

    def agree(
        self, topic: str, deadline: Deadline, make: Callable[[], bytes], accept: Callable[[bytes], None]
    ) -> Agreed:
        """Agree with the other ranks on bytes to install. Installs nothing itself; an exception of ours is a reason.

        Every rank of the group calls this with the same topic. The n-th calls of all ranks meet, so a topic can be
        agreed on again; a rank that has left one out meets decisions that were made without it, which are: none.

        Parameters
        ----------
        topic
            What it is about; some hundred characters at the most.
        deadline
            This rank's own. It must leave time for ``make`` on the leader and for the slowest of the others.
        make
            Called on the leader, in this thread: the bytes, or any exception where it has none.
        accept
            Called on a follower, in this thread, with the bytes: any exception where it can't install them. Whatever
            can fail belongs here: nobody is asked again.
        """
        try:
            round_ = _Round(self._store, topic, self.rank, self.size, deadline)
            return _lead(round_, self.size, make) if self.is_leader else _follow(round_, self.rank, accept)
        except _StoreError as error:
            return _none(f"the process group's store {error}")


def many_ranks(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torch.distributed is initialised, with more than one rank, or is about to be, as torchrun's
    ``WORLD_SIZE`` says. Imports nothing, never raises."""
    try:
        dist = _initialised()
        if dist is None:
            return environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
        return bool(dist.get_world_size() > 1)
    except Exception:  # noqa: BLE001 - half imported, or just being destroyed
        return False


def _lead(round_: _Round, size: int, make: Callable[[], bytes]) -> Agreed:
    if round_.is_decided():  # the others have given up: make nothing
        return _none(round_.decision())
    try:
        data = make()
        sha256 = hashlib.sha256(data).hexdigest()
        if len(data) > MAX_FILE_BYTES:
            raise FormatError(f"a selection has {len(data):,} bytes; {MAX_FILE_BYTES:,} are allowed")
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are not to wait for it
        return _none(round_.decide(f"rank 0: {_brief(error)}"))
    waiting_for = list(range(1, size))

    def all_are_ready() -> bool:
        while waiting_for and round_.has(f"ready/{waiting_for[0]}"):
            del waiting_for[0]
        return not waiting_for

    round_.offer(data, sha256)
    if round_.wait(_LEADER_WAITS, all_are_ready):
        decision = round_.decide(_INSTALL)
    else:
        decision = round_.decide(f"rank {waiting_for[0]} has not answered in time")
    with contextlib.suppress(_StoreError):  # decided is decided
        round_.empty(len(data))
    return Agreed(True, data, sha256) if decision == _INSTALL else _none(decision)


def _follow(round_: _Round, rank: int, accept: Callable[[bytes], None]) -> Agreed:
    if not round_.wait(_FOLLOWER_WAITS, round_.is_offered):
        return _none(round_.decide(f"rank {rank} was offered nothing in time"))
    try:
        data, sha256 = round_.offered()
        accept(data)
    except _StoreError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, this rank can't install them
        return _none(round_.decide(f"rank {rank}: {_brief(error)}"))
    round_.set(f"ready/{rank}", b"")
    round_.wait(_FOLLOWER_WAITS)
    decision = round_.decide(f"rank {rank} learnt of no decision in time")
    return Agreed(True, data, sha256) if decision == _INSTALL else _none(decision)


def _none(reason: str) -> Agreed:
    return Agreed(False, reason=FiTuneCacheError(reason).problem)  # one line, printable


class _Offer(msgspec.Struct, frozen=True):
    sha256: str
    size: int


class _Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected_value: str, desired_value: bytes) -> bytes: ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: bytes) -> None: ...


class _StoreError(Exception):
    """The store raised something, or did not answer. Its text goes on from "the store"."""


class _Round:
    """One agreement on one topic: its keys in the store.

    The connection is the group's own, since making one can stop the server for all: it looks up the name of whoever
    connects, in the thread that serves everybody (seen with torch 2.13: 5 seconds where the name server is silent).
    So no call may wait for anything but the server: only a key that is there is read, and none is ever taken away.

    Each call is made in a thread that can be left behind: ``check``, ``add`` and ``compare_set`` have no timeout, and
    wait without end for a server that is stopped (torch 2.13). One that is killed makes them raise at once.
    """

    def __init__(self, store: _Store, topic: str, rank: int, size: int, deadline: Deadline) -> None:
        self._deadline = deadline
        self._seconds = deadline.remaining()
        self._pause = 0.01 + size * 0.0001  # the server gets 20,000 questions a second at the most
        self._store: _Store = sys.modules["torch.distributed"].PrefixStore(f"fi_tunecache/{topic}", store)
        # Counted there, and not in this process: so it begins anew exactly where the store does.
        self._number = self._call(lambda: self._store.add(f"rounds/{rank}", 1))

    def offer(self, data: bytes, sha256: str) -> None:
        for start in range(0, len(data), _CHUNK):
            self.set(f"data/{start}", data[start : start + _CHUNK])
        self.set("offer", msgspec.json.encode(_Offer(sha256, len(data))))

    def is_offered(self) -> bool:
        return self.has("offer")

    def offered(self) -> tuple[bytes, str]:
        """The bytes and their sha256. Raises FormatError where they are not what was posted."""
        try:
            offer = msgspec.json.decode(self._get("offer"), type=_Offer)
        except msgspec.DecodeError as error:
            raise FormatError("what the leader offers can't be read") from error
        data = b"".join(self._get(f"data/{start}") for start in range(0, min(offer.size, MAX_FILE_BYTES), _CHUNK))
        actual = hashlib.sha256(data).hexdigest()
        if actual != offer.sha256:
            problem = "the bytes in the process group's store are not those that the leader posted"
            raise IntegrityError(problem, expected=offer.sha256, actual=actual)
        return data, actual

    def empty(self, size: int) -> None:
        """Give the store's memory back. Deleting would leave a rank waiting that is just about to get them."""
        for start in range(0, size, _CHUNK):
            self.set(f"data/{start}", b"")

    def is_decided(self) -> bool:
        return self.has("decision")

    def decision(self) -> str:
        return self._get("decision").decode(errors="replace")

    def decide(self, decision: str) -> str:
        """What is decided: this, unless something was before."""
        desired = decision.encode(errors="replace")[:_MAX_DECISION]
        stands = self._call(lambda: self._store.compare_set(self._key("decision"), "", desired))
        return stands.decode(errors="replace")

    def wait(self, share: float, condition: Callable[[], bool] = lambda: False) -> bool:
        """Whether the condition became true within that share of the time, and before anything was decided."""
        end = (1 - share) * self._seconds
        while not self.is_decided():
            if condition():
                return True
            if self._deadline.remaining() <= end:
                break
            time.sleep(self._pause)
        return False

    def has(self, name: str) -> bool:
        return self._call(lambda: self._store.check([self._key(name)]))

    def set(self, name: str, value: bytes) -> None:
        self._call(lambda: self._store.set(self._key(name), value))

    def _get(self, name: str) -> bytes:
        return self._call(lambda: self._store.get(self._key(name)))

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"

    def _call(self, call: Callable[[], _T]) -> _T:
        results: SimpleQueue[tuple[_T] | Exception] = SimpleQueue()

        def run() -> None:
            try:
                results.put((call(),))
            except Exception as error:  # noqa: BLE001 - it goes to whoever waits
                results.put(error)

        threading.Thread(target=run, name="fi-tunecache-ranks", daemon=True).start()
        try:
            result = results.get(timeout=max(self._deadline.remaining(), _GRACE))
        except Empty:
            raise _StoreError("does not answer") from None
        if isinstance(result, Exception):
            raise _StoreError(f"fails: {_brief(result)}") from result
        return result[0]


def _initialised() -> ModuleType | None:
    """torch.distributed, where the program has imported and initialised it."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _store_of(group: object, dist: ModuleType) -> _Store:
    """Raises UsageError where there is none. Both ways are undocumented; torch 2.13 has both, 2.4 the first."""
    store: _Store | None = None
    with contextlib.suppress(AttributeError, KeyError):  # it knows no group that was made past torch.distributed
        store = dist.distributed_c10d._get_process_group_store(group)
    if store is None:
        with contextlib.suppress(AttributeError, RuntimeError):
            store = group.get_group_store()  # type: ignore[attr-defined]
    if store is None:
        raise UsageError("the process group has no store", "give a group with one, such as of gloo or NCCL")
    return store


def _brief(error: BaseException) -> str:
    """One line; the library appends its stack to its words."""
    if isinstance(error, FiTuneCacheError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
