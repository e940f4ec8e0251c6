"""Plays scenarios in the real FlashInfer: a process that reads one JSON object a line and answers with one.

usage: PYTHONPATH=FOLDER_OF_FLASHINFER python flashinfer_driver.py

Answers go to the standard output, one line each, the first (``{"version": …}``) when FlashInfer is
imported; whatever FlashInfer prints goes to the standard error. Each scenario gets an autotuner of
its own. Its fields, all of them optional:

``metadata``
    The facts that FlashInfer is to find. By default it looks for them itself.
``load``, ``cache``, ``tune``
    A v1 file for ``load_configs``; one for ``autotune(tune, cache=…)``.
``store``, ``execution_mode``
    A root for ``autotune_v2(mode="replay")`` and its measurement policy; with ``tune`` its mode is that.
``offers``
    Let FlashInfer profile: pairs of runner class and tactic that are offered, the fastest first.
``refused``
    Such pairs that the runners' validators do not let pass.
``lookups``
    What to ask: ``custom_op``, ``runners`` (class and extras, dtypes as strings such as
    ``"torch.bfloat16"``) and ``shapes`` of the inputs, ``(0,)`` for what is no tensor.
``save``
    A path for ``save_configs``, at the end.
``environment``
    True: add what fi-tunecache takes for the environment.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import flashinfer  # noqa: E402
from flashinfer import autotuner  # noqa: E402
from flashinfer.autotune_cache import MeasurementPolicy, autotune_v2  # noqa: E402
from flashinfer.autotuner import AutoTuner, TunableRunner, autotune  # noqa: E402
from flashinfer.gemm import gemm_base  # noqa: E402

# The configurations that the ops themselves pass: they map shapes to profiles, and say how entries are timed.
TUNING_CONFIGS = {
    "bf16_gemm": gemm_base._BF16_GEMM_SM100_TUNING_CONFIG,
    "fp8_gemm": gemm_base._FP8_GEMM_SM100_TUNING_CONFIG,
}

collect_metadata = autotuner._collect_metadata


class WouldProfileError(Exception):
    """FlashInfer began to profile."""


def refuse_to_profile(*_: Any) -> None:
    raise WouldProfileError


def value(extra: Any) -> Any:
    if isinstance(extra, list):
        return tuple(map(value, extra))
    if isinstance(extra, str) and extra.startswith("torch."):
        return getattr(torch, extra.removeprefix("torch."))
    return extra


def toy_runner(name: str, extras: list[Any], scenario: dict[str, Any]) -> TunableRunner:
    members: dict[str, Any] = {
        "get_valid_tactics": refuse_to_profile,
        "get_cache_key_extras": lambda self, inputs: value(extras),
        "forward": lambda self, inputs, tactic=-1, do_preparation=False, **kwargs: None,
    }
    if "offers" in scenario:
        offered = [value(tactic) for runner, tactic in scenario["offers"] if runner == name]
        members["get_valid_tactics"] = lambda self, inputs, profile: offered
    if "refused" in scenario:
        members["validate_tactic"] = lambda self, inputs, tactic: (name, tactic) not in value(scenario["refused"])
    return type(name, (TunableRunner,), members)()


def profile_with(offers: list[Any]) -> Callable[..., float]:
    """Takes the place of ``_profile_single_kernel``: what is offered in order, then the default."""
    order = list(value(offers))

    def profile(runner: TunableRunner, inputs: list[Any], tactic: Any, *_: Any, **__: Any) -> float:
        candidate = (type(runner).__name__, tactic)
        return 1.0 + (order.index(candidate) if candidate in order else len(order))

    return profile


def ask(tuner: AutoTuner, lookup: dict[str, Any], scenario: dict[str, Any]) -> dict[str, Any]:
    """What the tuner looks for, what ``search_cache`` finds, and what ``choose_one`` returns to an op."""
    op = lookup["custom_op"]
    runners = [toy_runner(name, extras, scenario) for name, extras in lookup["runners"]]
    # Meta tensors have a shape and no memory: a model's real shapes cost nothing.
    inputs = [None if shape == [0] else torch.empty(shape, device="meta") for shape in lookup["shapes"]]
    config = TUNING_CONFIGS[op]
    shapes = tuple(tuple(shape) for shape in lookup["shapes"])
    keys = [
        AutoTuner._get_cache_key(op, runner, shapes, config, runner.get_cache_key_extras(inputs)).file_key
        for runner in runners
    ]
    hit, index, tactic, _ = tuner.search_cache(op, runners, shapes, config, inputs)
    try:
        runner, chosen_tactic = tuner.choose_one(op, runners, config, inputs)
        chosen = [type(runner).__name__, chosen_tactic]
    except WouldProfileError:
        chosen = None
    return {"keys": keys, "served": [type(runners[index]).__name__, tactic] if hit else None, "chosen": chosen}


@contextlib.contextmanager
def context(tuner: AutoTuner, scenario: dict[str, Any], answer: dict[str, Any]) -> Iterator[None]:
    if "cache" in scenario:
        with autotune(scenario.get("tune", False), cache=scenario["cache"]):
            yield
    elif "store" in scenario:
        mode = scenario.get("execution_mode", "auto")
        policy = None if mode == "auto" else MeasurementPolicy(execution_mode=mode)
        task = "tune" if scenario.get("tune") else "replay"
        diagnostics = {}
        with contextlib.suppress(ImportError):  # 0.7.4 and newer
            from flashinfer.autotune_cache import ReplayCoverage

            if task == "replay":
                diagnostics["replay_report"] = ReplayCoverage(max_records=100_000)
        with autotune_v2(task, cache_root=scenario["store"], measurement_policy=policy, **diagnostics):
            answer["preloaded"] = len(tuner._managed_decoded)
            yield
        for report in diagnostics.values():
            answer["coverage"] = collections.Counter(f"{item['status']} {item['source']}" for item in report.records)
    else:
        yield


def play(scenario: dict[str, Any]) -> dict[str, Any]:
    metadata = scenario.get("metadata")
    autotuner._collect_metadata = autotuner.autotuner._collect_metadata = (
        collect_metadata if metadata is None else lambda: dict(metadata)
    )
    AutoTuner._instance = None
    tuner = AutoTuner.get()
    tuner._prepare_input_tensors = refuse_to_profile
    if "offers" in scenario:
        tuner._prepare_input_tensors = lambda profile, inputs: inputs
        tuner._profile_single_kernel = profile_with(scenario["offers"])
    answer: dict[str, Any] = {}
    if "load" in scenario:
        answer["loaded"] = tuner.load_configs(scenario["load"])
    with context(tuner, scenario, answer):
        answer["answers"] = [ask(tuner, lookup, scenario) for lookup in scenario.get("lookups", [])]
        answer["entries"] = len(tuner._file_configs)
    if "save" in scenario:
        tuner.save_configs(scenario["save"])
    if scenario.get("environment"):
        from fi_tunecache.autotuner import collect_metadata as ours

        answer["environment"] = ours().metadata()
    return answer


if __name__ == "__main__":
    # The CPU build of torch raises here, where tuning wants to know whether it may begin.
    torch.cuda.is_current_stream_capturing = lambda: False
    print(json.dumps({"version": flashinfer.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(play(json.loads(line))), file=answers, flush=True)
