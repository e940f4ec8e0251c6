"""The work of a program's first lookup: find the entries, and put them where FlashInfer reads them.

Whatever goes wrong is a line in the log of ``fi_tunecache``, and FlashInfer goes on as if we were not there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct

from .autotuner import collect_metadata
from .autotuner.config_layer import ConfigLayer, reads_files
from .autotuner.live import LiveAutotuner, StoreInUse, is_capturing
from .autotuner.served_entry import Unusable, own_entries, served_entries
from .deadline import Deadline
from .download import download
from .entry import Entry
from .environment import Environment
from .errors import FiTuneCacheError, FormatError, RegistryError, UsageError
from .hub_failure import without_tokens
from .import_hook import forget
from .managed_store import environment_folder
from .match_level import MatchLevel
from .materialisation import store_entries
from .measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from .ranks import Ranks, many_ranks
from .retrieval import cached
from .seeding import Seeded, mark_of, seed_store, withdraw
from .selection import Request, Selection, read_selection
from .unusable_entries import unusable_entries
from .user_cache import UserCache
from .wording import at_revision, count_entries

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
        self._mutex = threading.RLock()  # a signal's handler may ask, too
        self._work: _Work | None = None
        self._armed = False
        self._stopped = False
        self._has_files = False
        self._stores: set[str] = set()
        self._attached: set[str] = set()
        self._said: dict[str, None] = {}

    @property
    def layer(self) -> ConfigLayer | None:
        """Where our entries stand behind the program's own; None before the first lookup, and in ``observe``."""
        return self._layer

    @property
    def warnings(self) -> tuple[str, ...]:
        """What went wrong so far, a line each."""
        return tuple(self._said)

    def attach(self, module: ModuleType) -> None:
        """Wait for the first lookup of an imported ``flashinfer.autotuner``. Raises nothing."""
        try:
            self._live = LiveAutotuner(module)
            UserCache.locate()  # what it imports is there then: no lookup may wait for an import
            self._arm()
        except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
            with contextlib.suppress(Exception):
                self._fail(error)

    def stop(self) -> None:
        """Take everything back. Raises nothing."""
        try:
            self._stopped = True
            forget(self.attach)
            self._armed = False
            if self._live is not None:
                self._live.choose_one.remove(self._around)
                self._live.save_configs.remove(self._around_save)
                if self._layer is not None:
                    self._live.remove_layer(self._tuner, self._layer)
        except Exception as error:  # noqa: BLE001
            with contextlib.suppress(Exception):
                self._fail(error)

    def after_fork(self) -> None:
        """In a forked child, whatever another thread of the parent was doing is not done here."""
        self._mutex = threading.RLock()
        self._work = None

    def _arm(self) -> None:
        if not self._stopped and self._live is not None:
            self._armed = True
            self._live.choose_one.add(self._around)

    def _want_files(self) -> None:
        if not self._has_files and self._work is None and not self._armed:  # else it is on its way
            self._arm()

    def _want_store(self, name: str) -> None:
        with self._mutex:
            if name not in self._stores:
                self._attached.add(name)
                self._arm()

    def _around(self, inner: Callable[..., Any], tuner: Any, /, *arguments: Any, **options: Any) -> Any:
        if self._armed:
            try:
                if not (self._has_files and reads_files(tuner)):
                    self._before(tuner)
            except Exception as error:  # noqa: BLE001
                self._armed = False
                with contextlib.suppress(Exception):
                    self._fail(error)
                with contextlib.suppress(Exception):
                    self._disarm()
        return inner(tuner, *arguments, **options)

    def _around_save(self, inner: Callable[..., Any], tuner: Any, /, *arguments: Any, **options: Any) -> Any:
        """``save_configs``: what others have saved in that file comes before ours too."""
        layer = self._layer
        try:
            path = arguments[0] if arguments else options.get("path")
            if layer is not None and path is not None:
                layer.saving(own_entries(path))
        except Exception as error:  # noqa: BLE001
            with contextlib.suppress(Exception):
                self._fail(error)
        try:
            return inner(tuner, *arguments, **options)
        finally:
            if layer is not None:
                with contextlib.suppress(Exception):
                    layer.saving({})

    def _before(self, tuner: Any) -> None:
        assert self._live is not None
        if is_capturing() or self._live.is_locked_here(tuner) or not self._is_asked(tuner):
            return
        here = threading.get_ident()
        with self._mutex:
            work = self._work
            mine = work is None
            if work is None:
                work = self._work = _Work(Deadline(self.options.deadline), here, threading.Event())
        if not mine:
            if work.thread != here:
                work.done.wait(work.deadline.remaining())
            return
        try:
            self._find(tuner, work.deadline)
        finally:
            with self._mutex:
                self._work = None
            work.done.set()

    def _is_asked(self, tuner: Any) -> bool:
        """Whether there is something to find for a lookup of this thread. Another one may wait for another store."""
        assert self._live is not None
        if reads_files(tuner):
            return not self._has_files
        store = self._live.name_of_store(tuner)
        return store not in self._stores if store is not None else self._layer is None

    def _disarm(self) -> None:
        """The function is FlashInfer's own again, unless a store was attached that nobody has asked yet."""
        assert self._live is not None
        with self._mutex:
            if not self._attached:
                self._armed = False
                self._live.choose_one.remove(self._around)

    def _find(self, tuner: Any, deadline: Deadline) -> None:
        """Do what a lookup of this thread asks for. An interrupt leaves it undone: then the next lookup does it."""
        assert self._live is not None
        if not self.options.observe and (self._layer is None or self._tuner is not tuner):
            layer = self._live.put_layer(
                tuner, deadline, fail=self._fail, want=self._want_files, attached=self._want_store
            )
            if layer is None:
                return  # whoever has the lock may wait for this thread
            self._layer, self._tuner = layer, tuner
            self._live.save_configs.add(self._around_save)
        name = self._live.name_of_store(tuner)
        try:
            if reads_files(tuner):
                if not self._has_files:
                    self._serve_files(tuner, deadline)
            elif name is not None and name not in self._stores:
                self._seed(tuner, self._live.store_in_use(tuner), deadline)
        except Exception:
            self._done(tuner, name)
            raise
        else:
            self._done(tuner, name)
        finally:
            if self._stopped and self._layer is not None:
                self._live.remove_layer(tuner, self._layer)

    def _done(self, tuner: Any, name: str | None) -> None:
        if reads_files(tuner):
            self._has_files = True
            if self._layer is not None:
                self._layer.fill(self._layer.ours)
        elif name is not None:
            self._stores.add(name)
            self._attached.discard(name)
        self._disarm()

    def _serve_files(self, tuner: Any, deadline: Deadline) -> None:
        environment = collect_metadata()
        started = time.perf_counter()
        found = self._selection(environment, DEFAULT_POLICY, deadline, tuner)
        self._fill(tuner, found)
        self._found(found, started)

    def _fill(self, tuner: Any, found: InUse) -> None:
        if self._layer is not None:
            unusable = self._unusable(tuner, found.selection)
            self._layer.fill(served_entries(found.selection, found.data, unusable))
        self._has_files = True

    def _seed(self, tuner: Any, store: StoreInUse, deadline: Deadline) -> None:
        assert self._live is not None
        started = time.perf_counter()
        found = self._selection(store.environment, store.policy, deadline, tuner)
        if self.options.observe:
            self._found(found, started)
            return
        folder = environment_folder(store.root, store.environment, store.policy)
        if folder.name != store.env_hash:
            raise FormatError(f"FlashInfer names the store's folder {store.env_hash}, not {folder.name}", "")
        entries = self._entries_for(tuner, store, found)
        self._seed_everywhere(store, entries, deadline)
        self._live.look_again(tuner, (entry.key.text for entry in entries), deadline)
        self._found(InUse(found.selection, found.data, found.environment, folder), started)
        if not self._has_files and store.policy == DEFAULT_POLICY:  # the same selection, for contexts without a store
            self._fill(tuner, found)

    def _entries_for(self, tuner: Any, store: StoreInUse, found: InUse) -> tuple[Entry, ...]:
        assert self._live is not None
        entries = store_entries(found.selection, found.data, only_raced=not self._live.replaces_rivals)
        unusable = self._unusable(tuner, found.selection)
        if unusable is None:
            return entries
        refused = {e.key.shape for e in entries if unusable(mark_of(e), e.key.custom_op, e.runner, e.tactic)}
        return tuple(entry for entry in entries if entry.key.shape not in refused)

    def _seed_everywhere(self, store: StoreInUse, entries: Sequence[Entry], deadline: Deadline) -> None:
        """Seed a store; with a group, on all of its ranks or on none."""
        if self.options.group is None:
            seed_store(store.root, store.environment, store.policy, entries, deadline)
            return
        seeded: Seeded | None = None
        failed: FiTuneCacheError | None = None
        try:
            seeded = seed_store(store.root, store.environment, store.policy, entries, deadline)
        except FiTuneCacheError as error:
            failed = error

        def say() -> bytes:
            if failed is not None:
                raise failed
            return b"seeded"

        ranks = Ranks.of(self.options.group)
        agreed = ranks.agree(f"seeded under policy {store.policy}", deadline, say, lambda _: (say(), None)[1])
        if not agreed.install:
            if seeded is not None:
                withdraw(seeded)
            raise RegistryError(f"no rank's store is seeded: {agreed.reason}", "")

    def _unusable(self, tuner: Any, selection: Selection) -> Unusable | None:
        assert self._live is not None
        return unusable_entries(selection, self._live.blocked(tuner), self._warn)

    def _selection(self, environment: Environment, policy: MeasurementPolicy, deadline: Deadline, tuner: Any) -> InUse:
        options = self.options
        request = Request(environment=environment, registries=options.registries, level=options.level, policy=policy)
        if options.group is not None:

            def accept(data: bytes) -> None:
                """Whatever can differ between ranks is looked at before they agree."""
                selection = read_selection(data)
                if selection.id != request.selection_id:
                    raise FormatError("rank 0's selection is for another environment, registry or match level", "")
                served_entries(selection, data)
                if self._unusable(tuner, selection) is not None:
                    raise FormatError("a blocklist or another cuBLASLt forbids some of the entries", "")

            def make() -> bytes:
                data = self._bytes(request, Deadline(max(deadline.remaining(), _SOON) * _LEADERS_SHARE))
                accept(data)
                return data

            agreed = Ranks.of(options.group).agree(f"entries timed under policy {policy}", deadline, make, accept)
            if not agreed.install or agreed.data is None:
                raise RegistryError(f"nothing is installed on any rank: {agreed.reason}", "")
            data = agreed.data
        elif many_ranks():
            raise UsageError(
                "there are several ranks, and nothing is installed",
                "name them with enable(group=…), and initialise torch.distributed before the first lookup",
            )
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
            without_tokens(names),
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
        line = without_tokens(line)
        if line not in self._said:
            self._said[line] = None
            logger.warning("fi-tunecache: %s", line)
