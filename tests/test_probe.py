"""The probe: the recorded facts of a real machine, what is missing and why, and what it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from made_machine import (
    add_flashinfer,
    add_h200,
    add_library,
    add_package,
    compile_nvml,
    run_python,
)

from fi_tunecache.environment import FACTS, Environment
from fi_tunecache.errors import HardwareError
from fi_tunecache.gpu import InstalledGpu
from fi_tunecache.loader import Loader
from fi_tunecache.probe import light_probe, probe_environment

DATA = Path(__file__).parent / "data"
H200 = InstalledGpu(0, "GPU-aa", "NVIDIA H200")
H100 = InstalledGpu(1, "GPU-ab", "NVIDIA H100 80GB HBM3")


def recorded(version: str) -> Environment:
    file, field = {"0.7.4": ("gemm-a.v1.json", "_metadata"), "0.7.2.post1": ("facts.json", "metadata")}[version]
    return Environment.from_metadata(json.loads((DATA / f"h200-flashinfer-{version}" / file).read_text())[field])


@pytest.mark.parametrize("version", ["0.7.4", "0.7.2.post1"])
def test_the_recorded_facts_of_an_h200(tmp_path: Path, version: str) -> None:
    """Of 0.7.4 as they are compared, since its fingerprint hashes files of that very machine."""
    loader = add_h200(tmp_path / "site", tmp_path / "lib", version)

    probe = light_probe(search_path=[str(tmp_path / "site")], environ={}, loader=loader, installed_gpus=[H200])

    assert probe.source == "light"
    assert probe.undetermined == ()
    assert probe.environment.identity() == recorded(version).identity()
    if version == "0.7.2.post1":
        assert probe.environment == recorded(version)


def test_each_fact_that_is_missing_has_its_reason(tmp_path: Path) -> None:
    probe = light_probe(search_path=[str(tmp_path)], environ={}, loader=Loader(), installed_gpus="no driver")

    assert probe.environment == Environment()
    assert probe.undetermined == (
        (
            "flashinfer_version",
            "FlashInfer is not installed for this Python; install the flashinfer-python you will serve with",
        ),
        ("cuda_version", "torch is not installed for this Python; install the torch you will serve with"),
        (
            "cublas_version",
            "no libcublas is within the loader's reach, and no nvidia-cublas wheel is installed;"
            " install the torch you will serve with",
        ),
        (
            "cudnn_version",
            "without a torch that has CUDA nothing says which cuDNN is used; install one with CUDA",
        ),
        ("cudnn_frontend_version", "nvidia-cudnn-frontend is not installed; install the one you will serve with"),
        ("cutlass_dsl_version", "the fingerprint is computed by FlashInfer, whose version is undetermined"),
        (
            "gpu",
            "no GPU was found: no driver; name one with --device 'NVIDIA H200',"
            " or bring all facts with --environment FILE or --like",
        ),
    )


def test_a_version_that_says_unknown_is_undetermined(tmp_path: Path) -> None:
    add_flashinfer(tmp_path, "0.0.0+unknown")
    probe = light_probe(search_path=[str(tmp_path)], environ={}, loader=Loader(), installed_gpus=())
    assert dict(probe.undetermined)["flashinfer_version"] == "it reads '0.0.0+unknown'"


def test_a_cache_that_can_not_be_listed_leaves_cublas_alone_undetermined(tmp_path: Path) -> None:
    add_h200(tmp_path / "site", tmp_path / "lib", "0.7.4")
    probe = light_probe(
        search_path=[str(tmp_path / "site")], environ={}, loader=Loader(cache="no ldconfig"), installed_gpus=[H200]
    )
    assert probe.undetermined == (
        ("cublas_version", "the loader's cache can't be listed: no ldconfig; use --probe full"),
    )


@pytest.mark.parametrize(
    ("environ", "gpu_index", "gpu"),
    [
        pytest.param({"CUDA_VISIBLE_DEVICES": "GPU-ab"}, None, H100.name, id="the one that is visible"),
        pytest.param({}, 0, H200.name, id="the one that is named"),
    ],
)
def test_one_of_several_gpus(tmp_path: Path, environ: dict[str, str], gpu_index: int | None, gpu: str) -> None:
    probe = light_probe(
        gpu_index, search_path=[str(tmp_path)], environ=environ, loader=Loader(), installed_gpus=[H200, H100]
    )
    assert probe.environment.gpu == gpu


@pytest.mark.parametrize(
    ("environ", "gpu_index"),
    [
        pytest.param({}, None, id="several of different names"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0"}, None, id="an index that means nothing"),
        pytest.param({}, 2, id="an index that is not there"),
    ],
)
def test_a_gpu_that_is_ambiguous_is_an_error_unless_none_is_needed(
    tmp_path: Path, environ: dict[str, str], gpu_index: int | None
) -> None:
    path, loader, gpus = [str(tmp_path)], Loader(), [H200, H100]
    with pytest.raises(HardwareError, match=r"--gpu INDEX|the GPUs are 0: NVIDIA H200"):
        light_probe(gpu_index, search_path=path, environ=environ, loader=loader, installed_gpus=gpus)

    probe = light_probe(
        gpu_index, need_gpu=False, search_path=path, environ=environ, loader=loader, installed_gpus=gpus
    )
    assert probe.environment.gpu is None
    assert dict(probe.undetermined)["gpu"] == "it was not looked for"


def test_a_named_gpu_where_there_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="no GPU was found: no driver"):
        light_probe(0, search_path=[str(tmp_path)], environ={}, loader=Loader(), installed_gpus="no driver")


def test_this_machine_without_being_told_anything() -> None:
    probe = probe_environment("light", need_gpu=False)
    missing = [fact for fact, _ in probe.undetermined]
    assert missing == list(probe.environment.undetermined())
    assert all(why and "\n" not in why for _, why in probe.undetermined)


def test_what_the_light_probe_leaves_alone(tmp_path: Path) -> None:
    """torch and FlashInfer of this machine end Python when they are imported; libraries are loaded for NVML only."""
    add_h200(tmp_path / "site", tmp_path / "lib", "0.7.4")
    add_library(tmp_path / "lib", "libcudnn.so.9.19.0", "libcudnn.so.9")
    modules, loaded, undetermined = run_python(
        "import json, sys\n"
        "loaded = []\n"
        "sys.addaudithook(lambda event, args: loaded.append(args[0]) if event == 'ctypes.dlopen' else None)\n"
        "from fi_tunecache.probe import probe_environment\n"
        "probe = probe_environment()\n"
        "print(json.dumps([list(sys.modules), loaded, [fact for fact, _ in probe.undetermined]]))\n",
        tmp_path / "site",
        environ={"LD_LIBRARY_PATH": str(tmp_path / "lib"), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert not {"torch", "flashinfer", "huggingface_hub"} & set(modules)
    assert [name for name in loaded if name is not None] == ["libnvidia-ml.so.1"]
    assert undetermined == ["gpu"]


METADATA = {**dict.fromkeys(FACTS, "unknown"), "flashinfer_version": "0.7.9", "gpu": "NVIDIA H200"}
ASK = (
    "import json, sys\n"
    "from fi_tunecache.probe import probe_environment\n"
    "{first}\n"
    "probe = probe_environment({mode!r}, need_gpu=False)\n"
    "print(json.dumps([probe.source, probe.environment.metadata(), probe.undetermined]))\n"
)


@pytest.mark.parametrize(
    ("first", "mode", "source"),
    [
        pytest.param("", "auto", "light", id="auto, FlashInfer not imported"),
        pytest.param("import flashinfer", "auto", "light", id="auto, its autotuner not imported"),
        pytest.param("import flashinfer.autotuner", "auto", "flashinfer", id="auto, imported already"),
        pytest.param("import flashinfer.autotuner", "light", "light", id="light, imported already"),
        pytest.param("", "full", "flashinfer", id="full, not imported"),
    ],
)
def test_who_is_asked(tmp_path: Path, first: str, mode: str, source: str) -> None:
    add_package(tmp_path, "flashinfer", autotuner=f"def _collect_metadata(): return {METADATA}")
    told, metadata, undetermined = run_python(ASK.format(first=first, mode=mode), tmp_path)

    assert told == source
    if source == "flashinfer":
        assert metadata == {"flashinfer_version": "0.7.9", "gpu": "NVIDIA H200"}
        assert [fact for fact, _ in undetermined] == list(FACTS[1:6])
        assert {why for _, why in undetermined} == {
            "FlashInfer itself can't determine it; give it, or bring all facts with --environment FILE or --like"
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "gpu"),
    [
        pytest.param("'light', 0", "NVIDIA H200", id="light"),
        pytest.param("'full', 1", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", id="full, another than torch's first"),
        pytest.param("'full'", "NVIDIA H200", id="full, torch's first"),
        pytest.param("'full', 2", None, id="full, one that is not there"),
    ],
)
def test_the_gpu_that_is_asked_for(tmp_path: Path, arguments: str, gpu: str | None) -> None:
    add_package(tmp_path, "flashinfer", autotuner=f"def _collect_metadata(): return {METADATA}")
    compile_nvml(tmp_path)
    told = run_python(
        "import json\n"
        "from fi_tunecache.errors import HardwareError\n"
        "from fi_tunecache.probe import probe_environment\n"
        "try:\n"
        f"    print(json.dumps(probe_environment({arguments}).environment.gpu))\n"
        "except HardwareError as error:\n"
        "    print(json.dumps(error.problem))\n",
        tmp_path,
        environ={"LD_LIBRARY_PATH": str(tmp_path)},
    )
    assert told == (gpu or "there is no GPU 2")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.7.4", "0.7.2.post1", "0.7.2"])
def test_the_light_probe_agrees_with_the_real_flashinfer(
    flashinfer_folder: Callable[[str], Path], version: str
) -> None:
    light, full, source = run_python(
        "import json\n"
        "from fi_tunecache.probe import probe_environment\n"
        "light = probe_environment('light').environment.metadata()\n"
        "import flashinfer.autotuner\n"
        "full = probe_environment()\n"
        "print(json.dumps([light, full.environment.metadata(), full.source]))\n",
        flashinfer_folder(version),
    )
    assert source == "flashinfer"
    assert light == full
    assert light["flashinfer_version"] == version
