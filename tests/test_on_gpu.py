"""On a real GPU: the light probe agrees with FlashInfer; what is pulled, seeded or published is served to real kernels.

Run with `pytest -m gpu tests/test_on_gpu.py` where torch, FlashInfer and this package are installed.
What is asked is what the embedded bundles were tuned for: (K, N) = (4096, 4096), M up to 256.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import run_process

from fi_tunecache.environment import Environment
from fi_tunecache.json_document import decode_json
from fi_tunecache.match_level import MatchLevel
from fi_tunecache.materialisation import stamped
from fi_tunecache.retrieval import pull
from fi_tunecache.selection import Request
from fi_tunecache.user_cache import UserCache

# torch and FlashInfer warn of things that are not ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

BUCKETS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def environment(mode: str) -> Environment:
    """What `env --probe MODE` prints in a process of its own."""
    command = [sys.executable, "-m", "fi_tunecache", "env", "--probe", mode, "--json"]
    done = subprocess.run(command, capture_output=True, check=True)
    document: Any = decode_json(done.stdout, max_bytes=2**16, max_nesting=8)
    return Environment.from_metadata(document["environment"])


@pytest.fixture(scope="module")
def here() -> Environment:
    return environment("full")


def test_the_light_probe_agrees_with_flashinfer_in_every_fact(here: Environment) -> None:
    assert not here.undetermined()
    assert environment("light") == here


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, bool]]:
    """How often each op was looked up, by whether it was found."""
    from flashinfer.autotuner import AutoTuner

    AutoTuner._instance = None
    tuner = AutoTuner.get()
    search, seen = tuner.search_cache, Counter[tuple[str, bool]]()

    def counted(custom_op: str, *arguments: Any, **options: Any) -> Any:
        found = search(custom_op, *arguments, **options)
        seen[custom_op, bool(found[0])] += 1
        return found

    monkeypatch.setattr(tuner, "search_cache", counted)
    return seen


def all_hit(seen: Counter[tuple[str, bool]]) -> None:
    assert seen[("bf16_gemm", False)] == seen[("fp8_gemm", False)] == 0
    assert seen[("bf16_gemm", True)] == 2 * len(BUCKETS)
    assert seen[("fp8_gemm", True)] == len(BUCKETS)


def test_a_pulled_file_is_served_to_real_kernels(
    here: Environment, tmp_path: Path, searches: Counter[tuple[str, bool]]
) -> None:
    import flashinfer
    import torch

    request = Request(environment=here, registries=("embedded",), level=MatchLevel.COMPATIBLE)
    pulled = pull(request, cache=UserCache(tmp_path / "cache"))
    file = tmp_path / "tuned.json"
    file.write_bytes(stamped(pulled.selection, pulled.data, here))
    errors = []
    with flashinfer.autotune(False, cache=str(file)):
        for m in BUCKETS:
            errors += _gemms(flashinfer, torch, m)
    all_hit(searches)
    assert max(errors) < 0.01


def test_a_seeded_managed_store_is_replayed(tmp_path: Path, searches: Counter[tuple[str, bool]]) -> None:
    import flashinfer
    import torch
    from flashinfer.autotune_cache import autotune_v2

    store = tmp_path / "store"
    seeding = ("pull", "--match", "compatible", "--to", f"flashinfer:{store}")
    first = run_process(*seeding, "--json", folder=tmp_path)
    report = json.loads(first.stdout)["store"]
    assert report["seeded"] > 0
    assert (report["kept"], report["skipped"]) == (0, 0)
    with autotune_v2("replay", cache_root=str(store)):
        errors = [error for m in BUCKETS for error in _gemms(flashinfer, torch, m)]
    all_hit(searches)
    assert max(errors) < 0.01
    cleared = run_process("cache", "clear", "--to", f"flashinfer:{store}", "--json", folder=tmp_path)
    assert json.loads(cleared.stdout)["entries"] == report["seeded"]


def test_a_program_with_enable_alone(
    tmp_path: Path,
    searches: Counter[tuple[str, bool]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A graph that is recorded before is left alone; then all that is asked while tuning hits, and nothing is timed."""
    import flashinfer
    import torch
    from flashinfer.autotuner import AutoTuner

    import fi_tunecache
    from fi_tunecache.mapped_library import mapped_cublas

    monkeypatch.setenv("FI_TUNECACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FI_TUNECACHE_MATCH", "compatible")
    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", lambda *_, **__: pytest.fail("a kernel is timed"))
    stock = AutoTuner.__dict__["choose_one"]
    _gemms(flashinfer, torch, 16)  # kernels are built, with FlashInfer's defaults
    searches.clear()
    fi_tunecache.enable()
    with caplog.at_level("INFO", "fi_tunecache"):
        try:
            a, b = (torch.randn(n, 4096, device="cuda", dtype=torch.bfloat16) for n in (16, 4096))
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                flashinfer.mm_bf16(a, b.t(), backend="cublaslt")
            assert searches == {("bf16_gemm", False): 1}
            assert AutoTuner.__dict__["choose_one"] is not stock
            searches.clear()
            with flashinfer.autotune(True, cache=str(tmp_path / "user.json")):
                errors = [error for m in BUCKETS for error in _gemms(flashinfer, torch, m)]
            assert AutoTuner.__dict__["choose_one"] is stock
        finally:
            fi_tunecache.disable()
    assert not [key for key in searches if not key[1]]
    assert max(errors) < 0.01
    (line,) = caplog.messages
    assert " entries for NVIDIA H200 (compatible) from embedded@" in line
    print(line)
    assert (mapped_cublas() or "").isdigit()

    AutoTuner._instance = None  # the next start, without us
    with flashinfer.autotune(False, cache=str(tmp_path / "user.json")):
        for m in BUCKETS:
            _gemms(flashinfer, torch, m)
    lookups = json.loads((tmp_path / "user.json").read_bytes())
    assert sum(key.startswith("(") for key in lookups) == 3 * len(BUCKETS)


