"""A registry of any size, made up: what 1,000 published tuning runs on one GPU would look like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from fi_tunecache.bundle import Bundle, Provenance, Workload
from fi_tunecache.entry import Entry, Lookup, Tactic
from fi_tunecache.environment import Environment
from fi_tunecache.key import Dtype, Key
from fi_tunecache.publish.directory import add_bundles

__all__ = ["HERE", "OTHER_CUDNN", "write_registry"]

HERE = Environment(
    flashinfer_version="0.7.4",
    cuda_version="13.0",
    cublas_version="13.1.0",
    cudnn_version="91900",
    cudnn_frontend_version="1.30.0",
    cutlass_dsl_version="nvidia-cutlass-dsl==4.8.1;nvidia-cutlass-dsl-libs-base==4.8.1",
    gpu="NVIDIA H200",
)
"""Where one bundle in ten was tuned; the others differ from it in cudnn-frontend, which decides speed alone."""

OTHER_CUDNN = msgspec.structs.replace(HERE, cudnn_version="92400")
"""Here no lookup that cuDNN took part in may be answered: half of the entries."""

_CUBLAS, _CUDNN, _CUTLASS = "CublasFp8GemmRunner", "CudnnFp8GemmRunner", "CutlassFp8GemmRunner"
_POLICY = ("cuda_graph_profile_replays", 1, "l2_cache_policy", "cold-chain:8")
_FP8 = (Dtype("float8_e4m3fn"), Dtype("float8_e4m3fn"), Dtype("bfloat16"))
_WORKLOAD = Workload(model="example/model-8b", engine="vllm 0.33.0", tensor_parallel=2, note="bmm_fp8 auto")
_SIZES = [2**power for power in range(14)]  # the buckets of M


def write_registry(root: Path, bundles: int, entries: int) -> None:
    """Write ``bundles`` bundles of ``entries`` entries, no two of one shape, into a registry below ``root``.

    Every second bundle has its lookups recorded, each with two runners; the others come from plain
    v1 files with one runner a shape. So every entry can be chosen at match level compatible.
    """
    add_bundles(root, "made up", list(_bundles(bundles, entries)))


def _bundles(bundles: int, entries: int) -> Iterator[Bundle]:
    for number in range(bundles):
        raced = number % 2 == 0
        pairs = [_raced(number, index) if raced else _alone(number, index) for index in range(entries)]
        yield Bundle(
            environment=msgspec.structs.replace(HERE, cudnn_frontend_version=f"1.{30 + number // 2 % 10}.0"),
            entries={entry.key.text: entry for entry, _ in pairs},
            provenance=Provenance(
                created=f"2026-12-{1 + number % 28:02}", tool="fi-tunecache", tuning_seconds=60.0, workload=_WORKLOAD
            ),
            lookups=tuple(lookup for _, lookup in pairs if lookup is not None),
            default_raced=raced,
        )


def _raced(bundle: int, index: int) -> tuple[Entry, Lookup]:
    keys = tuple(_key("fp8_gemm", runner, bundle, index) for runner in (_CUBLAS, _CUDNN))
    winner = index % 2
    tactic: Tactic = (5 + index % 7, ((0, index % 3), (2, 13), (4, 1))) if winner else index % 20
    return _entry(keys[winner], tactic, index), Lookup(keys, winner)


def _alone(bundle: int, index: int) -> tuple[Entry, None]:
    return _entry(_key("fp8_gemm_sm90", _CUTLASS, bundle, index), index % 30, index), None


def _key(custom_op: str, runner: str, bundle: int, index: int) -> Key:
    m, n, k = _SIZES[index % len(_SIZES)], 1024 + 64 * bundle, 2048 + 128 * (index // len(_SIZES))
    return Key(custom_op, runner, ((1, m, k), (1, k, n), (1,), (1,), (1, -1, n), (-1,)), _FP8)


def _entry(key: Key, tactic: Tactic, index: int) -> Entry:
    time_ms = round(0.008 + index / 7001, 6)
    selection = {"candidates": 20, "margin": 0.031337, "runner_up_ms": round(time_ms * 1.031337, 6), "time_ms": time_ms}
    return Entry(key, key.runner, tactic, _POLICY, selection)
