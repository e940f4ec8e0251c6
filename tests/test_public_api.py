"""What `import fi_tunecache` gives, and what it costs."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import fi_tunecache

HEAVY = {"torch", "flashinfer", "huggingface_hub", "pynvml"}


def test_the_public_names() -> None:
    assert fi_tunecache.__all__ == [
        "CacheError",
        "Environment",
        "FiTuneCacheError",
        "FormatError",
        "HardwareError",
        "IntegrityError",
        "MatchLevel",
        "MeasurementPolicy",
        "Need",
        "NoMatchError",
        "Pulled",
        "Registry",
        "RegistryError",
        "Request",
        "Selection",
        "UsageError",
        "autotune_needed",
        "disable",
        "enable",
        "open_registry",
        "probe_environment",
        "pull",
        "record_lookups",
        "report",
        "resolve",
    ]


@pytest.mark.parametrize("name", fi_tunecache.__all__)
def test_each_can_be_had_and_is_documented(name: str) -> None:
    assert name in dir(fi_tunecache)
    assert getattr(fi_tunecache, name).__doc__


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'enable_everything'"):
        fi_tunecache.enable_everything  # noqa: B018


def heavy_after_importing(*modules: str) -> str:
    code = f"import sys, {', '.join(modules)}; print(sorted({HEAVY} & set(sys.modules)))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("module", ["fi_tunecache", "fi_tunecache.retrieval", "fi_tunecache.probe", "fi_tunecache.cli"])
def test_importing_costs_nothing_heavy(module: str) -> None:
    assert heavy_after_importing(module) == "[]"


def test_every_module_can_be_imported_without_anything_heavy() -> None:
    root = Path(fi_tunecache.__file__).parent
    modules = [f"fi_tunecache.{path.stem}" for path in sorted(root.glob("[a-z]*.py"))]
    modules += [f"fi_tunecache.cli.{path.stem}" for path in sorted((root / "cli").glob("[a-z]*.py"))]
    assert heavy_after_importing(*modules) == "[]"


def test_the_example_in_the_docstring_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_TUNECACHE_DIR", str(tmp_path))
    results = doctest.testmod(fi_tunecache)
    assert (results.failed, results.attempted > 0) == (0, True)
