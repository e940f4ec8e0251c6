"""What the program asks FlashInfer's autotuner, and what becomes of it, counted while it runs.

Functions of ours stand around ``AutoTuner.search_cache``, ``choose_one`` and ``rank_tactics``
(``flashinfer/autotuner/autotuner.py``, 0.7.2 to 0.7.4). They pass everything on and give back what comes. Not seen is
``choose_with_protocol`` (0.7.4): such an op keeps its results itself, and has no entries.

A lookup costs a key, cheap to make, and one more in a counter. Only when something is asked, or answered, that was
not before, or the autotuner has changed in between, it is looked at: no I/O there either.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..entry import DEFAULT_TACTIC, ProfilingPolicy, Tactic
from ..errors import FormatError
from ..managed_entry import entry_file_name
from ..miss import Miss
from ..recorded_lookup import Served
from .config_layer import ConfigLayer, reads_files
from .live import LiveAutotuner
from .module import require
from .served_entry import ServedEntry
from .wrapping import wrapping_of

__all__ = ["MAX_OUTCOMES", "Known", "Outcome", "Place", "Question", "Recorder"]

MAX_OUTCOMES = 100_000
"""More are counted, and not told apart."""

_MAX_HOT = 100_000
_SEARCH_CACHE = ("self", "custom_op", "runners", "input_shapes", "tuning_config", "inputs")
_RANK_TACTICS = ("self", "custom_op", "runners", "tuning_config", "inputs", "k", "kwargs")
_OF_CLASS = (
    "_active_managed_store",
    "_apply_measure_policy",
    "_apply_tuning_overrides",
    "_default_profiling_policy",
    "_effective_measure_policy",
    "_effective_skip_ops",
    "_find_nearest_profile",
    "_get_cache_key",
    "_get_input_sizes",
    "_override_cuda_graph_profile_replays",
    "_override_round_up",
    "_override_tuning_buckets",
    "_profiling_policy",
    "_winner_cache",
    "_winner_cache_identity",
    "rank_tactics",
)
_OF_INSTANCE = (
    "_dirty",
    "_dirty_seq",
    "_file_config_policies",
    "_file_configs",
    "_lock",
    "_managed_cache",
    "_managed_decoded",
    "_profiling_cache_policies",
    "_v2_local",
    "is_tuning_mode",
    "profiling_cache",
)
_NONE: Mapping[str, ServedEntry] = {}
_MISSED = (False, 0, DEFAULT_TACTIC, None)


class Question:
    """Keys that are looked for, one a runner, in the caller's order; ``texts`` are the keys."""

    __slots__ = ("custom_op", "profile", "runners", "texts")

    def __init__(self, keys: list[Any]) -> None:
        self.custom_op: str = keys[0].custom_op
        self.profile: tuple[tuple[int, ...], ...] = keys[0].nearest_profile
        self.runners: tuple[str, ...] = tuple(key.runner_class_name for key in keys)
        self.texts: tuple[str, ...] = tuple(key.file_key for key in keys)


class Place:
    """Where a lookup reads if not in entries of files: the folder of a managed store (None: there is no store), and the
    measurement policy's fields."""

    __slots__ = ("folder", "policy")

    def __init__(self, folder: Path | None, policy: tuple[tuple[str, str], ...]) -> None:
        self.folder = folder
        self.policy = policy


class Known:
    """What there were entries for when a lookup was not answered.

    ``own`` are the program's, by the texts of their keys, and ``tuned`` those that it has in memory, by FlashInfer's
    keys. ``ours`` are of a registry; where there is a ``place``, they don't count.
    """

    __slots__ = ("ours", "own", "place", "tuned")

    def __init__(
        self, own: tuple[str, ...], tuned: tuple[Any, ...], ours: Mapping[str, ServedEntry], place: Place | None
    ) -> None:
        self.own = own
        self.tuned = tuned
        self.ours = ours
        self.place = place


class Outcome:
    """A question with what became of it, ``count`` times. The fields are those of a recorded lookup, but that

    * ``served`` is ``STORE`` also for what we have put there: the file ``entry`` tells;
    * ``miss`` is None too where no entry had one of the keys; then ``known`` tells what there was;
    * ``usual`` tells whether the policy is the one under which an entry that names none was timed.
    """

    __slots__ = (
        "count",
        "entry",
        "known",
        "miss",
        "policy",
        "question",
        "raced",
        "runner",
        "served",
        "tactic",
        "tuning",
        "usual",
    )

    def __init__(
        self,
        question: Question,
        served: Served,
        runner: str,
        tactic: Tactic,
        *,
        raced: bool,
        tuning: bool,
        policy: ProfilingPolicy,
        usual: bool,
        entry: Path | None = None,
        miss: Miss | None = None,
        known: Known | None = None,
    ) -> None:
        self.question = question
        self.served = served
        self.runner = runner
        self.tactic = tactic
        self.raced = raced
        self.tuning = tuning
        self.policy = policy
        self.usual = usual
        self.entry = entry
        self.miss = miss
        self.known = known
        self.count = 0

    @property
    def identity(self) -> tuple[Any, ...]:
        return (
            self.question,
            self.served,
            self.runner,
            self.tactic,
            self.raced,
            self.tuning,
            self.policy,
            self.entry,
            self.miss,
            self.known,
        )


