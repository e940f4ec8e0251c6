"""cuBLAS and cuDNN: which one FlashInfer would report, for machines as they come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from made_machine import (
    TORCH_REQUIRES,
    add_distribution,
    add_library,
    add_torch,
    cache_of,
    compile_library,
    run_python,
)

from fi_tunecache.errors import HardwareError
from fi_tunecache.library_facts import cublas_version, cudnn_version
from fi_tunecache.loader import Loader
from fi_tunecache.wheel_facts import Wheel, find_wheels

CUBLAS_13_1 = ("libcublas.so.13.1.0.3", "libcublas.so.13", "libcublas.so")
NO_REQUIREMENTS = ("filelock",)


def installed(tmp_path: Path, *wheels: str, requires: tuple[str, ...] = TORCH_REQUIRES) -> tuple[Wheel, ...]:
    site = tmp_path / "site"
    add_torch(site, "2.11.0", "13.0", requires)
    for wheel in wheels:
        name, _, version = wheel.partition("==")
        add_distribution(site, name, version)
    return find_wheels([str(site)])


@pytest.mark.parametrize(
    ("named", "cached", "wheels", "version"),
    [
        pytest.param(CUBLAS_13_1, (), (), "13.1.0", id="plain name in LD_LIBRARY_PATH"),
        pytest.param((), CUBLAS_13_1, (), "13.1.0", id="plain name in the cache"),
        pytest.param(CUBLAS_13_1, (), ("nvidia-cublas==13.3.0.5",), "13.1.0", id="plain name before the wheel"),
        pytest.param(
            ("libcublasLt.so.13.2.1.1", "libcublasLt.so"),
            ("libcublas.so.13.1.0.3", "libcublas.so.13"),
            (),
            "13.2.1",
            id="plain cublasLt before a SONAME of cublas",
        ),
        pytest.param(
            (),
            ("libcublas.so.13.1.0.3", "libcublas.so.13"),
            ("nvidia-cublas==13.3.0.5",),
            "13.3.0",
            id="SONAME in the cache: torch has mapped its wheel under it",
        ),
        pytest.param(
            (),
            ("libcublas.so.12.8.4.1", "libcublas.so.12"),
            ("nvidia-cublas==13.3.0.5",),
            "12.8.4",
            id="SONAME of another CUDA than torch's",
        ),
        pytest.param(
            (),
            ("libcublas.so.13.1.0.3", "libcublas.so.13"),
            (),
            "13.1.0",
            id="SONAME in the cache, no wheel",
        ),
        pytest.param(
            ("libcublas.so.13.1.0.3", "libcublas.so.13"),
            (),
            ("nvidia-cublas==13.3.0.5",),
            "13.3.0",
            id="SONAME in LD_LIBRARY_PATH alone: ctypes does not name it",
        ),
        pytest.param((), (), ("nvidia-cublas-cu12==12.8.4.1",), "12.8.4", id="wheel alone"),
        pytest.param(
            (),
            (),
            ("nvidia-cublas==13.1.0.3", "nvidia-cublas-cu12==12.8.4.1"),
            "12.8.4",
            id="two wheels: the name that sorts last",
        ),
    ],
)
def test_cublas(
    tmp_path: Path, named: tuple[str, ...], cached: tuple[str, ...], wheels: tuple[str, ...], version: str
) -> None:
    loader = loader_with(tmp_path, named, cached)
    assert cublas_version(installed(tmp_path, *wheels), loader, "13.0", tmp_path / "site" / "torch") == version


def loader_with(tmp_path: Path, named: tuple[str, ...], cached: tuple[str, ...]) -> Loader:
    directories = (str(add_library(tmp_path / "named", *named)),) if named else ()
    return Loader(directories, cache_of(add_library(tmp_path / "cached", *cached)) if cached else ())


@pytest.mark.parametrize(
    ("named", "cached", "wheels", "reason"),
    [
        pytest.param((), (), (), "no libcublas is within the loader's reach", id="none"),
        pytest.param(
            ("libcublas.so",), (), ("nvidia-cublas==13.1.0.3",), "does not tell its full version", id="a stub"
        ),
        pytest.param(
            (),
            ("libcublas.so.13.real", "libcublas.so.13"),
            (),
            "does not tell its full version; use --probe full",
            id="a real file without a version",
        ),
        pytest.param(
            ("libcublas.so.13.1.0.3", "libcublas.so.13"),
            ("libcublas.so.13.1.0.3", "libcublas.so.13"),
            ("nvidia-cublas==13.3.0.5",),
            "it is open which libcublas.so.13 torch loads: nvidia-cublas 13.3.0.5, or ",
            id="the wheel and LD_LIBRARY_PATH differ",
        ),
    ],
)
def test_cublas_that_is_undetermined(
    tmp_path: Path, named: tuple[str, ...], cached: tuple[str, ...], wheels: tuple[str, ...], reason: str
) -> None:
    loader = loader_with(tmp_path, named, cached)
    with pytest.raises(HardwareError) as caught:
        cublas_version(installed(tmp_path, *wheels), loader, "13.0", tmp_path / "site" / "torch")
    assert reason in str(caught.value)


def test_a_wheel_that_torch_does_not_load_is_not_what_it_has_mapped(tmp_path: Path) -> None:
    """As in NVIDIA's own containers, where torch is built against the libraries of the system."""
    wheels = installed(tmp_path, "nvidia-cublas==13.3.0.5", "nvidia-cudnn-cu13==9.20.0.1", requires=NO_REQUIREMENTS)
    cublas = add_library(tmp_path / "cublas", "libcublas.so.13.1.0.3", "libcublas.so.13")
    cudnn = add_library(tmp_path / "cudnn", "libcudnn.so.9.19.0", "libcudnn.so.9")
    loader = Loader(cache=cache_of(cublas, cudnn))

    assert cublas_version(wheels, loader, "13.0", tmp_path / "site" / "torch") == "13.1.0"
    assert cudnn_version(wheels, loader, "13.0", tmp_path / "site" / "torch") == "91900"


