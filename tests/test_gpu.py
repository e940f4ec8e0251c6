"""The GPU of a process: CUDA's rules for the two environment variables, and what NVML tells."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_machine import compile_nvml, run_python

from fi_tunecache.errors import HardwareError
from fi_tunecache.gpu import InstalledGpu, MigInstance, gpu_name, usable_gpus, visible_gpus

H200, H100, A100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
SMALL, LARGE = f"{H100} MIG 1g.10gb", f"{H100} MIG 3g.40gb"

ALIKE = tuple(InstalledGpu(index, f"GPU-a{index}b-0", H200) for index in range(3))
MIXED = (InstalledGpu(0, "GPU-aa-0", H200), InstalledGpu(1, "GPU-ab-1", H100))
SLICED = (
    InstalledGpu(0, "GPU-aa-0", H100, mig=(MigInstance("MIG-1a", SMALL), MigInstance("MIG-1b", LARGE))),
    InstalledGpu(1, "GPU-ab-1", H100, mig=(MigInstance("MIG-2c", SMALL),)),
    InstalledGpu(2, "GPU-ac-2", H100, mig=()),
)
SHARED = (InstalledGpu(0, "GPU-aa-0", H100, mig=(MigInstance("MIG-1a", SMALL), MigInstance("MIG-1b", SMALL))),)


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        pytest.param(None, [0, 1, 2], id="unset: all"),
        pytest.param("", [], id="empty: none"),
        pytest.param("1", [1], id="one"),
        pytest.param("2,0", [2, 0], id="in the order named"),
        pytest.param("0,2,-1,1", [0, 2], id="a negative index ends the list"),
        pytest.param("-1", [], id="-1: none"),
        pytest.param("0,7,1", [0], id="an index that is not there ends the list"),
        pytest.param("7", [], id="only one that is not there"),
        pytest.param("1,1", [], id="named twice: none"),
        pytest.param("0,7,7", [], id="named twice behind one that is not there: none"),
        pytest.param(" 1 , 2", [1, 2], id="blanks around an index"),
        pytest.param("1gpu2,+2", [1, 2], id="digits that a number starts with"),
        pytest.param("0,,1", [0], id="an empty entry ends the list"),
        pytest.param("all", [], id="a word: none"),
        pytest.param("NoDevFiles", [], id="what Slurm writes for none"),
        pytest.param("GPU-a1b-0", [1], id="a UUID"),
        pytest.param("GPU-a2,GPU-a0b", [2, 0], id="UUIDs shortened"),
        pytest.param("GPU-a", [], id="a UUID shortened to several"),
        pytest.param("GPU-a1,GPU-zz,GPU-a2", [1], id="a UUID that is not there ends the list"),
        pytest.param("GPU-a1,GPU-a1b", [], id="one GPU by two abbreviations: none"),
        pytest.param("GPU-a1,GPU-a1", [], id="a UUID twice: none"),
        pytest.param("GPU-a1,2", [1], id="an index after a UUID ends the list"),
        pytest.param("2,GPU-a1", [2], id="a UUID after an index ends the list"),
        pytest.param("MIG-1a", [], id="a MIG instance where there is none"),
    ],
)
def test_visible_of_three_alike(value: str | None, indices: list[int]) -> None:
    assert [device.index for device in visible_gpus(ALIKE, value, None)] == indices


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        pytest.param(None, ["MIG-1a", "MIG-1b", "MIG-2c"], id="unset: every instance"),
        pytest.param("MIG-2c", ["MIG-2c"], id="an instance"),
        pytest.param("MIG-1b,MIG-2", ["MIG-1b", "MIG-2c"], id="instances, one shortened"),
        pytest.param("MIG-1", [], id="shortened to several"),
        pytest.param("MIG-1a,GPU-ab", ["MIG-1a"], id="a GPU after an instance ends the list"),
        pytest.param("0", ["MIG-1a", "MIG-1b"], id="the index of a GPU in MIG mode: its instances"),
        pytest.param("GPU-ab", ["MIG-2c"], id="the UUID of a GPU in MIG mode: its instances"),
        pytest.param("2", [], id="MIG mode without an instance"),
        pytest.param("MIG-GPU-aa-0/1/0", [], id="the naming of drivers before R470 is not known"),
    ],
)
def test_visible_in_mig_mode(value: str | None, uuids: list[str]) -> None:
    assert [device.uuid for device in visible_gpus(SLICED, value, "PCI_BUS_ID")] == uuids


@pytest.mark.parametrize(
    ("installed", "environ", "gpu_index", "name"),
    [
        pytest.param(ALIKE, {}, None, H200, id="all alike"),
        pytest.param(ALIKE, {"CUDA_VISIBLE_DEVICES": "2"}, None, H200, id="an index among GPUs alike"),
        pytest.param(MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-ab"}, None, H100, id="a UUID among different ones"),
        pytest.param(
            MIXED,
            {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            None,
            H100,
            id="an index in the order of the PCI bus",
        ),
        pytest.param(MIXED, {}, 1, H100, id="--gpu among different ones"),
        pytest.param(MIXED, {"CUDA_VISIBLE_DEVICES": "0"}, 1, H100, id="--gpu counts what is hidden too"),
        pytest.param(SHARED, {}, None, SMALL, id="instances alike"),
        pytest.param(SLICED, {"CUDA_VISIBLE_DEVICES": "MIG-1b"}, None, LARGE, id="one instance by its UUID"),
        pytest.param(SLICED, {}, 1, SMALL, id="--gpu with one instance"),
    ],
)
def test_one_name(
    installed: tuple[InstalledGpu, ...], environ: dict[str, str], gpu_index: int | None, name: str
) -> None:
    assert gpu_name(installed, environ, gpu_index) == name


@pytest.mark.parametrize(
    ("installed", "environ", "gpu_index", "message"),
    [
        pytest.param(
            MIXED,
            {},
            None,
            f"there are several GPUs of different names: 0: {H200}, 1: {H100}; pick one with --gpu INDEX",
            id="all of different names",
        ),
        pytest.param(
            MIXED,
            {"CUDA_VISIBLE_DEVICES": "0"},
            None,
            f"CUDA_VISIBLE_DEVICES=0 counts GPUs of different names in CUDA's own order: 0: {H200}, 1: {H100};"
            " set CUDA_DEVICE_ORDER=PCI_BUS_ID, or pick one with --gpu INDEX",
            id="an index among different ones",
        ),
        pytest.param(
            MIXED,
            {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"},
            None,
            f"CUDA_VISIBLE_DEVICES=0 counts GPUs of different names in CUDA's own order: 0: {H200}, 1: {H100};"
            " set CUDA_DEVICE_ORDER=PCI_BUS_ID, or pick one with --gpu INDEX",
            id="an index in CUDA's order, said",
        ),
        pytest.param(
            (*SHARED, InstalledGpu(1, "GPU-ab-1", H100)),
            {"CUDA_VISIBLE_DEVICES": "0"},
            None,
            f"CUDA_VISIBLE_DEVICES=0 counts GPUs of different names in CUDA's own order: 0: {SMALL}, 1: {H100};"
            " set CUDA_DEVICE_ORDER=PCI_BUS_ID, or pick one with --gpu INDEX",
            id="one of two alike is sliced",
        ),
        pytest.param(
            SLICED,
            {"CUDA_VISIBLE_DEVICES": "GPU-aa"},
            None,
            f"there are several GPUs of different names: 0: {SMALL}, 0: {LARGE}; pick one with --gpu INDEX",
            id="instances of different names",
        ),
        pytest.param(
            SLICED,
            {},
            0,
            f"there are several GPUs of different names: 0: {SMALL}, 0: {LARGE};"
            " leave --gpu out and name one MIG instance in CUDA_VISIBLE_DEVICES",
            id="--gpu with instances of different names",
        ),
        pytest.param(
            MIXED, {}, 4, f"there is no GPU 4; the GPUs are 0: {H200}, 1: {H100}", id="--gpu that is not there"
        ),
    ],
)
def test_no_single_name(
    installed: tuple[InstalledGpu, ...], environ: dict[str, str], gpu_index: int | None, message: str
) -> None:
    with pytest.raises(HardwareError) as caught:
        gpu_name(installed, environ, gpu_index)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("installed", "environ", "problem"),
    [
        pytest.param("the driver is not loaded", {}, "no GPU was found: the driver is not loaded", id="unreadable"),
        pytest.param((), {}, "no GPU was found: the NVIDIA driver lists none", id="none installed"),
        pytest.param(
            MIXED,
            {"CUDA_VISIBLE_DEVICES": ""},
            f"CUDA_VISIBLE_DEVICES='' shows none of 0: {H200}, 1: {H100}",
            id="all hidden",
        ),
        pytest.param(
            SLICED[2:],
            {},
            f"no GPU can be used: in MIG mode without an instance are 2: {H100}",
            id="MIG mode without an instance",
        ),
    ],
)
def test_no_gpu_is_no_error_until_its_name_is_asked_for(
    installed: tuple[InstalledGpu, ...] | str, environ: dict[str, str], problem: str
) -> None:
    assert usable_gpus(installed, environ) == ()
    with pytest.raises(HardwareError) as caught:
        gpu_name(installed, environ)
    assert caught.value.problem == problem
    assert all(option in caught.value.next_step for option in ("--device", "--environment", "--like"))


@given(st.lists(st.sampled_from(["0", "1", "2", "9", "-1", "GPU-a1", "GPU-", "MIG-1", ""]) | st.text(max_size=6)))
def test_any_value_shows_some_of_the_gpus_each_once(entries: list[str]) -> None:
    devices = visible_gpus(ALIKE, ",".join(entries), None)
    assert len(set(devices)) == len(devices)
    assert {device.index for device in devices} <= {0, 1, 2}


@pytest.mark.slow
def test_torch_reads_the_variable_alike() -> None:
    """torch counts devices without CUDA by a reading of its own: an independent witness for every list of three."""
    tokens = ["0", "1", "2", "7", "-1", "", " 1", "1gpu2", "GPU-a0", "GPU-a1", "GPU-a1b", "GPU-a", "GPU-zz", "x"]
    values = [",".join(entries) for size in (1, 2, 3) for entries in itertools.product(tokens, repeat=size)]
    theirs = run_python(
        "import json, os\n"
        "from torch.cuda import _parse_visible_devices, _transform_uuid_to_ordinals\n"
        f"uuids = {[gpu.uuid for gpu in ALIKE]!r}\n"
        "answers = []\n"
        f"for value in json.loads({json.dumps(values)!r}):\n"
        "    os.environ['CUDA_VISIBLE_DEVICES'] = value\n"
        "    named = _parse_visible_devices()\n"
        "    if named and isinstance(named[0], str):\n"
        "        named = _transform_uuid_to_ordinals(named, uuids)\n"
        "    ends = [place for place, index in enumerate(named) if index >= len(uuids)]\n"
        "    answers.append(named[: ends[0]] if ends else named)\n"
        "print(json.dumps(answers))\n"
    )
    ours = [[device.index for device in visible_gpus(ALIKE, value, None)] for value in values]
    assert dict(zip(values, ours, strict=True)) == dict(zip(values, theirs, strict=True))


READ = (
    "import json, msgspec\n"
    "from fi_tunecache.gpu import read_installed_gpus\n"
    "print(json.dumps(msgspec.to_builtins(read_installed_gpus())))\n"
)


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    compile_nvml(folder)
    return folder


def read_with(nvml: Path, log: Path, fails: str) -> object:
    environ = {"LD_LIBRARY_PATH": str(nvml), "FAKE_NVML_LOG": str(log), "FAKE_NVML_FAILS": fails}
    return run_python(READ, environ=environ)


@pytest.mark.slow
def test_what_nvml_lists(nvml: Path, tmp_path: Path) -> None:
    assert read_with(nvml, tmp_path / "calls", "") == [
        {"index": 0, "uuid": "GPU-0", "name": "NVIDIA H200", "mig": None},
        {
            "index": 1,
            "uuid": "GPU-1",
            "name": "NVIDIA H100 80GB HBM3",
            "mig": [
                {"uuid": "MIG-1-0", "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"},
                {"uuid": "MIG-1-2", "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"},
            ],
        },
    ]
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "shutdown"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fails",
    [pytest.param("mig=3", id="the GPU does not support it"), pytest.param("mig=13", id="the driver has no such call")],
)
def test_a_gpu_that_knows_no_mig_mode_has_it_off(nvml: Path, tmp_path: Path, fails: str) -> None:
    gpus = read_with(nvml, tmp_path / "calls", fails)
    assert [gpu["mig"] for gpu in gpus] == [None, None]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "reason", "last_call"),
    [
        pytest.param("init=9", "the NVIDIA driver is installed but not loaded", "init", id="driver not loaded"),
        pytest.param(
            "init=18",
            "the NVIDIA driver in the kernel and its libraries have different versions: reboot, or reload the driver",
            "init",
            id="version mismatch",
        ),
        pytest.param(
            "init=4", "no permission to use the NVIDIA driver: look at /dev/nvidia*", "init", id="no permission"
        ),
        pytest.param("handle=15", "NVML says: GPU is lost", "shutdown", id="a GPU that is lost"),
        pytest.param("mig=999", "NVML says: Unknown Error", "shutdown", id="an answer from the future"),
    ],
)
def test_why_nvml_lists_nothing(nvml: Path, tmp_path: Path, fails: str, reason: str, last_call: str) -> None:
    assert read_with(nvml, tmp_path / "calls", fails) == reason
    assert (tmp_path / "calls").read_text().splitlines()[-1] == last_call


@pytest.mark.slow
def test_a_machine_without_a_driver(tmp_path: Path) -> None:
    """A file by that name that is no library stands before a driver that the machine may have."""
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    reason = run_python(READ, environ={"LD_LIBRARY_PATH": str(tmp_path)})
    assert reason == "this machine or container has no NVIDIA driver (libnvidia-ml.so.1)"
