"""Small bundles, made by name, for tests of resolution and selection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fi_tunecache.bundle import Bundle, Provenance, write_bundle
from fi_tunecache.entry import Entry, Lookup, Tactic
from fi_tunecache.environment import Environment
from fi_tunecache.key import Dtype, Key
from fi_tunecache.manifest import BundleRow, Yank, describe_bundle
from fi_tunecache.measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from fi_tunecache.verdict import Candidate

H200 = Environment(
    flashinfer_version="0.7.4",
    cuda_version="13.0",
    cublas_version="13.1.0",
    cudnn_version="91900",
    cudnn_frontend_version="1.32.0",
    cutlass_dsl_version="cpython-312;nvidia-cutlass-dsl==4.8.1:aa;torch==2.11.0:bb",
    gpu="NVIDIA H200",
)

CUDNN, CUBLASLT, TINY = "CudnnBf16GemmRunner", "CublasltBf16GemmRunner", "TinyGemmBf16GemmRunner"
CUTLASS, DSL, UNKNOWN = "CutlassBf16GemmRunner", "CuteDSLSplitKBf16Runner", "NobodyKnowsRunner"
POLICY = ("cuda_graph_profile_replays", 1, "l2_cache_policy", "cold-chain:8")


def key(runner: str, m: int = 1, op: str = "bf16_gemm") -> Key:
    return Key(op, runner, ((m, 4096), (4096, 4096), (-1, 4096)), (Dtype("bfloat16"), True))


def entry(at: Key, tactic: Tactic = 0, time_ms: float | None = None) -> Entry:
    selection = None if time_ms is None else {"time_ms": time_ms, "candidates": 2}
    return Entry(at, at.runner, tactic, POLICY, selection)


def lookup(runners: Sequence[str], winner: str, m: int = 1, op: str = "bf16_gemm") -> Lookup:
    return Lookup(tuple(key(runner, m, op) for runner in runners), list(runners).index(winner))


def bundle(
    entries: Iterable[Entry],
    lookups: Iterable[Lookup] = (),
    *,
    environment: Environment = H200,
    created: str = "2026-12-01",
    default_raced: bool | None = True,
    policy: MeasurementPolicy = DEFAULT_POLICY,
) -> Bundle:
    return Bundle(
        environment=environment,
        entries={item.key.text: item for item in entries},
        provenance=Provenance(created=created),
        policy=policy,
        lookups=tuple(lookups),
        default_raced=default_raced,
    )


def candidate(made: Bundle, *, yanked: Yank | None = None, precedence: int = 0, registry: str = "test") -> Candidate:
    data, sha256 = write_bundle(made)
    row: BundleRow = describe_bundle(made, data, sha256)
    if yanked is not None:
        row = BundleRow(**{**{name: getattr(row, name) for name in row.__struct_fields__}, "yanked": yanked})
    return Candidate(registry, row, made, precedence)


def tactics(chosen: Mapping[str, object]) -> dict[tuple[str, int], Tactic]:
    """What was chosen, as {(runner, M): tactic}."""
    found = {}
    for text, item in chosen.items():
        parsed = Key.parse(text)
        found[parsed.runner, parsed.profile[0][0]] = item.entry.tactic  # type: ignore[attr-defined]
    return found