def test_without_torch_the_loader_decides(tmp_path: Path) -> None:
    loader = loader_with(tmp_path, (), ("libcublas.so.13.1.0.3", "libcublas.so.13"))
    add_distribution(tmp_path / "site", "nvidia-cublas", "13.3.0.5")
    assert cublas_version(find_wheels([str(tmp_path / "site")]), loader, None, None) == "13.1.0"


@pytest.mark.parametrize(
    ("wheels", "cuda", "version"),
    [
        pytest.param(("nvidia-cudnn-cu13==9.19.0.56",), "13.0", "91900", id="cuDNN 9"),
        pytest.param(("nvidia-cudnn-cu12==9.8.0.87",), "12.8", "90800", id="one digit"),
        pytest.param(("nvidia-cudnn-cu12==8.9.7.29",), "12.1", "8907", id="cuDNN 8 counts in other digits"),
        pytest.param(
            ("nvidia-cudnn-cu13==9.19.0.56", "nvidia-cudnn-cu12==9.10.2.21"),
            "12.8",
            "91002",
            id="of torch's CUDA",
        ),
        pytest.param(
            ("nvidia-cudnn-frontend==1.32.0", "nvidia-cudnn-cu13==9.19.0.56"), "13.0", "91900", id="not the frontend"
        ),
    ],
)
def test_cudnn_of_a_wheel(tmp_path: Path, wheels: tuple[str, ...], cuda: str, version: str) -> None:
    assert cudnn_version(installed(tmp_path, *wheels), Loader(), cuda, tmp_path / "site" / "torch") == version


@pytest.mark.parametrize(
    ("named", "bundled", "wheel", "version"),
    [
        pytest.param(
            ("libcudnn.so.9.19.0", "libcudnn.so.9"),
            (),
            "nvidia-cudnn-cu13==9.19.0.56",
            "91900",
            id="LD_LIBRARY_PATH has the wheel's version",
        ),
        pytest.param(
            ("libcudnn.so.8.9.7", "libcudnn.so.8"),
            (),
            "nvidia-cudnn-cu13==9.19.0.56",
            "91900",
            id="LD_LIBRARY_PATH has a cuDNN under another SONAME",
        ),
        pytest.param(
            ("libcudnn.so.9.20.0", "libcudnn.so.9"),
            (),
            "nvidia-cudnn-cu13==9.19.0.56",
            "it is open which libcudnn.so.9 torch loads: nvidia-cudnn-cu13 9.19.0.56, or ",
            id="LD_LIBRARY_PATH has another version",
        ),
        pytest.param(
            ("libcudnn.so.9",),
            (),
            "nvidia-cudnn-cu13==9.19.0.56",
            "it is open which libcudnn.so.9 torch loads",
            id="LD_LIBRARY_PATH has one without a version",
        ),
        pytest.param(("libcudnn.so.9.20.0", "libcudnn.so.9"), (), None, "92000", id="no wheel, LD_LIBRARY_PATH"),
        pytest.param((), ("libcudnn.so.9.20.0", "libcudnn.so.9"), None, "92000", id="no wheel, torch brings its own"),
        pytest.param(
            ("libcudnn.so.9.20.0", "libcudnn.so.9"),
            ("libcudnn.so.9",),
            None,
            "torch/lib/libcudnn.so.9 does not tell its full version",
            id="no wheel, what torch brings comes first",
        ),
        pytest.param((), (), None, "nvidia-cudnn-cu13 is not installed for torch, and no libcudnn can be", id="none"),
        pytest.param(
            ("libcudnn.so.9.20.0", "libcudnn.so.9", "libcudnn.so.8"),
            (),
            None,
            "and libcudnn.so.8 and libcudnn.so.9 can be found; use --probe full",
            id="no wheel, two SONAMEs",
        ),
        pytest.param(
            (),
            (),
            "nvidia-cudnn-cu13==9.19",
            "nvidia-cudnn-cu13 has the odd version '9.19'",
            id="a wheel of two numbers",
        ),
    ],
)
def test_cudnn_of_a_library(
    tmp_path: Path, named: tuple[str, ...], bundled: tuple[str, ...], wheel: str | None, version: str
) -> None:
    wheels = installed(tmp_path, *([wheel] if wheel else []))
    if bundled:
        add_library(tmp_path / "site" / "torch" / "lib", *bundled)
    try:
        told = cudnn_version(wheels, loader_with(tmp_path, named, ()), "13.0", tmp_path / "site" / "torch")
    except HardwareError as error:
        told = str(error)
    assert told == version if version.isdigit() else version in told