def test_what_is_tuned_here_is_published_and_served(tmp_path: Path, searches: Counter[tuple[str, bool]]) -> None:
    import flashinfer
    import torch

    saved, registry = tmp_path / "saved.json", tmp_path / "registry"
    with flashinfer.autotune(True, cache=str(saved)):
        _gemms(flashinfer, torch, BUCKETS[-1])
    published = run_process("publish", saved, "--to", registry, "--yes", "--json", folder=tmp_path)
    assert published.returncode == 0, published.stderr
    (added,) = json.loads(published.stdout)["bundles"]
    assert added["round_trip"] == f"flashinfer {flashinfer.__version__}", published.stderr

    pulled = run_process("pull", "--registry", registry, "--to", tmp_path / "tuned.json", folder=tmp_path)
    assert pulled.returncode == 0, pulled.stderr
    searches.clear()
    with flashinfer.autotune(False, cache=str(tmp_path / "tuned.json")):
        _gemms(flashinfer, torch, BUCKETS[-1])
    assert searches[("fp8_gemm", True)] == 1
    refused = run_process("publish", tmp_path / "tuned.json", "--to", registry, "--yes", folder=tmp_path)
    assert refused.returncode == 2
    assert added["sha256"][:16] in refused.stderr


def _gemms(flashinfer: Any, torch: Any, m: int) -> list[float]:
    """Run the tuned calls at one M; gives each one's largest error against float32, relative to the largest value."""
    torch.manual_seed(m)
    a = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16).t()
    a8 = torch.randn(1, m, 4096, device="cuda").to(torch.float8_e4m3fn)
    b8 = torch.randn(1, 4096, 4096, device="cuda").to(torch.float8_e4m3fn).transpose(1, 2)
    one = torch.ones(1, device="cuda")
    wanted, wanted8 = a.float() @ b.float(), a8.float() @ b8.float()
    given = [
        (flashinfer.mm_bf16(a, b, backend="cudnn"), wanted),
        (flashinfer.mm_bf16(a, b, backend="cublaslt"), wanted),
        (flashinfer.bmm_fp8(a8, b8, one, one, torch.bfloat16, backend="auto"), wanted8),
    ]
    return [((out.float() - exact).abs().max() / exact.abs().max()).item() for out, exact in given]
