"""The work of a program's first lookup: find the entries, and put them where FlashInfer reads them.

Whatever goes wrong is a line in the log of ``fi_tunecache``, and FlashInfer goes on as if we were not there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from .deadline import Deadline
from .entry import DEFAULT_TACTIC, Tactic
from .errors import FiTuneCacheError, FormatError, RegistryError, UsageError
from .import_hook import forget
from .match_level import MatchLevel
from .measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from .retrieval import cached
from .selection import Request, Selection, read_selection
from .user_cache import UserCache
from .wording import at_revision, count_entries

if TYPE_CHECKING:
    from .autotuner.config_layer import ConfigLayer
    from .autotuner.live import LiveAutotuner, StoreInUse
    from .autotuner.served_entry import Unusable
    from .environment import Environment

__all__ = ["Hook", "InUse", "Options"]

logger = logging.getLogger("fi_tunecache")

_LEADERS_SHARE = 0.7
"""Of the deadline, for rank 0 to find the entries; the rest is for the others to get them and agree."""
_SOON = 0.01
"""Seconds; a deadline of none is no deadline."""


class Options(Struct, frozen=True):
    """What was said to :func:`enable`, and by the variables."""

    registries: tuple[str, ...]
    level: MatchLevel
    deadline: float
    offline: bool
    observe: bool
    group: Any = None


class InUse(Struct, frozen=True):
    """A selection that the program reads, or in ``observe`` would read, with the file's bytes.

    ``store`` is the folder in a managed store that was seeded with it; None where the autotuner's tables have it.
    """

    selection: Selection
    data: bytes
    environment: Environment
    store: Path | None = None


class _Work(Struct):
    """One thread finds entries; others wait for it, until its deadline."""

    deadline: Deadline
    thread: int
    done: threading.Event


class Hook:
    """The work of a first lookup, and what came of it.

    ``in_use`` are the selections that it has found, in order: one for entries of files, and one for each managed store.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.in_use: tuple[InUse, ...] = ()
        self._live: LiveAutotuner | None = None
        self._tuner: Any = None
        self._layer: ConfigLayer | None = None
        self._mutex = threading.Lock()
        self._work: _Work | None = None
        self._armed = False
        self._asked = 0
        self._has_files = False
        self._stores: set[str] = set()
        self._attached: set[str] = set()
        self._said: set[str] = set()

    @property
    def layer(self) -> ConfigLayer | None:
        """Where our entries stand behind the program's own; None before the first lookup, and in ``observe``."""
        return self._layer

    def attach(self, module: ModuleType) -> None:
        """Wait for the first lookup of an imported ``flashinfer.autotuner``. Raises nothing."""
        try:
            from .autotuner.live import LiveAutotuner

            self._live = LiveAutotuner(module)
            self._arm()
        except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
            with contextlib.suppress(Exception):
                self._fail(error)

    def stop(self) -> None:
        """Take everything back. Raises nothing."""
        try:
            forget(self.attach)
            self._armed = False
            if self._live is not None:
                self._live.choose_one.remove(self._around)
                if self._layer is not None:
                    self._live.remove_layer(self._tuner, self._layer)
        except Exception as error:  # noqa: BLE001
            with contextlib.suppress(Exception):
                self._fail(error)

    def after_fork(self) -> None:
        """In a forked child, whatever another thread of the parent was doing is not done here."""
        self._mutex = threading.Lock()
        self._work = None

    def _arm(self) -> None:
        self._asked += 1
        self._armed = True
        if self._live is not None:
            self._live.choose_one.add(self._around)

    def _want_files(self) -> None:
        if not self._has_files and self._work is None and not self._armed:  # else it is on its way
            self._arm()

    def _want_store(self, name: str) -> None:
        if name not in self._stores:
            self._attached.add(name)
            self._arm()

    def _around(self, inner: Callable[..., Any], tuner: Any, *arguments: Any, **options: Any) -> Any:
        if self._armed:
            try:
                self._before(tuner)
            except Exception as error:  # noqa: BLE001
                self._armed = False
                with contextlib.suppress(Exception):
                    self._fail(error)
        return inner(tuner, *arguments, **options)

    def _before(self, tuner: Any) -> None:
        from .autotuner.live import is_capturing

        assert self._live is not None
        if is_capturing() or self._live.is_locked_here(tuner) or not self._is_asked(tuner):
            return
        here = threading.get_ident()
        with self._mutex:
            work = self._work
            if work is None:
                work = self._work = _Work(Deadline(self.options.deadline), here, threading.Event())
                asked, mine = self._asked, True
            else:
                mine = False
        if not mine:
            if work.thread != here:
                work.done.wait(work.deadline.remaining())
            return
        try:
            self._find(tuner, work.deadline)
        finally:
            with contextlib.suppress(Exception):
                self._disarm(asked)
            with self._mutex:
                self._work = None
            work.done.set()

    def _is_asked(self, tuner: Any) -> bool:
        """Whether there is something to find for a lookup of this thread. Another one may wait for another store."""
        from .autotuner.config_layer import reads_files

        assert self._live is not None
        if reads_files(tuner):
            return not self._has_files
        store = self._live.name_of_store(tuner)
        return (store is None and not self._attached) or (store is not None and store not in self._stores)

    def _disarm(self, asked: int) -> None:
        assert self._live is not None
        if self._asked == asked and not self._attached:  # else somebody attached a store that was not asked yet
            self._armed = False
            self._live.choose_one.remove(self._around)

    def _find(self, tuner: Any, deadline: Deadline) -> None:
        from .autotuner.config_layer import reads_files

        assert self._live is not None
        if not self.options.observe and (self._layer is None or self._tuner is not tuner):
            self._layer = self._live.put_layer(tuner, fail=self._fail, want=self._want_files, attached=self._want_store)
            self._tuner = tuner
        if reads_files(tuner):
            if not self._has_files:
                self._serve_files(tuner, deadline)
        elif (name := self._live.name_of_store(tuner)) is not None and name not in self._stores:
            try:
                self._seed(tuner, self._live.store_in_use(tuner), deadline)
            finally:
                self._stores.add(name)
                self._attached.discard(name)

    def _serve_files(self, tuner: Any, deadline: Deadline) -> None:
        from .autotuner import collect_metadata
        from .autotuner.served_entry import served_entries

        assert self._live is not None
        entries = {}
        try:
            environment = collect_metadata()
            started = time.perf_counter()
            found = self._selection(environment, DEFAULT_POLICY, deadline)
            if not self.options.observe:
                entries = served_entries(found.selection, found.data, self._unusable(tuner, found.selection))
            self._found(found, started)
        finally:
            self._has_files = True
            if self._layer is not None:
                self._layer.fill(entries)

    def _seed(self, tuner: Any, store: StoreInUse, deadline: Deadline) -> None:
        from .managed_store import environment_folder
        from .materialisation import store_entries
        from .seeding import mark_of, seed_store

        assert self._live is not None
        started = time.perf_counter()
        found = self._selection(store.environment, store.policy, deadline)
        if self.options.observe:
            self._found(found, started)
            return
        folder = environment_folder(store.root, store.environment, store.policy)
        if folder.name != store.env_hash:
            raise FormatError(f"FlashInfer names the store's folder {store.env_hash}, not {folder.name}", "")
        entries = store_entries(found.selection, found.data)
        unusable = self._unusable(tuner, found.selection)
        if unusable is not None:
            refused = {e.key.shape for e in entries if unusable(mark_of(e), e.key.custom_op, e.runner, e.tactic)}
            entries = tuple(entry for entry in entries if entry.key.shape not in refused)
        seed_store(store.root, store.environment, store.policy, entries)
        self._found(InUse(found.selection, found.data, found.environment, folder), started)

    def _unusable(self, tuner: Any, selection: Selection) -> Unusable | None:
        """Tells which entries may not be used in this process; None where that is none.

        Those on FlashInfer's blocklist, and positions in the list of another cuBLASLt than this process has mapped
        (the environment names the one that a loader finds first).
        """
        from .mapped_library import mapped_cublas
        from .runner_families import family_of

        assert self._live is not None
        blocked = self._live.blocked(tuner)
        mapped = mapped_cublas() if any(bundle.mapped_cublas for bundle in selection.bundles) else None
        others = {
            bundle.bundle_id: bundle.mapped_cublas
            for bundle in selection.bundles
            if mapped is not None and bundle.mapped_cublas not in (None, mapped)
        }
        for bundle, theirs in others.items():
            self._warn(
                f"bundle {bundle} was tuned with cuBLASLt {theirs}, here {mapped} is mapped: its tactics are left out"
            )
        if blocked is None and not others:
            return None

        def unusable(bundle: str, custom_op: str, runner: str, tactic: Tactic) -> bool:
            if bundle in others and family_of(custom_op, runner).name == "cublaslt" and tactic != DEFAULT_TACTIC:
                return True
            return blocked is not None and blocked(custom_op, runner, tactic)

        return unusable

    def _selection(self, environment: Environment, policy: MeasurementPolicy, deadline: Deadline) -> InUse:
        from .ranks import Ranks, many_ranks

        options = self.options
        request = Request(environment=environment, registries=options.registries, level=options.level, policy=policy)
        if options.group is not None:
            ranks = Ranks.of(options.group)
            agreed = ranks.agree(
                f"entries timed under policy {policy}",
                deadline,
                lambda: self._bytes(request, Deadline(max(deadline.remaining(), _SOON) * _LEADERS_SHARE)),
                lambda data: _check(request, data),
            )
            if not agreed.install or agreed.data is None:
                raise RegistryError(f"nothing is installed on any rank: {agreed.reason}", "")
            data = agreed.data
        elif many_ranks():
            raise UsageError("there are several ranks, and nothing is installed", "name them with enable(group=…)")
        else:
            data = self._bytes(request, deadline)
        return InUse(read_selection(data), data, environment)

    def _bytes(self, request: Request, deadline: Deadline) -> bytes:
        """The selection file: from the user cache, without a request; else made in a process that ends in time."""
        cache = UserCache.locate()
        held = cached(request, cache)
        for notice in cache.notices:
            self._warn(notice)
        if held is not None:
            return held.data
        from .download import download

        made = download(request, cache.root, deadline, offline=self.options.offline)
        for notice in made.notices:
            self._warn(notice)
        return made.data

    def _found(self, found: InUse, started: float) -> None:
        selection = found.selection
        self.in_use = (*self.in_use, found)
        names = ", ".join(at_revision(name, revision) for name, revision in selection.registries)
        logger.info(
            "fi-tunecache: %s for %s (%s) from %s in %.0f ms%s",
            count_entries(selection.entries),
            selection.gpu,
            selection.level,
            names,
            (time.perf_counter() - started) * 1000,
            " (observed only)" if self.options.observe else "" if found.store is None else f", in {found.store}",
        )

    def _fail(self, error: Exception) -> None:
        """Say once what went wrong."""
        if isinstance(error, FiTuneCacheError):
            said = str(error)
        else:
            said = f"{type(error).__name__}: {str(error)[:200]}; this is a fault of fi-tunecache: please report it"
        registries = "".join(f" --registry {name}" for name in self.options.registries)
        self._warn(f"{said}; FlashInfer goes on without it, `fi-tunecache resolve{registries}` tells more")

    def _warn(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            logger.warning("fi-tunecache: %s", line)


def _check(request: Request, data: bytes) -> None:
    """Raises FormatError where another rank's selection was not made for what this one asks for."""
    if read_selection(data).id != request.selection_id:
        raise FormatError("rank 0's selection was made for another environment, registry or match level", "")
