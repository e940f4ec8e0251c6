"""The modules inside FlashInfer's package: read as text, never run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_tunecache.bundled_module import MAX_MODULE_BYTES, read_bundled_module
from fi_tunecache.entry import LegacyEntry
from fi_tunecache.errors import FormatError
from fi_tunecache.key import Key

ONE = "('moe::gemm1', 'MoERunner', ((1, 3584), (256, 512, 448), (0,)))"
TWO = "('moe::gemm2', 'MoERunner', ((16, 3584),))"


def test_the_entries_of_a_module() -> None:
    module = f'"""Doc."""\nimport os\nbest_configs = {{\n    "{ONE}": (0, 5),\n    "{TWO}": (1, (-1, 3)),\n}}\n'

    assert read_bundled_module(module.encode()) == (LegacyEntry(ONE, 0, 5), LegacyEntry(TWO, 1, (-1, 3)))


def test_an_entry_never_hits() -> None:
    assert "FlashInfer 0.6.13" in LegacyEntry.STATEMENT
    with pytest.raises(FormatError, match="key without extras"):
        Key.parse(ONE)


def test_a_module_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    module = f"open({str(trace)!r}, 'w')\nimport no_such_module\nbest_configs = {{}}\n"

    assert read_bundled_module(module.encode()) == ()
    assert not trace.exists()
    assert "no_such_module" not in sys.modules


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        pytest.param("", "does not assign a dict to best_configs", id="empty"),
        pytest.param("other = {}", "does not assign a dict to best_configs", id="another name"),
        pytest.param("best_configs = []", "does not assign a dict to best_configs", id="a list"),
        pytest.param("best_configs = {", "not a module of literals", id="not Python"),
        pytest.param("best_configs = dict(a=1)", "not a module of literals", id="a call"),
        pytest.param("best_configs = {[]: 1}", "not a module of literals", id="no key can be a list"),
        pytest.param("best_configs = " + "-" * 100_000 + "1", "not a module of literals", id="exhausts the stack"),
        pytest.param("\0", "not a module of literals", id="null byte"),
        pytest.param("#" * (MAX_MODULE_BYTES + 1), "bytes are more than", id="too large"),
        pytest.param('best_configs = {"moe": (0, 5)}', "not a key of a bundled module: moe", id="not a key"),
        pytest.param("best_configs = {1: (0, 5)}", "not a key of a bundled module: 1", id="a key that is no string"),
        pytest.param(
            "best_configs = {\"('moe', 'R', ((1,),), ())\": (0, 5)}", "not a key of a bundled", id="a key with extras"
        ),
        pytest.param(f'best_configs = {{"{TWO}": 5}}', "not a position and a tactic", id="no position"),
        pytest.param(f'best_configs = {{"{TWO}": ("R", 5)}}', "not a position and a tactic", id="a runner's name"),
        pytest.param(f'best_configs = {{"{TWO}": (0, {{}})}}', "a tactic holds a dict", id="tactic a dict"),
        pytest.param(f'best_configs = {{"{TWO}": (0, 2**63)}}', "not a module of literals", id="an expression"),
        pytest.param(f'best_configs = {{"{TWO}": (0, {2**63})}}', "more than 64 bits", id="more than 64 bits"),
    ],
)
def test_refused(module: str, problem: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_bundled_module(module.encode(), source="v0_1.py")

    assert str(caught.value).startswith("v0_1.py: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=100) | st.text(max_size=60).map(lambda text: f"best_configs = {text}".encode()))
def test_whatever_comes_is_read_or_refused(module: bytes) -> None:
    assert "\n" not in refusal(module)


def refusal(module: bytes) -> str:
    try:
        read_bundled_module(module)
    except FormatError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.7.2", "0.7.2.post1", "0.7.4"])
def test_the_modules_that_flashinfer_ships(version: str) -> None:
    where = os.environ.get("FI_TUNECACHE_TEST_FLASHINFER")
    assert where, "set FI_TUNECACHE_TEST_FLASHINFER to a folder that holds FlashInfer packages: 0.7.4/flashinfer, ..."
    modules = sorted(Path(where, version, "flashinfer", "tuning_configs").glob("v0_1_*.py"))

    counts = {path.stem.rpartition("NVIDIA_")[2]: len(read_bundled_module(path.read_bytes())) for path in modules}

    assert counts == {"B200": 58, "GB200": 34}
