"""``scripts/list_runner_classes.py``: which classes of a package are runners, read without importing it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "list_runner_classes.py"

PACKAGE = {
    "flashinfer/autotuner/__init__.py": "from .autotuner import *\n",
    "flashinfer/autotuner/autotuner.py": "class TunableRunner: ...\n",
    "flashinfer/base.py": (
        "from .autotuner import TunableRunner as Tunable\n"
        "class Base(Tunable): ...\n"
        "class Mixin: ...\n"
        "Alias = Base\n"
        "class OfAlias(Mixin, Alias): ...\n"
    ),
    "flashinfer/gemm/core.py": (
        "raise RuntimeError('this must not be run')\n"
        "from .. import base\n"
        "from ..autotuner import AutoTuner, TunableRunner\n"
        "OP = 'told'\n"
        "def factory():\n"
        "    class Local(TunableRunner): ...\n"
        "    return Local()\n"
        "class OfModule(base.Base): ...\n"
        "class Caller:\n"
        "    def __init__(self):\n"
        "        self.runner = OfModule()\n"
        "    def __call__(self, dtype):\n"
        "        AutoTuner.get().choose_one(f'{dtype}_gemm', [self.runner])\n"
        "def call(fast):\n"
        "    AutoTuner.get().choose_one(OP if fast else 'other', [factory()])\n"
        "def call_again():\n"
        "    call(True)\n"
        "    AutoTuner.get().search_cache(custom_op='third', runners=[Nested])\n"
        "class Nested(base.Base[int]): ...\n"
    ),
    # The same name for something else: not a runner.
    "flashinfer/other.py": "class Base: ...\nclass Stranger(Base): ...\nclass OfNobody(TunableRunner): ...\n",
    "elsewhere/base.py": "from flashinfer.base import Base\nclass NotOfFlashInfer(Base): ...\n",
}

EXPECTED = (
    "class\tsource\tcustom_ops\n"
    "Base\tbase.py:2\t\n"
    "OfAlias\tbase.py:5\t\n"
    "Local\tgemm/core.py:6\tother, told\n"
    "OfModule\tgemm/core.py:8\t*_gemm\n"
    "Nested\tgemm/core.py:19\tthird\n"
)


def run(*arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in PACKAGE.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "site"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "flashinfer_python-0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in PACKAGE.items():
            archive.writestr(name, text)
    return path


def test_runners_are_found_in_a_folder(folder: Path) -> None:
    assert run(folder).stdout == EXPECTED


def test_a_wheel_gives_the_same_list(wheel: Path) -> None:
    assert run(wheel).stdout == EXPECTED


def test_several_packages_are_told_apart(wheel: Path, folder: Path) -> None:
    assert run(wheel, folder).stdout == f"# {wheel.name}\n{EXPECTED}# site\n{EXPECTED}"


def test_a_folder_without_flashinfer_is_refused(tmp_path: Path) -> None:
    refused = run(tmp_path)

    assert refused.returncode == 1
    assert "no flashinfer folder in it" in refused.stderr
    assert "Traceback" not in refused.stderr
