"""What the program asks FlashInfer's autotuner, and what becomes of it, counted while it runs.

Functions of ours stand around ``AutoTuner.search_cache``, ``choose_one`` and ``rank_tactics``
(``flashinfer/autotuner/autotuner.py``, 0.7.2 to 0.7.4). They pass everything on and give back what comes. Not seen is
``choose_with_protocol`` (0.7.4): such an op keeps its results itself, and has no entries.

A lookup costs the making of a key, and one more in a counter. Only where something is asked or answered for the first
time, or for the first time since the tables have changed, it is looked into.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from ..entry import DEFAULT_TACTIC, Tactic
from ..errors import FormatError
from ..miss import Miss
from ..recorded_lookup import Served
from .config_layer import ConfigLayer
from .live import LiveAutotuner
from .module import require
from .observation import OF_CLASS, OF_INSTANCE, Asked, Snapshots, plain, tuned_winner
from .outcome import Outcome, Outcomes, Question
from .wrapping import Function, wrapping_of

__all__ = ["Recorder"]

_MAX_CONFIGS = 10_000
_MAX_HOT = 50_000
_PARAMETERS = {
    "search_cache": ("self", "custom_op", "runners", "input_shapes", "tuning_config", "inputs"),
    "rank_tactics": ("self", "custom_op", "runners", "tuning_config", "inputs", "k", "kwargs"),
}


_class_name = operator.attrgetter("__class__.__name__")


class _Call:
    """A ``choose_one`` that tunes: the questions it has asked so far, and those that were not answered."""

    __slots__ = ("asked", "missed")

    def __init__(self) -> None:
        self.asked: set[Question] = set()
        self.missed: list[tuple[int, Outcome, tuple[Any, ...]]] = []

    def asks(self, question: Question) -> bool:
        """Whether it has not asked that before."""
        before = len(self.asked)
        self.asked.add(question)
        return len(self.asked) > before


class _Here(threading.local):
    """The calls that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


