"""Make the embedded registry from real tuning results of an H200.

usage: python scripts/build_embedded_registry.py [DATA] [REGISTRY]

DATA is the folder with ``h200-flashinfer-0.7.4`` and ``h200-flashinfer-0.7.2.post1`` (default
``tests/data``), REGISTRY where the tree goes (default ``manifests``). Running it again changes
nothing: bundles are named by their content. What the results are is told in the READMEs beside
them; the managed stores of 0.7.4 answer the lookups that were recorded for ``gemm-a``, since they
hold the same calls.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from fi_tunecache import __version__
from fi_tunecache.bundle import Bundle, Provenance, Workload
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.publish.gather import gather
from fi_tunecache.publish.recorded_lookups import Question, read_questions
from fi_tunecache.source import read_source

TOOL = f"fi-tunecache {__version__}"
GEMMS = (
    "mm_bf16 with cudnn, cublaslt and tinygemm, bmm_bf16, bmm_fp8 auto; (K, N) = (2048, 4096), (4096, 4096); M <= 256"
)


def gathered(
    path: Path,
    provenance: Provenance,
    questions: tuple[Question, ...],
    *,
    default_raced: bool | None = None,
    trust_winners: bool = True,
) -> list[Bundle]:
    """The bundles of a source, nothing of which is left out. READMEs, not digests, tell what they came from."""
    found = gather(
        [read_source(path)], provenance, questions=questions, trust_winners=trust_winners, default_raced=default_raced
    )
    bundles = [item.bundle for item in found if item.bundle is not None and not item.left_out]
    assert len(bundles) == len(found)
    return [msgspec.structs.replace(bundle, provenance=provenance) for bundle in bundles]


def flashinfer_0_7_4(data: Path) -> list[Bundle]:
    folder = data / "h200-flashinfer-0.7.4"
    bundles: list[Bundle] = []
    for name, seconds, note in [
        ("gemm-a", 58.8, GEMMS),
        ("fp8-8k", 199.6, "bmm_fp8 auto; four (K, N) of a Llama-3.1-8B class model; M <= 8192"),
    ]:
        provenance = Provenance(
            created="2026-12-01",
            tool=TOOL,
            source="v1 file saved by flashinfer.autotune",
            tuning_seconds=seconds,
            torch="2.11.0+cu130",
            python="3.12",
            workload=Workload(note=note),
        )
        questions = read_questions((folder / f"{name}.lookups.json").read_bytes(), source=name)
        bundles += gathered(folder / f"{name}.v1.json", provenance, questions, default_raced=False)
    provenance = Provenance(
        created="2026-12-01",
        tool=TOOL,
        source="managed store written by flashinfer.autotune_v2",
        torch="2.11.0+cu130",
        python="3.12",
        workload=Workload(note=GEMMS),
    )
    questions = read_questions((folder / "gemm-a.lookups.json").read_bytes(), source="gemm-a")
    return bundles + gathered(folder / "managed-store", provenance, questions, trust_winners=False)


def flashinfer_0_7_2_post1(data: Path) -> list[Bundle]:
    folder = data / "h200-flashinfer-0.7.2.post1"
    facts = json.loads((folder / "facts.json").read_text())
    provenance = Provenance(
        created="2026-12-01",
        tool=TOOL,
        source="managed store written by flashinfer.autotune_v2",
        driver=facts["driver"].split(",")[0],
        power_limit_w=float(facts["driver"].split(",")[2].removesuffix("W")),
        mapped_cublas=str(facts["mapped_cublaslt"]),
        workload=Workload(note="mm_bf16 with cublaslt and cudnn, bmm_fp8 auto; K = N = 4096; M <= 256"),
    )
    questions = read_questions((folder / "lookups.json").read_bytes(), source="lookups.json")
    return gathered(folder / "managed-store", provenance, questions)


def main() -> None:
    data = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/data")
    registry = Path(sys.argv[2] if len(sys.argv) > 2 else "manifests")
    for row in add_bundles(
        registry, "fi-tunecache embedded", flashinfer_0_7_4(data) + flashinfer_0_7_2_post1(data), address="embedded"
    ):
        environment = row.environment
        print(
            f"{environment['flashinfer_version']}/{environment['gpu']}: {row.file}, {row.entry_count} entries, "
            f"{row.lookups} lookups, policy {row.measured_under}, default raced: {row.default_raced}"
        )


if __name__ == "__main__":
    main()
