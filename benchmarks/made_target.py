"""A folder in which the light probe finds every software fact of the H200 that the embedded registry was tuned on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["install_made_target"]

_DISTRIBUTIONS = {
    "flashinfer-python": "0.7.4",
    "torch": "2.11.0",
    "apache-tvm-ffi": "0.1.15.post2",
    "nvidia-cublas": "13.1.0.3",
    "nvidia-cudnn-cu13": "9.19.0.56",
    "nvidia-cudnn-frontend": "1.32.0",
    "nvidia-cutlass-dsl": "4.8.1",
    "nvidia-cutlass-dsl-libs-base": "4.8.1",
    "nvidia-cutlass-dsl-libs-core": "4.8.1",
}
_TORCH_REQUIRES = ("cuda-toolkit[cublas,cudart]==13.0.2", "nvidia-cudnn-cu13==9.19.0.56")


def install_made_target(folder: Path) -> dict[str, str]:
    """Make the folder; gives the variables by which a process finds what is in it.

    torch and flashinfer are there by name and version only: importing either ends the process.
    """
    site, libraries = folder / "site", folder / "libraries"
    for name, version in _DISTRIBUTIONS.items():
        _distribution(site, name, version, _TORCH_REQUIRES if name == "torch" else ())
    _package(site, "torch", version="__version__ = '2.11.0'\ncuda = '13.0'\nhip = None\n")
    _package(site, "flashinfer", _build_meta="__version__ = '0.7.4'\n")
    libraries.mkdir()
    (libraries / "libcublas.so.13.1.0.3").touch()
    for link in ("libcublas.so.13", "libcublas.so"):
        (libraries / link).symlink_to("libcublas.so.13.1.0.3")
    return {"PYTHONPATH": str(site), "LD_LIBRARY_PATH": str(libraries)}


def _distribution(site: Path, name: str, version: str, requires: Iterable[str]) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{needs}")
    (info / "RECORD").write_text("a.py,sha256=aa,1\n")


def _package(site: Path, name: str, **modules: str) -> None:
    (site / name).mkdir()
    for module, text in {"__init__": f"raise SystemExit('{name} was imported')\n", **modules}.items():
        (site / name / f"{module}.py").write_text(text)