class Recorder:
    """Counts the lookups of an imported ``flashinfer.autotuner``, from :meth:`start` to :meth:`stop`.

    A lookup is a question. A ``choose_one`` that tunes asks for every bucket, and at last for its own shape: each
    question counts once a call, as tuned if a winner is there afterwards. Elsewhere it counts as often as it is asked.
    ``rank_tactics`` for several tactics, which asks nobody while it tunes, counts as one.

    Nothing is raised into FlashInfer: a fault ends the recording, and ``fail`` is told, once.

    Raises FormatError where this FlashInfer's autotuner is not one that we know.
    """

    def __init__(self, module: ModuleType, fail: Callable[[Exception], None]) -> None:
        self._live = LiveAutotuner(module)
        self.replaces_rivals = self._live.replaces_rivals
        kind = module.AutoTuner
        require(kind, *OF_CLASS, *_PARAMETERS)
        for name, wanted in _PARAMETERS.items():
            found = tuple(inspect.signature(getattr(kind, name)).parameters)
            if found[: len(wanted)] != wanted:
                raise FormatError(f"AutoTuner.{name} takes {', '.join(found)}", "update fi-tunecache")
        self._wrappings = (
            (self._live.search_cache, self._make_search_cache),
            (self._live.choose_one, self._make_choose_one),
            (wrapping_of(kind, "rank_tactics"), self._make_rank_tactics),
        )
        self._fail = fail
        self._is_on = False
        self._has_failed = False
        self._tuner: Any = None  # the one that was looked at
        self._tables: Any = None  # the same, as long as this is on
        self._here = _Here()
        self._hot: dict[tuple[Any, ...], Outcome] = {}
        self._configs: dict[Any, Any] = {}
        self._told = Outcomes()
        self._snapshots = Snapshots()

    def start(self) -> None:
        self._is_on = True
        for wrapping, maker in self._wrappings:
            wrapping.add_made(maker, maker)

    def stop(self) -> None:
        """FlashInfer has its own functions again; one of ours that lies below somebody else's passes everything on."""
        self._is_on, self._tables = False, None
        for wrapping, maker in self._wrappings:
            wrapping.remove(maker)
        self._hot.clear()
        self._configs.clear()  # they may hold tensors

    def outcomes(self) -> list[Outcome]:
        """In the order in which each was first seen."""
        return self._told.seen()

    @property
    def untold(self) -> int:
        """How many lookups were counted and not told apart."""
        return self._told.untold

    def is_saved(self, outcome: Outcome) -> bool:
        """Whether the answer lies in memory, and the program has saved all that lies there."""
        tuner = self._tuner
        return outcome.key is not None and not tuner._dirty and outcome.key in tuner.profiling_cache

    def blocks(self, custom_op: str, runner: str, tactic: Tactic) -> bool:
        """Whether FlashInfer's blocklist forbids a tactic."""
        forbids = None if self._tuner is None else self._live.blocked(self._tuner)
        return forbids is not None and forbids(custom_op, runner, tactic)

    def _make_search_cache(self, inner: Function) -> Function:
        hot, here = self._hot, self._here

        @functools.wraps(inner)
        def search_cache(
            tuner: Any,
            /,
            custom_op: str,
            runners: Any,
            input_shapes: Any,
            tuning_config: Any,
            inputs: Any = None,
            **options: Any,
        ) -> Any:
            try:
                # Without a dict to unpack a call costs a third.
                if options:
                    found = inner(tuner, custom_op, runners, input_shapes, tuning_config, inputs, **options)
                else:
                    found = inner(tuner, custom_op, runners, input_shapes, tuning_config, inputs)
            except RuntimeError:
                try:
                    self._strictly_missed(options, tuner, custom_op, runners, input_shapes, tuning_config, inputs)
                except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
                    self._stop_for(error)
                raise
            try:
                if tuner is not self._tables and not self._looks_at(tuner):
                    return found
                hit, index, tactic, _ = found
                files = tuner._file_configs
                local = tuner._v2_local
                # In an answer only the extras of the runner that gives it have a part: questions that differ in those
                # of others alone are counted as one.
                if inputs is None:
                    extras = None
                elif hit or len(runners) == 1:
                    extras = runners[index].get_cache_key_extras(inputs)
                else:
                    extras = tuple([runner.get_cache_key_extras(inputs) for runner in runners])
                key: tuple[Any, ...] = (
                    custom_op,
                    input_shapes,
                    id(tuning_config),
                    index if hit else None,
                    tactic,
                    extras,
                    runners[0].__class__.__name__ if len(runners) == 1 else tuple(map(_class_name, runners)),
                    tuner.is_tuning_mode,
                    len(files),
                    (len(files._promoted), id(files.ours)) if type(files) is ConfigLayer else None,
                    (local.store, local.measure, getattr(local, "cache_scope", None))
                    if local.active
                    else tuner._managed_cache,
                )
                try:
                    outcome = hot.get(key)
                except TypeError:  # a tactic in memory may be a list
                    key = (*key[:4], plain(tactic), *key[5:])
                    outcome = hot.get(key)
                if outcome is None:
                    outcome = self._look_into(
                        key, found, options, tuner, custom_op, runners, input_shapes, tuning_config, inputs
                    )
                if not outcome.tuning or not here.calls:
                    outcome.count += 1
                elif here.calls[-1].asks(outcome.question):
                    if hit:
                        outcome.count += 1
                    else:
                        arguments = (custom_op, runners, input_shapes, tuning_config, inputs)
                        here.calls[-1].missed.append((self._told.next(), outcome, arguments))
            except Exception as error:  # noqa: BLE001
                self._stop_for(error)
            return found

        return search_cache

    def _make_choose_one(self, inner: Function) -> Function:
        @functools.wraps(inner)
        def choose_one(
            tuner: Any, /, custom_op: str, runners: Any, tuning_config: Any, inputs: Any, **options: Any
        ) -> Any:
            call = None
            try:
                if tuner.is_tuning_mode:
                    call = self._begin_call()
            except Exception as error:  # noqa: BLE001
                self._stop_for(error)
            try:
                if options:
                    answer = inner(tuner, custom_op, runners, tuning_config, inputs, **options)
                else:
                    answer = inner(tuner, custom_op, runners, tuning_config, inputs)
            finally:
                if call is not None:
                    try:
                        self._end_call(call, tuner)
                    except Exception as error:  # noqa: BLE001
                        self._stop_for(error)
            try:
                # _effective_skip_ops alone would cost half a microsecond.
                is_default = answer[1] == DEFAULT_TACTIC and (call is None or not call.asked)
                if is_default and getattr(tuner._skip_ops_local, "stack", None):
                    self._count_if_skipped(tuner, custom_op, runners, tuning_config, inputs)
            except Exception as error:  # noqa: BLE001
                self._stop_for(error)
            return answer

        return choose_one

    def _make_rank_tactics(self, inner: Function) -> Function:
        @functools.wraps(inner)
        def rank_tactics(
            tuner: Any, /, custom_op: str, runners: Any, tuning_config: Any, inputs: Any, k: int = 1, **options: Any
        ) -> Any:
            asked, ranked = None, None
            try:
                if k > 1 and tuner.is_tuning_mode:  # else it asks choose_one
                    asked = self._begin_ranking(tuner, custom_op, runners, tuning_config, inputs)
            except Exception as error:  # noqa: BLE001
                self._stop_for(error)
            try:
                ranked = inner(tuner, custom_op, runners, tuning_config, inputs, k, **options)
            finally:
                if asked is not None:
                    try:
                        self._end_ranking(*asked, ranked)
                    except Exception as error:  # noqa: BLE001
                        self._stop_for(error)
            return ranked

        return rank_tactics

    def _begin_call(self) -> _Call:
        call = _Call()
        self._here.calls.append(call)
        return call

    def _end_call(self, call: _Call, tuner: Any) -> None:
        """Without the tuner's lock, as all that comes after a call: another thread may hold it for a long time."""
        self._here.calls.remove(call)
        for order, outcome, arguments in call.missed:
            self._settle(order, outcome, Asked(tuner, *arguments))

    def _settle(self, order: int, outcome: Outcome, asked: Asked) -> None:
        winner = tuned_winner(asked)
        if winner is not None:
            key, (tactic, _) = winner
            runner = key.runner_class_name
            outcome = replace(outcome, served=Served.TUNED, runner=runner, tactic=plain(tactic), count=0)
            outcome = self._told.one(outcome, order)
        elif asked.was_tuned_with_other_extras():
            outcome = self._told.one(replace(outcome, miss=Miss.EXTRAS, known=None, count=0), order)
        outcome.count += 1

    def _begin_ranking(
        self, tuner: Any, custom_op: str, runners: Any, config: Any, inputs: Any
    ) -> tuple[Asked, Any] | None:
        if custom_op in tuner._effective_skip_ops:
            self._count_if_skipped(tuner, custom_op, runners, config, inputs)
            return None
        if tuner is not self._tables and not self._looks_at(tuner):
            return None
        asked = Asked.by_call(tuner, custom_op, runners, config, inputs)
        asked.raced = False  # it times the tactics of its runner alone, in whatever context
        return asked, tuned_winner(asked, anywhere=True)

    def _end_ranking(self, asked: Asked, before: Any, ranked: Any) -> None:
        winner = tuned_winner(asked, anywhere=True)
        if not ranked or winner is None or plain(winner[1][0]) != plain(ranked[0]):
            outcome = asked.unanswered(Served.DEFAULT, Miss.RANKED)
        else:
            key, value = winner
            is_new = before is None or before[1] is not value
            served, miss = (Served.TUNED, Miss.RANKED) if is_new else (Served.MEMORY, None)
            outcome = asked.outcome(served, key.runner_class_name, value[0], key=asked.saved_as(key), miss=miss)
        self._told.one(outcome).count += 1

    def _count_if_skipped(self, tuner: Any, custom_op: str, runners: Any, config: Any, inputs: Any) -> None:
        if custom_op not in tuner._effective_skip_ops:
            return
        if tuner is not self._tables and not self._looks_at(tuner):
            return
        local, overrides = tuner._v2_local, tuner._get_override_stack()
        key = (
            custom_op,
            tuple([getattr(value, "shape", None) for value in inputs]),
            id(config),
            tuple([(runner.__class__.__name__, runner.get_cache_key_extras(inputs)) for runner in runners]),
            tuner.is_tuning_mode,
            local.active,
            local.measure,
            overrides[-1] if overrides else None,
        )
        outcome = self._hot.get(key)
        if outcome is None:
            asked = Asked.by_call(tuner, custom_op, runners, config, inputs)
            outcome = self._told.one(asked.unanswered(Served.SKIPPED, Miss.SKIPPED))
            self._remember((*key[:2], id(self._same(config)), *key[3:]), outcome)
        outcome.count += 1

    def _strictly_missed(self, options: Mapping[str, Any], tuner: Any, *arguments: Any) -> None:
        """In a strict replay FlashInfer raises where nothing answers."""
        if getattr(tuner._v2_local, "strict_replay", False) and (tuner is self._tables or self._looks_at(tuner)):
            with tuner._lock:
                outcome = Asked(tuner, *arguments).missed(options, self._snapshots)
                self._told.one(outcome).count += 1

    def _look_into(
        self,
        key: tuple[Any, ...],
        found: tuple[bool, int, Any, Any],
        options: Mapping[str, Any],
        tuner: Any,
        custom_op: str,
        runners: Any,
        shapes: Any,
        config: Any,
        inputs: Any,
    ) -> Outcome:
        with tuner._lock:
            same = self._same(config)
            if same is not config:  # some ops make one for each call
                key = (*key[:2], id(same), *key[3:])
                outcome = self._hot.get(key)
                if outcome is not None:
                    return outcome
            if not runners:
                return self._told.nothing()
            asked = Asked(tuner, custom_op, runners, shapes, config, inputs)
            hit, index, tactic, _ = found
            outcome = asked.answered(index, tactic) if hit else asked.missed(options, self._snapshots)
            outcome = self._told.one(outcome)
            self._remember(key, outcome)
            return outcome

    def _looks_at(self, tuner: Any) -> bool:
        """Whether this is on; then this tuner's tables are looked at from now on."""
        if self._is_on:
            require(tuner, *OF_INSTANCE)
            require(tuner._v2_local, "active", "store", "measure")
            self._hot.clear()
            self._tuner = self._tables = tuner
        return self._is_on

    def _same(self, config: Any) -> Any:
        """The first configuration that equals this one; it is kept, so that no other gets its id."""
        if len(self._configs) >= _MAX_CONFIGS:
            self._hot.clear()
            self._configs.clear()
        try:
            return self._configs.setdefault(config, config)
        except TypeError:
            return self._configs.setdefault(id(config), config)

    def _remember(self, key: tuple[Any, ...], outcome: Outcome) -> None:
        if len(self._hot) >= _MAX_HOT:
            self._hot.clear()
        self._hot[key] = outcome

    def _stop_for(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            with contextlib.suppress(Exception):
                self.stop()
            with contextlib.suppress(Exception):
                self._fail(error)
