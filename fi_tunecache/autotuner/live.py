"""FlashInfer's autotuner in the program that uses it.

Names are those of ``flashinfer/autotuner/autotuner.py`` and ``autotune_cache.py``, 0.7.2 to 0.7.4; that they are
there, and have the shape that is relied on, is checked before anything is touched.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct

from ..deadline import Deadline
from ..entry import Tactic
from ..environment import Environment
from ..errors import FormatError
from ..measurement_policy import MeasurementPolicy
from .config_layer import ConfigLayer
from .module import brief, require
from .wrapping import wrapping_of

__all__ = ["LiveAutotuner", "StoreInUse", "is_capturing"]

_CHOOSE_ONE = ("self", "custom_op", "runners", "tuning_config", "inputs", "kwargs")
_SCHEMA = "cache_schema"
_MEASURE = "measure_"


class StoreInUse(Struct, frozen=True):
    """A managed store: its root, the name of the environment's folder in it, the facts and the policy behind that."""

    root: Path
    env_hash: str
    environment: Environment
    policy: MeasurementPolicy


class LiveAutotuner:
    """The class ``AutoTuner`` of an imported FlashInfer, and what may be done to it and its one instance.

    ``choose_one`` and ``search_cache`` are its functions, to put others around.

    Raises FormatError where this FlashInfer's autotuner is not one that we know.
    """

    def __init__(self, module: ModuleType) -> None:
        require(module, "AutoTuner", "_collect_metadata")
        kind = module.AutoTuner
        require(kind, "choose_one", "search_cache", "save_configs", "_active_managed_store")
        try:
            parameters = tuple(inspect.signature(kind.choose_one).parameters)
        except (TypeError, ValueError) as error:
            raise FormatError(f"AutoTuner.choose_one is no function: {brief(error)}", "update fi-tunecache") from error
        if parameters != _CHOOSE_ONE:
            raise FormatError(f"AutoTuner.choose_one takes {', '.join(parameters)}", "update fi-tunecache")
        self._replaces_rivals = hasattr(kind, "_discard_profile_cache")
        self.choose_one = wrapping_of(kind, "choose_one")
        self.search_cache = wrapping_of(kind, "search_cache")
        self.save_configs = wrapping_of(kind, "save_configs")

    def check(self, tuner: Any) -> None:
        """Raises FormatError where the instance is not one that we know, or somebody else has put tables into it."""
        require(
            tuner, "_lock", "_v2_local", "_managed_cache", "is_tuning_mode", "profiling_cache", "_dirty", "_dirty_seq"
        )
        require(tuner._v2_local, "active", "store", "measure")
        tables = ["_file_configs", "_file_config_policies", "_managed_stores"]
        if hasattr(tuner, "_file_config_selections"):
            tables.append("_file_config_selections")
        for name in tables:
            if type(getattr(tuner, name, None)) is not dict:
                raise FormatError(f"AutoTuner.{name} is no plain dict", "update fi-tunecache")

    def is_locked_here(self, tuner: Any) -> bool:
        """Whether this thread holds the tuner's lock: then others may be waiting for it."""
        owned = getattr(tuner._lock, "_is_owned", None)
        return True if owned is None else bool(owned())

    def put_layer(
        self,
        tuner: Any,
        deadline: Deadline,
        *,
        fail: Callable[[Exception], None],
        want: Callable[[], None],
        attached: Callable[[str], None],
    ) -> ConfigLayer | None:
        """Put a layer for our entries behind the tuner's own; None where its lock can't be had by the deadline.

        ``attached`` is told the name (:meth:`name_of_store`) of each managed store that the tuner has or gets.
        """
        self.check(tuner)
        if not tuner._lock.acquire(timeout=deadline.remaining()):
            return None
        try:
            tables = (tuner._file_configs, tuner._file_config_policies, getattr(tuner, "_file_config_selections", None))
            layer = ConfigLayer(tuner, tables, fail=fail, want=want)
            stores = _WatchedStores(tuner._managed_stores, attached, fail)
            tuner._file_configs, tuner._file_config_policies, tuner._managed_stores = layer, layer.policies, stores
        finally:
            tuner._lock.release()
        for store in list(stores.values()):
            attached(_name(store))
        return layer

    def remove_layer(self, tuner: Any, layer: ConfigLayer) -> None:
        """Give the tuner plain tables again; what was served of ours stays in them."""
        with tuner._lock:
            if tuner._file_configs is layer:
                tuner._file_configs, tuner._file_config_policies, _ = layer.plain()
            elif tuner._file_config_policies is layer.policies:  # somebody has put another table of entries there
                tuner._file_config_policies = dict(layer.policies)
            if isinstance(tuner._managed_stores, _WatchedStores):
                tuner._managed_stores = dict(tuner._managed_stores)

    def look_again(self, tuner: Any, keys: Iterable[str], deadline: Deadline) -> None:
        """Have the store in use look again for keys that it may remember as missing."""
        store = tuner._active_managed_store
        missing = getattr(store, "_missing", None)
        if isinstance(missing, set) and missing and tuner._lock.acquire(timeout=deadline.remaining()):
            try:
                missing.difference_update(keys)
            finally:
                tuner._lock.release()

    @property
    def replaces_rivals(self) -> bool:
        """Whether a managed store drops the entries of other runners when FlashInfer tunes (0.7.4)."""
        return self._replaces_rivals

    def name_of_store(self, tuner: Any) -> str | None:
        """The managed store that a lookup of this thread reads, by its environment's folder; None: it reads none."""
        store = tuner._active_managed_store
        return None if store is None else _name(store)

    def store_in_use(self, tuner: Any) -> StoreInUse:
        """The managed store that a lookup of this thread reads, where there is one.

        Raises FormatError where it does not say what it is for in a way that we know.
        """
        store = tuner._active_managed_store
        require(store, "root", "env_hash", "manifest")
        manifest = dict(store.manifest)
        policy = {name: value for name, value in manifest.items() if name.startswith(_MEASURE)}
        facts = {name: value for name, value in manifest.items() if name not in policy and name != _SCHEMA}
        return StoreInUse(
            root=Path(store.root),
            env_hash=store.env_hash,
            environment=Environment.from_metadata(facts, source="the managed store"),
            policy=MeasurementPolicy.from_fields(policy),
        )

    def blocked(self, tuner: Any) -> Callable[[str, str, Tactic], bool] | None:
        """Tells whether FlashInfer's blocklist forbids a tactic of an op's runner; None where nothing is forbidden."""
        blocklist = getattr(tuner, "_blocklist", None)
        if blocklist is None or not getattr(blocklist, "_invalid", True):
            return None
        named: dict[str, Any] = {}

        def forbids(custom_op: str, runner: str, tactic: Tactic) -> bool:
            if runner not in named:  # the list goes by the name of the runner's class
                named[runner] = type(runner, (), {})()
            return not blocklist.filter(custom_op, named[runner], [tactic])

        return forbids


def is_capturing() -> bool:
    """Whether this thread's stream records a CUDA graph. Does not initialise CUDA."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    # The CPU build of torch raises where it is asked, and before CUDA is initialised nothing is recorded.
    return cuda is not None and cuda.is_initialized() and cuda.is_current_stream_capturing()


def _name(store: Any) -> str:
    return f"{store.root}/{store.env_hash}"


class _WatchedStores(dict[Any, Any]):
    """The managed stores that the tuner has, by identity; tells when one comes in."""

    __slots__ = ("_attached", "_fail")

    def __init__(
        self, own: Mapping[Any, Any], attached: Callable[[str], None], fail: Callable[[Exception], None]
    ) -> None:
        super().__init__(own)
        self._attached = attached
        self._fail = fail

    def __setitem__(self, key: Any, store: Any) -> None:
        super().__setitem__(key, store)
        try:
            self._attached(_name(store))
        except Exception as error:  # noqa: BLE001
            with contextlib.suppress(Exception):
                self._fail(error)
