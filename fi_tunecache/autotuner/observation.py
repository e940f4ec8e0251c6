"""Looks into FlashInfer's autotuner, and tells who has answered a question, or why nobody has.

Reads its tables (``flashinfer/autotuner/autotuner.py``, 0.7.2 to 0.7.4: ``search_cache``) and changes none; no I/O.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..entry import DEFAULT_TACTIC, ProfilingPolicy, Tactic
from ..managed_entry import entry_file_name
from ..miss import Miss
from ..recorded_lookup import Served
from .config_layer import ConfigLayer, reads_files
from .outcome import Known, Outcome, Place, Question
from .served_entry import ServedEntry

__all__ = ["OF_CLASS", "OF_INSTANCE", "Asked", "Snapshots", "plain", "tuned_winner"]

OF_CLASS = (
    "_active_managed_store",
    "_apply_measure_policy",
    "_apply_tuning_overrides",
    "_default_profiling_policy",
    "_effective_measure_policy",
    "_effective_skip_ops",
    "_get_cache_key",
    "_get_input_sizes",
    "_get_override_stack",
    "_override_cuda_graph_profile_replays",
    "_override_round_up",
    "_override_tuning_buckets",
    "_profiling_policy",
    "_winner_cache",
    "_winner_cache_identity",
)
OF_INSTANCE = (
    "_dirty",
    "_dirty_seq",
    "_file_config_policies",
    "_file_configs",
    "_lock",
    "_managed_cache",
    "_managed_decoded",
    "_profiling_cache_policies",
    "_skip_ops_local",
    "_v2_local",
    "is_tuning_mode",
    "profiling_cache",
)
"""The names of the class and of its instance that are used here and in recording."""

_NONE: Mapping[str, ServedEntry] = {}
_own = dict.get


def plain(tactic: Any) -> Tactic:
    """A tactic as an entry has it: whatever is a sequence is a tuple."""
    if tactic is None or isinstance(tactic, (bool, float, str)):
        return tactic
    if isinstance(tactic, int):
        return int(tactic)
    if hasattr(tactic, "__iter__"):
        return tuple(map(plain, tactic))
    return str(tactic)


class Asked:
    """A question as it was asked: with the runners, and in the state in which the autotuner is."""

    __slots__ = ("default", "keys", "policy", "question", "raced", "runners", "tuner", "tuning")

    def __init__(self, tuner: Any, custom_op: str, runners: Any, shapes: Any, config: Any, inputs: Any) -> None:
        self.tuner = tuner
        self.keys = tuple(
            tuner._get_cache_key(
                custom_op, runner, shapes, config, () if inputs is None else runner.get_cache_key_extras(inputs)
            )
            for runner in runners
        )
        self.runners = tuple(key.runner_class_name for key in self.keys)
        self.policy: ProfilingPolicy = tuple(tuner._profiling_policy(config))
        self.default: ProfilingPolicy = tuple(tuner._default_profiling_policy(config))
        self.raced: bool = tuner._v2_local.active
        self.tuning: bool = tuner.is_tuning_mode
        self.question = Question(custom_op, self.runners, tuple(key.file_key for key in self.keys))

    @classmethod
    def by_call(cls, tuner: Any, custom_op: str, runners: Any, config: Any, inputs: Any) -> Asked:
        """The question of a call that did not ask it: with what the context changes in its configuration."""
        if (
            tuner._override_tuning_buckets is not None
            or tuner._override_round_up
            or tuner._override_cuda_graph_profile_replays is not None
        ):
            config = tuner._apply_tuning_overrides(config)
        if tuner._effective_measure_policy is not None:
            config = tuner._apply_measure_policy(config, tuner._effective_measure_policy)
        return cls(tuner, custom_op, runners, tuple(tuner._get_input_sizes(inputs)), config, inputs)

    def outcome(self, served: Served, runner: str, tactic: Any, **more: Any) -> Outcome:
        return Outcome(
            self.question,
            served,
            runner,
            plain(tactic),
            raced=self.raced,
            tuning=self.tuning,
            policy=self.policy,
            usual=self.policy == self.default,
            **more,
        )

    def answered(self, index: int, tactic: Any) -> Outcome:
        """Who gave an answer. A winner in memory that also lies in a file or a store comes from there."""
        tuner, key = self.tuner, self.keys[index]
        text, runner = key.file_key, self.runners[index]
        files, store = tuner._file_configs, tuner._active_managed_store
        if self._reads_tables(text) and _own(files, text) == (runner, tactic) and self._is_of_file(key, text):
            promoted = isinstance(files, ConfigLayer) and files.is_promoted(text)
            return self.outcome(Served.REGISTRY if promoted else Served.FILE, runner, tactic)
        if store is not None:
            kept = tuner._managed_decoded.get((str(store.root), store.env_hash, key.key_fields))
            if kept is not None and (kept.runner, kept.tactic) == (runner, tactic):
                path = store.entries_dir / entry_file_name(text)
                return self.outcome(Served.STORE, runner, tactic, entry=path)
        bundled = os.environ.get("FLASHINFER_AUTOTUNER_LOAD_FROM_FILE", "0") == "1" and not self.tuning
        if bundled and key not in tuner._winner_cache():
            return self.outcome(Served.BUNDLED, runner, tactic)
        return self.outcome(Served.MEMORY, runner, tactic, key=self.saved_as(key))

    def saved_as(self, key: Any) -> Any:
        """The key under which FlashInfer saves a winner in memory; None: it saves none of a policy or a store."""
        return key if self.tuner._winner_cache_identity() is None else None

    def _is_of_file(self, key: Any, text: str) -> bool:
        """Whether a winner in memory, if there is one, is the file's: it may have been tuned again, to the same."""
        tuner = self.tuner
        if key not in tuner._winner_cache():
            return True
        identity = tuner._winner_cache_identity()
        tuned = tuner._profiling_cache_policies.get((identity, key), self.default)
        return bool(_own(tuner._file_config_policies, text, self.default) == tuned)

    def missed(self, options: Mapping[str, Any], snapshots: Snapshots) -> Outcome:
        """Why nobody gave one: an entry that could not, or what there was instead."""
        miss = self._refused(options)
        known = None if miss is not None else snapshots.take(self.tuner)
        return self.unanswered(Served.DEFAULT, miss, known)

    def unanswered(self, served: Served, miss: Miss | None, known: Known | None = None) -> Outcome:
        return self.outcome(served, self.runners[0], DEFAULT_TACTIC, miss=miss, known=known)

    def was_tuned_with_other_extras(self) -> bool:
        """Whether a winner for the op and the profile is there, which a lookup like this one does not find."""
        profile = self.keys[0].nearest_profile
        return any(
            key.custom_op == self.question.custom_op
            and key.nearest_profile == profile
            and key.runner_class_name in self.runners
            for key in list(self.tuner._winner_cache())
        )

    def _reads_tables(self, text: str) -> bool:
        tuner = self.tuner
        if getattr(tuner, "_isolate_legacy_configs", False):  # here and below: 0.7.4
            return False
        excluded = getattr(tuner, "_excluded_file_keys", {})
        return text not in excluded.get(tuner._winner_cache_identity(), ())

    def _refused(self, options: Mapping[str, Any]) -> Miss | None:
        """Why an entry with one of the keys did not answer; None where there is none."""
        strict = options.get("require_profiling_policy", False) or getattr(self.tuner._v2_local, "strict_replay", False)
        for key in self.keys:
            text = key.file_key
            found = self._refused_in_memory(key, strict) or self._refused_in_tables(text, key.runner_class_name)
            found = found or self._refused_in_store(key, strict)
            if found is not None:
                return found
        return None

    def _refused_in_memory(self, key: Any, strict: bool) -> Miss | None:
        tuner = self.tuner
        if key not in tuner._winner_cache():
            return None
        identity = tuner._winner_cache_identity()
        unknown = self.default if identity is None else None
        policy = tuner._profiling_cache_policies.get((identity, key), unknown)
        checked = strict or (self.tuning and tuner._active_managed_store is None)
        return Miss.POLICY if checked and policy != self.policy else Miss.REFUSED

    def _refused_in_tables(self, text: str, runner: str) -> Miss | None:
        tuner = self.tuner
        files = tuner._file_configs
        value = _own(files, text)
        policy = _own(tuner._file_config_policies, text, self.default)
        if isinstance(files, ConfigLayer) and text in files.ours and (value is None or files.is_promoted(text)):
            ours = files.ours[text]
            if not reads_files(tuner):
                return None  # then the store has our entries, or nobody
            if self.raced and self.tuning and not ours.raced:
                return Miss.NOT_RACED
            if text in getattr(tuner, "_invalidated_file_keys", ()):
                return Miss.DISCARDED
            if text not in files:
                return Miss.OWN_COMES_FIRST
            value, policy = (ours.runner, ours.tactic), ours.policy or self.default
        if value is None or getattr(tuner, "_isolate_legacy_configs", False):
            return None
        if not self._reads_tables(text):
            return Miss.DISCARDED
        if self.tuning and policy != self.policy:
            return Miss.POLICY
        return Miss.REFUSED if value[0] == runner else Miss.RUNNER

    def _refused_in_store(self, key: Any, strict: bool) -> Miss | None:
        tuner, store = self.tuner, self.tuner._active_managed_store
        if store is None:
            return None
        kept = tuner._managed_decoded.get((str(store.root), store.env_hash, key.key_fields))
        if kept is None:
            return None
        if strict and kept.profiling_policy != self.policy:
            return Miss.POLICY
        return Miss.REFUSED if kept.runner == key.runner_class_name else Miss.RUNNER


