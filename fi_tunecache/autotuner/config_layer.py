"""Our entries behind those that the program has loaded itself, in the place of the autotuner's own tables.

FlashInfer asks a table of entries (``key in configs``, then ``configs[key]``), one of policies and one of how each
was chosen (``flashinfer/autotuner/autotuner.py``, 0.7.2 to 0.7.4: ``_file_configs``, ``_file_config_policies``,
``_file_config_selections``). What it lists, counts, clears and saves are the program's own entries alone; one of ours
becomes one of them when it is served, so that a saved file holds all that was used, and serves without us.

Everything here runs inside FlashInfer's lookups, under its lock: no I/O, no lock of ours, and no exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from .served_entry import ServedEntry, shape_of

__all__ = ["ConfigLayer", "PolicyLayer", "Tables", "reads_files"]

Tables: TypeAlias = "tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]"
"""Entries, policies, and how each was chosen (FlashInfer before 0.7.4 has no such table)."""

_has = dict.__contains__
_get = dict.get
_set = dict.__setitem__

_NONE: dict[str, ServedEntry] = {}

_Rivals: TypeAlias = "dict[tuple[str, str] | None, set[str]]"
"""The classes of the runners that have a result for an op and a profile."""
_NOBODY: set[str] = set()


def _rivals(results: Iterable[tuple[tuple[str, str] | None, str]]) -> _Rivals:
    found: _Rivals = {}
    for shape, runner in results:
        found.setdefault(shape, set()).add(runner)
    return found


def reads_files(tuner: Any) -> bool:
    """Whether a lookup of this thread reads entries of files: no managed store and no measurement policy is in use."""
    local = tuner._v2_local
    if local.active:
        return local.store is None and not (local.measure is not None and local.measure.manifest_fields())
    return tuner._managed_cache is None


class ConfigLayer(dict[str, Any]):
    """The table of entries. It answers for ours where

    * the caller reads entries of files: no managed store and no measurement policy is in use, which have their own;
    * the caller would not race the default, or the entry has raced it;
    * the program has nothing of its own for that op and profile under another runner, which FlashInfer would not
      get to where ours comes first, and FlashInfer has not discarded the key.

    Parameters
    ----------
    tuner
        FlashInfer's.
    tables
        Those that it has so far.
    fail
        Told what went wrong in here, after which only the program's own entries are left.
    want
        Called whenever an entry was asked for that a selection could have, until there is one.
    """

    __slots__ = (
        "_chosen",
        "_fail",
        "_invalidated",
        "_on_disk",
        "_own",
        "_policies",
        "_promoted",
        "_shapes",
        "_tuner",
        "_want",
        "ours",
    )

    def __init__(
        self, tuner: Any, tables: Tables, *, fail: Callable[[Exception], None], want: Callable[[], None]
    ) -> None:
        entries, policies, self._chosen = tables
        super().__init__(entries)
        self.ours: Mapping[str, ServedEntry] = _NONE
        self._tuner = tuner
        self._invalidated: Collection[str] = getattr(tuner, "_invalidated_file_keys", ())  # 0.7.4
        self._policies = PolicyLayer(policies, self)
        self._promoted: set[str] = set()
        self._own: _Rivals | None = None
        self._on_disk: Mapping[str, str] = {}
        self._shapes: dict[str, tuple[str, str] | None] = {}
        self._fail = fail
        self._want: Callable[[], None] | None = want

    @property
    def policies(self) -> PolicyLayer:
        """The table of policies that goes with it."""
        return self._policies

    def fill(self, entries: Mapping[str, ServedEntry]) -> None:
        """Serve these from now on, and ask for none any more."""
        self.ours = entries
        self._want = None

    def plain(self) -> Tables:
        """Tables as FlashInfer makes them itself: with the program's own entries, and what was served of ours."""
        return self._saved(), dict(self._policies), self._chosen

    def is_promoted(self, key: str) -> bool:
        """Whether an entry of ours was served, and lies among the program's own since."""
        return key in self._promoted

    def __bool__(self) -> bool:
        return bool(self.ours) or self._want is not None or len(self) > 0

    def __contains__(self, key: object) -> bool:
        try:
            entry = self.ours.get(key)  # type: ignore[call-overload]
            if entry is not None:
                if not _has(self, key) or key in self._promoted:
                    # In the usual case there is nothing to decide, and no call to be made.
                    tuner = self._tuner
                    is_plain = tuner._managed_cache is None and not tuner._v2_local.active
                    if is_plain and len(self) == len(self._promoted) and not self._invalidated:
                        return True
                    return self._serves(key, entry)  # type: ignore[arg-type]
            elif self._want is not None:
                self._ask()
        except Exception as error:  # noqa: BLE001
            _give_up(self, error)
        return _has(self, key)

    def __missing__(self, key: str) -> tuple[str, Any]:
        """Serve an entry of ours: it is one of the program's own from now on."""
        entry = self.ours[key]
        value = (entry.runner, entry.tactic)
        try:
            self._promote(key, entry, value)
        except Exception as error:  # noqa: BLE001
            _give_up(self, error)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - that is what it is made of

    def __iter__(self) -> Iterator[str]:
        """The program's own alone: at every miss FlashInfer looks through them for other shapes of the op."""
        if not self._promoted:
            return super().__iter__()
        return iter([] if len(self) == len(self._promoted) else [key for key in self.keys() if self._is_own(key)])

    def items(self) -> Any:
        """What FlashInfer saves. Left out is one of ours beside which there is a result of the program's, under another
        runner: in the file it could come before that one."""
        if not self._promoted:
            return super().items()
        try:
            return self._saved().items()
        except Exception as error:  # noqa: BLE001
            _give_up(self, error)
            return super().items()

    def saving(self, on_disk: Mapping[str, str]) -> None:
        """Leave out, too, what is in the way of results in the file that is being saved to: runners, by key."""
        self._on_disk = on_disk

    def __setitem__(self, key: str, value: Any) -> None:
        _set(self, key, value)
        self._promoted.discard(key)
        self._own = None

    def pop(self, key: str, *default: Any) -> Any:
        if _has(self, key) and key not in self._promoted:
            self._own = None
        self._promoted.discard(key)
        return super().pop(key, *default)

    def clear(self) -> None:
        self._promoted.clear()
        self._own = None
        super().clear()

    def __reduce__(self) -> Any:
        """A copy is a plain dict with the program's own entries and those that were served."""
        return dict, (self._saved(),)

    def _is_own(self, key: str) -> bool:
        return key not in self._promoted

    def _shape(self, key: str) -> tuple[str, str] | None:
        if key not in self._shapes:
            self._shapes[key] = shape_of(key)
        return self._shapes[key]

    def _serves(self, key: str, entry: ServedEntry) -> bool:
        tuner = self._tuner
        if not reads_files(tuner):
            return False
        if tuner._v2_local.active and tuner.is_tuning_mode and not entry.raced:
            return False
        if key in self._invalidated:
            return False
        if len(self) > len(self._promoted):
            return not self._own_rivals().get(self._shape(key), _NOBODY) - {entry.runner}
        return True

    def _own_rivals(self) -> _Rivals:
        if self._own is None:
            own = ((key, value) for key, value in super().items() if self._is_own(key))
            self._own = _rivals((shape_of(key), value[0]) for key, value in own)
        return self._own

    def _promote(self, key: str, entry: ServedEntry, value: tuple[str, Any]) -> None:
        _set(self, key, value)
        self._promoted.add(key)
        if entry.policy is not None:
            self._policies[key] = entry.policy
            if self._chosen is not None and entry.selection is not None:
                self._chosen[key] = entry.selection
        tuner = self._tuner
        if tuner.is_tuning_mode:  # the program means to save what it tunes: this too
            tuner._dirty = True
            tuner._dirty_seq += 1

    def _saved(self) -> dict[str, Any]:
        winners = self._tuner.profiling_cache
        tuned = _rivals(((key.custom_op, str(key.nearest_profile)), key.runner_class_name) for key in winners)
        own = self._own_rivals()
        there = _rivals((shape_of(key), runner) for key, runner in self._on_disk.items())

        def is_behind(key: str, runner: str) -> bool:
            shape = self._shape(key)
            rivals = any(results.get(shape, _NOBODY) - {runner} for results in (tuned, own, there))
            return rivals or key in self._on_disk

        return {key: value for key, value in super().items() if self._is_own(key) or not is_behind(key, value[0])}

    def _ask(self) -> None:
        if self._want is not None and reads_files(self._tuner):
            self._want()

    def _stop(self, error: Exception) -> None:
        self.ours = _NONE
        self._want = None
        self._fail(error)


def _give_up(layer: ConfigLayer, error: Exception) -> None:
    """Only the program's own entries are left; said once. Raises nothing."""
    with contextlib.suppress(Exception):
        layer._stop(error)


class PolicyLayer(dict[str, Any]):
    """The table of policies: of an entry of ours that was not served yet it knows the policy, and lists nothing."""

    __slots__ = ("_configs",)

    def __init__(self, own: Mapping[str, Any], configs: ConfigLayer) -> None:
        super().__init__(own)
        self._configs = configs

    def __reduce__(self) -> Any:
        return dict, (dict(super().items()),)

    def get(self, key: str, default: Any = None) -> Any:
        if _has(self, key) or _has(self._configs, key):
            return _get(self, key, default)
        entry = self._configs.ours.get(key)
        return default if entry is None or entry.policy is None else entry.policy
