"""FlashInfer's autotuner in a process that is there for nothing else, to see what it makes of a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from ..entry import ProfilingPolicy, Tactic
from ..environment import Environment
from ..errors import FormatError, HardwareError
from ..key import Dtype, Extra, Key
from .module import brief, import_autotuner, require

__all__ = ["Autotuner", "LoadedEntry"]

LoadedEntry: TypeAlias = tuple[str, Tactic, ProfilingPolicy | None]
"""Runner class, tactic and policy of an entry, as FlashInfer holds them after loading a file."""


class Autotuner:
    """FlashInfer's own autotuner, made to believe that this machine is ``environment``.

    For a process that is there for this alone: imports FlashInfer and torch (seconds) and replaces
    FlashInfer's metadata function for good. Needs no GPU, times nothing and runs no kernel: who asks
    are toy runners that have a key's class name and extras. So a validator of stored tactics, which some
    of the true runners have, takes no part. (``flashinfer/autotuner/autotuner.py``, 0.7.1 to 0.7.4.)

    Raises
    ------
    HardwareError
        FlashInfer can't be imported, or is not of the environment's version.
    FormatError
        It has not the names, or does not take the arguments, that are used here.
    """

    def __init__(self, environment: Environment) -> None:
        module = import_autotuner("install it again")
        require(module, "AutoTuner", "TunableRunner", "TuningConfig", "_collect_metadata")
        version = getattr(import_module("flashinfer"), "__version__", None)
        if version != environment.flashinfer_version:
            raise HardwareError(f"FlashInfer {version} is imported, not {environment.flashinfer_version}")
        # load_configs finds the function in its own module, autotune_v2 in the package.
        for name in (module.__name__, module.AutoTuner.__module__):
            vars(sys.modules[name])["_collect_metadata"] = environment.metadata
        self._tuner: Any = module.AutoTuner.get()
        require(self._tuner, "load_configs", "search_cache", "_file_configs", "_file_config_policies")
        # Without specs it maps every shape to itself: the profile of a key stands for the shapes, -1 included.
        self._config = module.TuningConfig()
        self._toy: type[Any] = module.TunableRunner
        self._toys: dict[str, type[Any]] = {}
        self._torch = import_module("torch")
        try:
            self._search([Key("nothing", "Toy", (), ())])
        except Exception as error:
            raise FormatError(f"search_cache can't be asked: {brief(error)}", "update fi-tunecache") from error

    def load(self, path: Path) -> None:
        """``load_configs``. A file of another environment is skipped in silence: see :meth:`entries`."""
        self._tuner.load_configs(str(path))

    def entries(self) -> dict[str, LoadedEntry]:
        """What was loaded, by the text of its key."""
        policies = self._tuner._file_config_policies
        return {
            text: (runner, tactic, policies.get(text)) for text, (runner, tactic) in self._tuner._file_configs.items()
        }

    def search(self, keys: Sequence[Key]) -> tuple[int, Tactic] | None:
        """``search_cache`` for one lookup: which of its runners is served, and with what tactic; None is a miss."""
        try:
            return self._search(keys)
        except TypeError:  # FlashInfer hashes extras, and a list in them has no hash
            return None

    def _search(self, keys: Sequence[Key]) -> tuple[int, Tactic] | None:
        runners = [self._runner(key) for key in keys]
        hit, index, tactic, _ = self._tuner.search_cache(keys[0].custom_op, runners, keys[0].profile, self._config, [])
        return (index, tactic) if hit else None

    def _runner(self, key: Key) -> Any:
        kind = self._toys.get(key.runner)
        if kind is None:
            members = {
                "get_valid_tactics": None,
                "forward": None,
                "get_cache_key_extras": lambda runner, inputs: runner.extras,
            }
            kind = self._toys[key.runner] = type(key.runner, (self._toy,), members)
        runner = kind()
        runner.extras = self._torch_value(key.extras)
        return runner

    def _torch_value(self, extra: Extra) -> Any:
        if isinstance(extra, Dtype):  # one that this torch has not stays a name, which prints the same
            return getattr(self._torch, extra.name, extra)
        if isinstance(extra, (tuple, list)):
            return type(extra)(map(self._torch_value, extra))
        return extra