def tuned_winner(asked: Asked, *, anywhere: bool = False) -> tuple[Any, Any] | None:
    """FlashInfer's key and value of the winner that answers a question after it was tuned; None if there is none.

    ``rank_tactics`` of 0.7.2 puts its winners into the common table whatever is in use: ``anywhere`` looks there too.
    """
    tuner = asked.tuner
    tables = [(tuner._winner_cache_identity(), tuner._winner_cache())]
    if anywhere:
        tables.append((None, tuner.profiling_cache))
    for key in asked.keys:
        for identity, winners in tables:
            winner, policy = winners.get(key), tuner._profiling_cache_policies.get((identity, key))
            if winner is not None and policy is not None and tuple(policy) == asked.policy:
                return key, winner
    return None


class Snapshots:
    """What there are entries for, taken where nothing answers. One serves until the tables change."""

    def __init__(self) -> None:
        self._own: tuple[str, ...] = ()
        self._own_state: tuple[Any, ...] = ()
        self._kept: tuple[tuple[Any, ...], ...] = ()
        self._kept_state: tuple[Any, ...] = ()
        self._last: Known | None = None

    def take(self, tuner: Any) -> Known:
        own = () if getattr(tuner, "_isolate_legacy_configs", False) else self._own_keys(tuner._file_configs)
        # What is tuned right now is not what there was: while tuning, memory does not count.
        kept = () if tuner.is_tuning_mode else self._kept_keys(tuner)
        ours = getattr(tuner._file_configs, "ours", _NONE)
        place = None if reads_files(tuner) else _place(tuner)
        last = self._last
        if last is None or last.own is not own or last.kept is not kept or last.ours is not ours or last.place != place:
            last = self._last = Known(own, kept, ours, place)
        return last

    def _own_keys(self, files: dict[str, Any]) -> tuple[str, ...]:
        served = len(files._promoted) if isinstance(files, ConfigLayer) else 0
        state = (id(files), len(files) - served)
        if state != self._own_state:
            self._own, self._own_state = tuple(files) if state[1] else (), state
        return self._own

    def _kept_keys(self, tuner: Any) -> tuple[tuple[Any, ...], ...]:
        winners, store = tuner._winner_cache(), tuner._active_managed_store
        marker = None if store is None else (str(store.root), store.env_hash)
        state = (marker, tuner._dirty_seq, len(winners), len(tuner._managed_decoded))
        if state != self._kept_state:
            stored = () if marker is None else (fields for *at, fields in tuner._managed_decoded if (*at,) == marker)
            self._kept = (*(key.key_fields for key in winners), *stored)
            self._kept_state = state
        return self._kept


def _place(tuner: Any) -> Place:
    local, store = tuner._v2_local, tuner._active_managed_store
    if store is not None:
        fields = {name: value for name, value in store.manifest.items() if name.startswith("measure_")}
        return Place(store.env_dir, tuple(sorted(fields.items())))
    return Place(None, tuple(sorted(local.measure.manifest_fields().items())))
