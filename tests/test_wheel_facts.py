"""Facts read from installed distributions, and that FlashInfer itself computes the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_machine import add_distribution, add_flashinfer, add_package, add_torch, run_python

from fi_tunecache.errors import HardwareError
from fi_tunecache.wheel_facts import (
    FINGERPRINTS,
    cuda_version,
    cudnn_frontend_version,
    cutlass_dsl_version,
    dump_text,
    find_wheels,
    flashinfer_version,
)


def names(*search_path: Path) -> list[tuple[str, str]]:
    return [(wheel.name, wheel.version) for wheel in find_wheels([str(folder) for folder in search_path])]


def test_only_what_a_fact_depends_on_is_read(tmp_path: Path) -> None:
    for name in ("nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cutlass-dsl-libs-base", "torch", "torchvision"):
        add_distribution(tmp_path, name, "1.0")
    unreadable = add_distribution(tmp_path, "numpy", "2.0")
    (unreadable / "METADATA").write_bytes(b"\xff")

    assert sorted(name for name, _ in names(tmp_path)) == [
        "nvidia-cublas-cu12",
        "nvidia-cudnn-cu12",
        "nvidia-cutlass-dsl-libs-base",
        "torch",
    ]


@pytest.mark.parametrize(
    ("folder", "found"),
    [
        pytest.param("torch-2.11.0.dist-info", True, id="a wheel"),
        pytest.param("Torch-2.11.0.dist-info", True, id="another case"),
        pytest.param("~orch-2.11.0.dist-info", True, id="what pip left of an uninstall"),
        pytest.param("torch.egg-info", False, id="metadata under the name of wheels in an egg"),
        pytest.param("torch-2.11.0.dist-inf", False, id="no distribution"),
    ],
)
def test_folders_that_are_distributions(tmp_path: Path, folder: str, found: bool) -> None:
    add_distribution(tmp_path, "torch", "2.11.0", folder=folder)
    if folder.endswith("egg-info"):
        (tmp_path / folder / "METADATA").unlink()
    assert names(tmp_path) == ([("torch", "2.11.0")] if found else [])


def test_a_build_from_source_has_an_egg_info(tmp_path: Path) -> None:
    info = add_distribution(tmp_path, "torch", "2.11.0a0", folder="torch.egg-info")
    (info / "METADATA").rename(info / "PKG-INFO")
    assert names(tmp_path) == [("torch", "2.11.0a0")]


def test_duplicates_along_the_path_count_and_the_first_comes_first(tmp_path: Path) -> None:
    for folder, version in (("a", "2.11.0"), ("b", "2.10.0")):
        add_distribution(tmp_path / folder, "torch", version)
    search_path = [tmp_path / "missing", tmp_path / "a", tmp_path / "b", tmp_path / "a"]

    assert [version for _, version in names(*search_path)] == ["2.11.0", "2.10.0", "2.11.0"]


@pytest.mark.slow
def test_the_real_distributions_as_importlib_finds_them() -> None:
    theirs = [
        (one.metadata["Name"], one.version, one.read_text("RECORD"))
        for one in distributions()
        if one.metadata["Name"] in ("torch", "apache-tvm-ffi", "flashinfer-python")
        or one.metadata["Name"].startswith(("nvidia-cublas", "nvidia-cudnn", "nvidia-cutlass-dsl"))
    ]
    ours = [(wheel.name, wheel.version, wheel.read_text("RECORD")) for wheel in find_wheels(sys.path)]
    assert sorted(ours) == sorted(theirs)
    assert "torch" in [name for name, _, _ in ours]


@pytest.mark.parametrize("version", ["0.7.4", "0.7.2.post1", "0.7.4+cu130", "0.7.5.dev20261201", "0.7.5rc1"])
def test_the_version_is_what_flashinfer_calls_itself(tmp_path: Path, version: str) -> None:
    add_flashinfer(tmp_path, version)
    path = [str(tmp_path)]
    assert flashinfer_version(path, find_wheels(path)) == version


def test_the_version_of_the_distribution_does_not_count(tmp_path: Path) -> None:
    add_flashinfer(tmp_path, "0.7.4", build_meta='__version__ = "0.7.4+cu130"\n')
    path = [str(tmp_path)]
    assert flashinfer_version(path, find_wheels(path)) == "0.7.4+cu130"


def test_the_first_package_on_the_path_counts(tmp_path: Path) -> None:
    (tmp_path / "checkout" / "flashinfer").mkdir(parents=True)
    add_flashinfer(tmp_path / "a", "0.7.4")
    add_flashinfer(tmp_path / "b", "0.7.2")
    path = [str(tmp_path / folder) for folder in ("checkout", "a", "b")]
    assert flashinfer_version(path, find_wheels(path)) == "0.7.4"


@pytest.mark.parametrize(
    ("build_meta", "reason"),
    [
        pytest.param(None, "FlashInfer calls itself 0.0.0+unknown; the distribution's 0.7.4 is not", id="no file"),
        pytest.param("from os import name as __version__", "_build_meta.py computes __version__", id="computed"),
        pytest.param('__version__ = "0.7" + ".4"', "_build_meta.py computes __version__", id="an expression"),
        pytest.param("__version__ = ", "_build_meta.py can't be read: invalid syntax", id="no Python"),
        pytest.param("\0", "_build_meta.py can't be read: ", id="no text"),
    ],
)
def test_a_version_that_can_not_be_read(tmp_path: Path, build_meta: str | None, reason: str) -> None:
    package = add_flashinfer(tmp_path, "0.7.4", build_meta=build_meta)
    if build_meta is None:
        (package / "_build_meta.py").unlink()
    path = [str(tmp_path)]
    with pytest.raises(HardwareError) as caught:
        flashinfer_version(path, find_wheels(path))
    assert reason in str(caught.value)


def test_flashinfer_that_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="FlashInfer is not installed for this Python; install"):
        flashinfer_version([str(tmp_path)], ())


def test_flashinfer_that_is_installed_elsewhere(tmp_path: Path) -> None:
    add_distribution(tmp_path, "flashinfer-python", "0.7.4")
    path = [str(tmp_path)]
    with pytest.raises(HardwareError, match=r"flashinfer-python 0\.7\.4 is installed without a package"):
        flashinfer_version(path, find_wheels(path))


@pytest.mark.parametrize("version", ["13.0", "12.8"])
def test_the_cuda_of_torch(tmp_path: Path, version: str) -> None:
    add_torch(tmp_path, "2.11.0", version)
    assert cuda_version([str(tmp_path)]) == version


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("cuda = None", "a build without CUDA", id="CPU build"),
        pytest.param("hip = '7.0'", "a build without CUDA", id="nothing about CUDA"),
        pytest.param(None, "version.py can't be read", id="no version.py"),
    ],
)
def test_torch_without_cuda(tmp_path: Path, text: str | None, reason: str) -> None:
    add_package(tmp_path, "torch", **({} if text is None else {"version": text}))
    with pytest.raises(HardwareError, match=reason):
        cuda_version([str(tmp_path)])


def test_no_torch(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="torch is not installed for this Python"):
        cuda_version([str(tmp_path)])


def test_the_frontend_is_its_wheel(tmp_path: Path) -> None:
    add_distribution(tmp_path, "nvidia-cudnn-frontend", "1.32.0")
    assert cudnn_frontend_version(find_wheels([str(tmp_path)])) == "1.32.0"
    with pytest.raises(HardwareError, match="nvidia-cudnn-frontend is not installed"):
        cudnn_frontend_version(())


@pytest.mark.parametrize("version", ["0.7.0", "0.7.0.post1", "0.7.1", "0.7.2", "0.7.2.post1", "0.7.2+cu130"])
def test_the_fingerprint_up_to_0_7_2_lists_names(tmp_path: Path, version: str) -> None:
    for name in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core", "torch"):
        add_distribution(tmp_path, name, "4.8.1")
    facts = json.loads((Path(__file__).parent / "data/h200-flashinfer-0.7.2.post1/facts.json").read_text())

    told = cutlass_dsl_version(version, find_wheels([str(tmp_path)]))

    assert told == facts["metadata"]["cutlass_dsl_version"]


@pytest.mark.parametrize("version", ["0.6.18", "0.7.3", "0.7.4.post1", "0.7.4.dev1", "0.7.5", "0.8.0", "1"])
def test_a_version_whose_formula_is_not_known(version: str) -> None:
    with pytest.raises(HardwareError, match=r"it is not known how FlashInfer .* computes its fingerprint; use --probe"):
        cutlass_dsl_version(version, ())


def test_no_fingerprint_without_a_version_or_up_to_0_7_2_without_the_packages() -> None:
    with pytest.raises(HardwareError, match="whose version is undetermined"):
        cutlass_dsl_version(None, ())
    with pytest.raises(HardwareError, match="no nvidia-cutlass-dsl is installed"):
        cutlass_dsl_version("0.7.2", ())


@given(st.none() | st.text() | st.text(st.characters(max_codepoint=0x7F)))
def test_text_is_dumped_as_json_dumps_it(text: str | None) -> None:
    assert dump_text(text) == json.dumps(text).encode()


DSL_WHEELS = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core")


def add_nothing(_: Path) -> None:
    pass


def add_dsl(site: Path) -> None:
    for name in DSL_WHEELS:
        add_distribution(site, name, "4.8.1", record='../bin/"q",sha256=aa,1\r\nb\\c.py,,\n\x7fé\r\n')


def add_odd_dsl(site: Path) -> None:
    """Another case, an underscore, a record missing, a direct URL, a leftover, and the same twice."""
    add_distribution(site, "NVIDIA-Cutlass-DSL", "4.8.1", record=None)
    add_distribution(site, "nvidia_cutlass_dsl-libs-core", "4.8.1", direct_url='{"url": "file:///x"}')
    add_distribution(site, "torch", "2.9.0", folder="~orch-2.9.0.dist-info")
    add_distribution(site / "nvidia-cutlass-dsl.egg-info", "unrelated", "1.0")
    add_distribution(site, "nvidia-cutlass-dsl", "4.8.0", folder="nvidia_cutlass_dsl-4.8.0.dist-info")
    add_distribution(site, "nvidia.cutlass.dsl", "4.7.0")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.7.4", "0.7.2.post1", "0.7.2"])
@pytest.mark.parametrize(
    ("make", "times"),
    [
        pytest.param(add_nothing, 1, id="none installed"),
        pytest.param(add_dsl, 1, id="three wheels"),
        pytest.param(add_dsl, 2, id="the same folder twice on the path"),
        pytest.param(add_odd_dsl, 1, id="odd ones"),
    ],
)
def test_the_fingerprint_is_flashinfers_own(
    tmp_path: Path,
    flashinfer_folder: Callable[[str], Path],
    version: str,
    make: Callable[[Path], None],
    times: int,
) -> None:
    make(tmp_path)
    ours, theirs, untouched = run_python(
        "import json, sys\n"
        f"sys.path += {[str(tmp_path)] * (times - 1)}\n"
        "from fi_tunecache.errors import HardwareError\n"
        "from fi_tunecache.wheel_facts import cutlass_dsl_version, find_wheels\n"
        "try:\n"
        f"    ours = cutlass_dsl_version({version!r}, find_wheels(sys.path))\n"
        "except HardwareError:\n"
        "    ours = 'unknown'\n"
        "untouched = 'torch' not in sys.modules and 'flashinfer' not in sys.modules\n"
        "from flashinfer.jit.cute_dsl_core import _get_cute_dsl_version\n"
        "print(json.dumps([ours, _get_cute_dsl_version(), untouched]))\n",
        flashinfer_folder(version),
        tmp_path,
    )
    assert ours == theirs
    assert untouched
    assert version in FINGERPRINTS
