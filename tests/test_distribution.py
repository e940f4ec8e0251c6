"""The wheel that users get: built from the sdist, whole, and working from an empty directory."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`python -m build` makes the sdist from the tree, then the wheel from the sdist."""
    source = tmp_path_factory.mktemp("source") / "tree"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(source)], check=True)
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(source)], check=True, capture_output=True, text=True
    )
    return next(out.glob("*.whl"))


def test_it_holds_the_three_trees(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "fi_tunecache", "publish", "manifests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for prefix in ("publish", "manifests"):
        tracked = [f"fi_tunecache/{name}" if name.startswith(f"{prefix}/") else name for name in tracked]
    assert set(tracked) == {name for name in names if ".dist-info/" not in name}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_its_console_script_runs_from_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    """Installed alone; its dependencies are taken from this environment, by path."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    site = next((venv / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [venv / "bin" / "fi-tunecache", "list"], cwd=empty, capture_output=True, text=True, check=True
    )
    assert "NVIDIA H200" in done.stdout
    assert (
        str(site)
        in subprocess.run(
            [python, "-c", "import fi_tunecache, fi_tunecache.publish.gather; print(fi_tunecache.__file__)"],
            cwd=empty,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