class _Call:
    """A ``choose_one`` that tunes: the questions it has asked, and those of them that were not answered."""

    __slots__ = ("asked", "missed")

    def __init__(self) -> None:
        self.asked: set[Question] = set()
        self.missed: list[tuple[Outcome, tuple[Any, ...]]] = []


_ASKED = _Call()
"""Stands for a ``choose_one`` that does not tune, and has asked."""


class _Here(threading.local):
    """The calls of ``choose_one`` that this thread is in, innermost last; None for one that has not asked yet."""

    def __init__(self) -> None:
        self.calls: list[_Call | None] = []


class Recorder:
    """Counts the lookups of an imported ``flashinfer.autotuner``, from :meth:`start` to :meth:`stop`.

    A lookup is a question. ``choose_one`` that tunes asks for every bucket, and for its own shape at last: each
    question counts once a call, and is tuned where a winner is there after it. Anything else counts as often as
    it is asked. ``rank_tactics`` for several tactics asks nobody where it tunes: it counts as a question too.

    Nothing raises into FlashInfer: a fault ends the recording, and ``fail`` is told.

    Raises FormatError where this FlashInfer's autotuner is not one that we know.
    """

    def __init__(self, module: ModuleType, fail: Callable[[Exception], None]) -> None:
        live = LiveAutotuner(module)
        kind = module.AutoTuner
        require(kind, *_OF_CLASS)
        if tuple(inspect.signature(kind.search_cache).parameters)[: len(_SEARCH_CACHE)] != _SEARCH_CACHE:
            raise FormatError("AutoTuner.search_cache takes other arguments", "update fi-tunecache")
        if tuple(inspect.signature(kind.rank_tactics).parameters) != _RANK_TACTICS:
            raise FormatError("AutoTuner.rank_tactics takes other arguments", "update fi-tunecache")
        self._wrappings = (
            (live.search_cache, self._search_cache),
            (live.choose_one, self._choose_one),
            (wrapping_of(kind, "rank_tactics"), self._rank_tactics),
        )
        self._fail = fail
        self._failed = False
        self._tuner: Any = None
        self._here = _Here()
        self._hot: dict[tuple[Any, ...], Outcome] = {}
        self._held: dict[int, Any] = {}
        self._questions: dict[tuple[str, ...], Question] = {}
        self._outcomes: dict[tuple[Any, ...], Outcome] = {}
        self._own: tuple[str, ...] = ()
        self._tuned: tuple[Any, ...] = ()
        self._tuned_at: tuple[Any, ...] = ()
        self._known: Known | None = None
        self._rest: Outcome | None = None

    def start(self) -> None:
        for wrapping, function in self._wrappings:
            wrapping.add(function)

    def stop(self) -> None:
        """FlashInfer has its own functions again."""
        for wrapping, function in self._wrappings:
            wrapping.remove(function)

    def outcomes(self) -> list[Outcome]:
        """In the order in which each was first seen."""
        return [outcome for outcome in list(self._outcomes.values()) if outcome.count]

    @property
    def untold(self) -> int:
        """How many lookups were counted only, because there were too many different ones."""
        return 0 if self._rest is None else self._rest.count

    # The functions around FlashInfer's. In the first the cost of a lookup is decided.

    def _search_cache(
        self,
        inner: Callable[..., Any],
        tuner: Any,
        custom_op: str,
        runners: Any,
        input_shapes: Any,
        tuning_config: Any,
        inputs: Any = None,
        **options: Any,
    ) -> Any:
        try:
            found = inner(tuner, custom_op, runners, input_shapes, tuning_config, inputs, **options)
        except RuntimeError:
            self._strict_miss(tuner, custom_op, runners, input_shapes, tuning_config, inputs, options)
            raise
        try:
            if tuner is not self._tuner:
                self._meet(tuner)
            files = tuner._file_configs
            local = tuner._v2_local
            tuning = tuner.is_tuning_mode
            # Whatever the outcome rests on is in here, or changes one of these.
            key: tuple[Any, ...] = (
                custom_op,
                input_shapes,
                id(tuning_config),
                found[:3],
                tuning,
                tuner._dirty,
                tuner._dirty_seq,
                len(files),
                (len(files._promoted), id(files.ours)) if type(files) is ConfigLayer else None,
                (id(local.store), id(local.measure), getattr(local, "cache_scope", None))
                if local.active
                else id(tuner._managed_cache),
                [(type(runner), runner.get_cache_key_extras(inputs)) for runner in runners]
                if inputs is not None
                else [type(runner) for runner in runners],
            )
            outcome = self._hot.get(key)
        except Exception as error:
            pass
        return found
