"""Made FlashInfers that misbehave: packages with the functions that we call, and no kernels."""

from __future__ import annotations

from pathlib import Path

from made_machine import add_package

__all__ = ["add_autotuner"]

_AUTOTUNER = """
import abc, json, os, signal, subprocess, sys, time

{begin}

def _collect_metadata():
    raise AssertionError("this machine was looked at")

class TunableRunner(abc.ABC):
    @abc.abstractmethod
    def get_valid_tactics(self, inputs, profile): ...

    @abc.abstractmethod
    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs): ...

class TuningConfig:
    pass

class AutoTuner:
    def __init__(self):
        self._file_configs, self._file_config_policies = {{}}, {{}}

    @classmethod
    def get(cls):
        return cls()

    def load_configs(self, path):
        document = json.load(open(path))
        assert all(document["_metadata"][name] == fact for name, fact in _collect_metadata().items())
        {load}
        for key, (runner, tactic, policy, *_) in document.items():
            if key != "_metadata":
                tactic = tuple(tactic) if isinstance(tactic, list) else tactic
                self._file_configs[key], self._file_config_policies[key] = (runner, tactic), tuple(policy)
        {loaded}

    def search_cache(self, custom_op, runners, input_shapes, tuning_config, inputs{parameter}):
        for index, runner in enumerate(runners):
            extras = runner.get_cache_key_extras(inputs)
            key = str((custom_op, type(runner).__name__, input_shapes, extras))
            if key in self._file_configs:
                {hit}
                return True, index, self._file_configs[key][1], None
        return False, 0, -1, None

{end}
"""

_TORCH = """
class dtype:
    def __repr__(self):
        return "torch.bfloat16"

bfloat16 = dtype()
"""


def add_autotuner(
    site: Path,
    version: str,
    *,
    begin: str = "",
    load: str = "",
    loaded: str = "",
    parameter: str = "",
    hit: str = "",
    end: str = "",
    imported: str | None = None,
) -> None:
    """Install one that works for entries that have policies, but for the statements that are put in.

    ``begin`` and ``end`` run at its import, ``load`` before and ``loaded`` after it takes a file's entries,
    ``hit`` where a lookup is served; ``imported`` is the version that it says it has when it is imported.
    """
    text = _AUTOTUNER.format(
        begin=begin, load=load or "pass", loaded=loaded or "pass", parameter=parameter, hit=hit or "pass", end=end
    )
    version_line = f"__version__ = {version!r}\n"
    init = version_line if imported is None else f"__version__ = {imported!r}\n"
    add_package(site, "flashinfer", __init__=init, _build_meta=version_line, autotuner=text)
    add_package(site, "torch", __init__=_TORCH)