def test_the_folder_of_the_wheel_itself_on_ld_library_path(tmp_path: Path) -> None:
    wheels = installed(tmp_path, "nvidia-cudnn-cu13==9.19.0.56")
    own = add_library(tmp_path / "site" / "nvidia" / "cudnn" / "lib", "libcudnn.so.9")
    assert cudnn_version(wheels, Loader((str(own),)), "13.0", tmp_path / "site" / "torch") == "91900"


def test_cudnn_without_cuda(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="without a torch that has CUDA nothing says which cuDNN is used"):
        cudnn_version(installed(tmp_path, "nvidia-cudnn-cu13==9.19.0.56"), Loader(), None, None)


CUBLAS = "int {function}(int part, int *value) {{ int of[3] = {{{numbers}}}; *value = of[part]; return 0; }}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "links", "wheels", "version"),
    [
        pytest.param(None, (), (), None, id="none"),
        pytest.param("libcublas.so.13.1.0.3", ("libcublas.so.13", "libcublas.so"), (), "13.1.0", id="plain name"),
        pytest.param("libcublasLt.so.13.2.1.1", ("libcublasLt.so",), (), "13.2.1", id="plain name of cublasLt"),
        pytest.param(
            "libcublas.so.13.1.0.3", ("libcublas.so.13",), ("nvidia-cublas==13.3.0.5",), "13.3.0", id="SONAME alone"
        ),
        pytest.param(None, (), ("nvidia-cublas==13.1.0.3", "nvidia-cublas-cu12==12.8.4.1"), "12.8.4", id="two wheels"),
    ],
)
def test_cublas_as_flashinfer_finds_it(
    tmp_path: Path,
    flashinfer_folder: Callable[[str], Path],
    library: str | None,
    links: tuple[str, ...],
    wheels: tuple[str, ...],
    version: str | None,
) -> None:
    for wheel in wheels:
        add_distribution(tmp_path / "site", *wheel.split("=="))
    if library is not None:
        stem, _, number = library.partition(".so.")
        function = f"{stem.removeprefix('lib')}GetProperty"
        source = CUBLAS.format(function=function, numbers=", ".join(number.split(".")[:3]))
        compile_library(source, tmp_path / "lib" / library, f"{stem}.so.13")
        for link in links:
            (tmp_path / "lib" / link).symlink_to(library)
    ours, mapped, theirs = run_python(
        "import json, pathlib\n"
        "from fi_tunecache.probe import light_probe\n"
        "ours = light_probe().environment.cublas_version\n"
        "mapped = pathlib.Path('/proc/self/maps').read_text()\n"
        "from flashinfer.autotuner.autotuner import _get_cublas_version\n"
        "print(json.dumps([ours, mapped, _get_cublas_version()]))\n",
        flashinfer_folder("0.7.4"),
        tmp_path / "site",
        environ={"LD_LIBRARY_PATH": str(tmp_path / "lib")},
    )
    assert ours == (None if theirs == "unknown" or theirs.startswith("cuda-toolkit-") else theirs)
    if version is not None:  # otherwise it is what the torch of this environment has brought, if anything
        assert ours == version
    assert "cublas" not in mapped
