"""The environment that a command is about: what was said, what is found here, and what contradicts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made
import pytest
from hypothesis import given
from made_machine import add_flashinfer, add_unknown_flashinfer
from msgspec import structs
from strategies import environments

from fi_tunecache.cli.output import environment_builtins
from fi_tunecache.environment import Environment
from fi_tunecache.errors import FormatError, HardwareError, RegistryError, UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.gpu import InstalledGpu
from fi_tunecache.manifest import Manifest, Yank, read_manifest, write_manifest
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.target import Target, TargetOptions, find_target

FOLDER = "0.7.4/nvidia-h200"


def silent(line: str) -> None:
    raise AssertionError(f"nothing is to be said here: {line}")


@pytest.fixture
def facts_file(tmp_path: Path) -> Path:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(made.H200.metadata()), "utf-8")
    return path


@pytest.fixture
def registry(tmp_path: Path) -> str:
    """Three bundles: the newest, one with another cuDNN, and the very newest, which is yanked."""
    root = tmp_path / "registry"
    older = made.H200.with_facts({"cudnn_version": "91000"})
    bundles = [
        made.bundle([made.entry(made.key(made.CUTLASS), 1)], created="2026-12-02"),
        made.bundle([made.entry(made.key(made.CUTLASS), 2)], environment=older, created="2026-12-01"),
        made.bundle([made.entry(made.key(made.CUTLASS), 3)], created="2026-12-03"),
    ]
    rows = add_bundles(root, "made", bundles)
    yank(root, rows[2].file)
    return str(root)


def yank(root: Path, file: str) -> None:
    manifest = root / FOLDER / "manifest.json"
    rows = read_manifest(manifest.read_bytes(), Folder.parse(FOLDER)).bundles
    reason = Yank("wrong clocks", "2026-12-04")
    rows = tuple(structs.replace(row, yanked=reason) if row.file == file else row for row in rows)
    manifest.write_bytes(write_manifest(Manifest(rows)))


def bundle_ids(registry: str) -> list[str]:
    manifest = Path(registry, FOLDER, "manifest.json").read_bytes()
    return [row.bundle_id for row in read_manifest(manifest, Folder.parse(FOLDER)).bundles]


def find(registries: tuple[str, ...] = (), **options: Any) -> Target:
    return find_target(TargetOptions(**options), registries, silent)


def test_a_file_brings_all_facts(facts_file: Path) -> None:
    target = find(environment_file=facts_file)
    assert target == Target(made.H200, f"from {facts_file}", described=True)


def test_single_facts_replace_those_of_the_file(facts_file: Path) -> None:
    target = find(environment_file=facts_file, device="NVIDIA H100", facts={"cudnn_version": "92400"})

    assert target.environment == made.H200.with_facts({"gpu": "NVIDIA H100", "cudnn_version": "92400"})
    assert target.origin == f"from {facts_file}, with cudnn_version, gpu as given"
    assert target.described


def test_a_bundle_brings_all_facts(registry: str) -> None:
    target = find((registry,), like=FOLDER)

    newest = bundle_ids(registry)[0]
    assert target == Target(made.H200, f"like {FOLDER}/{newest} of {registry}", described=True)


def test_single_facts_replace_those_of_the_bundle(registry: str) -> None:
    target = find((registry,), like=FOLDER, facts={"cublas_version": "13.2.0"})
    assert target.environment == made.H200.with_facts({"cublas_version": "13.2.0"})
    assert target.origin.endswith(", with cublas_version as given")


def test_the_start_of_its_digits_names_a_bundle(registry: str) -> None:
    _, second, _ = bundle_ids(registry)
    for reference in (second, second[:6], f"{second}.json"):
        assert find((registry,), like=f"{FOLDER}/{reference}").environment.cudnn_version == "91000"


def test_a_device_is_taken_by_its_true_name_too(registry: str) -> None:
    assert find((registry,), like="0.7.4/NVIDIA H200").environment == made.H200


def test_of_one_day_the_last_published_is_the_newest(tmp_path: Path) -> None:
    older = made.H200.with_facts({"cudnn_version": "91000"})
    add_bundles(tmp_path, "made", [made.bundle([made.entry(made.key(made.CUTLASS), 1)], environment=older)])
    add_bundles(tmp_path, "made", [made.bundle([made.entry(made.key(made.CUTLASS), 2)])])
    assert find((str(tmp_path),), like=FOLDER).environment == made.H200


def test_the_first_registry_that_has_it_counts(registry: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    older = made.H200.with_facts({"cudnn_version": "90000"})
    add_bundles(other, "other", [made.bundle([made.entry(made.key(made.CUTLASS))], environment=older)])

    assert find((str(other), registry), like=FOLDER).environment == older
    assert find((registry, str(other)), like=FOLDER).environment == made.H200
    assert find((str(other), registry), like=f"{FOLDER}/{bundle_ids(registry)[0]}").environment == made.H200


@pytest.mark.parametrize(
    ("like", "message"),
    [
        pytest.param(
            "0.7.4", "'0.7.4/' does not name a version and a device; write it like 0.7.4/nvidia-h200", id="no device"
        ),
        pytest.param(
            "/nvidia-h200",
            "'' can't be the folder of a FlashInfer version; write a version like 0.7.4",
            id="no version",
        ),
        pytest.param(
            "../../nvidia-h200",
            "'..' can't be the folder of a FlashInfer version; write a version like 0.7.4",
            id="a path",
        ),
        pytest.param(
            "0.7.4/nvidia-h100",
            "no bundle 0.7.4/nvidia-h100 that is not yanked in REGISTRY; see what there is with `fi-tunecache list`",
            id="no such folder",
        ),
        pytest.param(
            "0.7.4/nvidia-h200/zz",
            "no bundle 0.7.4/nvidia-h200/zz that is not yanked in REGISTRY; see what there is with `fi-tunecache list`",
            id="no such bundle",
        ),
    ],
)
def test_a_reference_that_names_no_bundle(registry: str, like: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        find((registry,), like=like)
    assert str(caught.value) == message.replace("REGISTRY", registry)


def test_a_yanked_bundle_is_not_taken_even_by_name(registry: str) -> None:
    yanked = bundle_ids(registry)[2]
    with pytest.raises(UsageError, match=f"no bundle {FOLDER}/{yanked} that is not yanked in"):
        find((registry,), like=f"{FOLDER}/{yanked}")


def test_digits_that_start_several_bundles_are_not_enough(tmp_path: Path) -> None:
    bundles = [made.bundle([made.entry(made.key(made.CUTLASS), tactic)]) for tactic in range(17)]
    ids = [row.bundle_id for row in add_bundles(tmp_path, "made", bundles)]
    digit = next(digit for digit in "0123456789abcdef" if sum(name.startswith(digit) for name in ids) > 1)
    several = sum(name.startswith(digit) for name in ids)

    with pytest.raises(UsageError) as caught:
        find((str(tmp_path),), like=f"{FOLDER}/{digit}")
    assert str(caught.value) == f"{digit} is the start of {several} bundles of {FOLDER}; give more of its digits"


def test_like_needs_a_registry_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"is not a registry: it has no registry\.json"):
        find((str(tmp_path),), like=FOLDER)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"device": "NVIDIA H200", "gpu_index": 0},
            "--gpu contradicts the GPU that is named; leave --gpu out, or the name",
            id="--device and --gpu",
        ),
        pytest.param(
            {"facts": {"gpu": "NVIDIA H200"}, "gpu_index": 0},
            "--gpu contradicts the GPU that is named; leave --gpu out, or the name",
            id="--fact gpu and --gpu",
        ),
        pytest.param(
            {"device": "NVIDIA H200", "facts": {"gpu": "NVIDIA H200"}},
            "--device and --fact gpu= both name the GPU; leave one of them out",
            id="--device and --fact gpu",
        ),
        pytest.param(
            {"environment_file": Path("facts.json"), "gpu_index": 0},
            "--gpu picks a GPU of this machine; leave it out with --environment and --like",
            id="--environment and --gpu",
        ),
        pytest.param(
            {"like": FOLDER, "gpu_index": 0},
            "--gpu picks a GPU of this machine; leave it out with --environment and --like",
            id="--like and --gpu",
        ),
        pytest.param(
            {"environment_file": Path("facts.json"), "like": FOLDER},
            "--environment and --like contradict each other; bring the facts by one of them",
            id="--environment and --like",
        ),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"facts": {"driver": "580.1"}},
            "'driver' is not a fact; the facts are flashinfer_version, cuda_version, cublas_version, cudnn_version, "
            "cudnn_frontend_version, cutlass_dsl_version, gpu",
            id="an unknown fact",
        ),
        pytest.param(
            {"facts": {"cudnn_version": "*"}},
            "cudnn_version is the wildcard '*'; give the fact as FlashInfer prints it",
            id="a wildcard",
        ),
        pytest.param(
            {"facts": {"cudnn_version": "9\n1"}},
            "cudnn_version is not a fact: '9\\n1'; give the fact as FlashInfer prints it",
            id="two lines",
        ),
        pytest.param(
            {"device": ""},
            "'' is not a GPU name; give the name as torch.cuda.get_device_name() or nvidia-smi -L prints it",
            id="an empty name",
        ),
        pytest.param(
            {"device": "NVIDIA\x1b[31m"},
            "'NVIDIA\\x1b[31m' is not a GPU name; "
            "give the name as torch.cuda.get_device_name() or nvidia-smi -L prints it",
            id="a name that drives the terminal",
        ),
    ],
)
def test_facts_that_are_none(facts_file: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(environment_file=facts_file, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "version",
    ["0.7.4", "0.7.4+cu130", "0.7.5.dev20261201", "0.7.2.post1", "0.8.0rc1"],
)
def test_a_version_is_kept_as_it_is(facts_file: Path, version: str) -> None:
    target = find(environment_file=facts_file, facts={"flashinfer_version": version})
    assert target.environment.flashinfer_version == version
    target.require_folder()


@pytest.mark.parametrize("value", ["unknown", "None", "0.0.0+unknown", " "])
def test_what_flashinfer_calls_undetermined_is_undetermined(facts_file: Path, value: str) -> None:
    target = find(environment_file=facts_file, facts={"flashinfer_version": value})
    assert target.environment.flashinfer_version is None
    with pytest.raises(HardwareError) as caught:
        target.require_folder()
    assert str(caught.value) == (
        "flashinfer_version is not given; give the version with --fact flashinfer_version=0.7.4, "
        "or bring all facts with --environment FILE or --like 0.7.4/nvidia-h200"
    )


FACTS_WITH = '{{"flashinfer_version": "0.7.4", "gpu": "NVIDIA H200", "cudnn_version": {}}}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "the file is empty; ", id="empty"),
        pytest.param(b"gpu: NVIDIA H200", "not a JSON document (", id="not JSON"),
        pytest.param(b'{"gpu": "NVIDIA', "not a JSON document (", id="truncated"),
        pytest.param(b'{"gpu": "NVIDIA H200"} {}', "not a JSON document (", id="two documents"),
        pytest.param(b'{"gpu": NaN}', "not a JSON document (", id="NaN"),
        pytest.param(b'\xef\xbb\xbf{"gpu": "NVIDIA H200"}', "starts with a byte order mark; ", id="a byte order mark"),
        pytest.param(b"[" * 10_000 + b"]" * 10_000, "nested deeper than 8; ", id="nested 10,000 deep"),
        pytest.param(b'{"gpu": 99999999999999999999}', "holds an integer of more than 64 bits; ", id="a huge integer"),
        pytest.param(b" " * 65_537, "65537 bytes are more than 65536; ", id="huge"),
    ],
)
def test_a_file_that_holds_no_json(facts_file: Path, content: bytes, message: str) -> None:
    facts_file.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        find(environment_file=facts_file)
    assert str(caught.value).startswith(f"{facts_file}: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("[]", "metadata is a list, not an object; tune again", id="a list"),
        pytest.param("null", "metadata is a NoneType, not an object; tune again", id="null"),
        pytest.param("{}", "names none of the facts; make it with `fi-tunecache env --json`", id="an empty object"),
        pytest.param(
            '{"environment": {}}', "names none of the facts; make it with `fi-tunecache env --json`", id="no facts"
        ),
        pytest.param(
            '{"_metadata": {"gpu": "NVIDIA H200"}}',
            "names none of the facts; make it with `fi-tunecache env --json`",
            id="a v1 file",
        ),
        pytest.param(FACTS_WITH.format('"*"'), "cudnn_version is the wildcard '*'; ", id="a wildcard"),
        pytest.param(FACTS_WITH.format(91900), "cudnn_version is a int, not a string; tune again", id="a number"),
        pytest.param(FACTS_WITH.format("[]"), "cudnn_version is a list, not a string; tune again", id="a list as fact"),
        pytest.param(
            FACTS_WITH.format(f'"{"9" * 5000}"'), "cudnn_version is not a fact: '99999999", id="a fact of 5,000 digits"
        ),
    ],
)
def test_a_file_that_holds_no_facts(facts_file: Path, content: str, message: str) -> None:
    facts_file.write_text(content, "utf-8")
    with pytest.raises(FormatError) as caught:
        find(environment_file=facts_file)
    assert str(caught.value).startswith(f"{facts_file}: {message}")


@pytest.mark.parametrize("value", ["null", '"unknown"', '"None"', '"0.0.0+unknown"', '""'])
def test_a_fact_of_a_file_may_be_undetermined(facts_file: Path, value: str) -> None:
    facts_file.write_text(FACTS_WITH.format(value), "utf-8")
    target = find(environment_file=facts_file)
    assert target.environment == Environment(flashinfer_version="0.7.4", gpu="NVIDIA H200")
    assert target.reason("cudnn_version") == "not given"


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(UsageError) as caught:
            find(environment_file=path)
        assert str(caught.value) == f"{path} can't be read ({reason}); make it with `fi-tunecache env --json`"


@given(environments)
def test_a_saved_environment_is_read_back(tmp_path_factory: pytest.TempPathFactory, environment: Environment) -> None:
    path = tmp_path_factory.getbasetemp() / "saved.json"
    path.write_text(json.dumps({"environment": environment_builtins(environment), "origin": "here"}), "utf-8")
    assert find(environment_file=path).environment == environment


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in front of this Python's path, and no GPU that is visible."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU, as NVML would list it."""
    monkeypatch.setattr("fi_tunecache.probe.read_installed_gpus", lambda: (InstalledGpu(0, "GPU-0", "NVIDIA H200"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_software_is_found_and_the_gpu_named(machine: Path) -> None:
    add_flashinfer(machine, "0.7.4")
    target = find(device="NVIDIA H200", probe="light")

    assert (target.environment.flashinfer_version, target.environment.gpu) == ("0.7.4", "NVIDIA H200")
    assert target.origin == "of this machine, with gpu as given"
    assert target.described
    assert "gpu" not in dict(target.undetermined)


def test_what_is_found_is_not_described(machine: Path) -> None:
    target = find(probe="light")
    assert (target.origin, target.described) == ("of this machine", False)


def test_without_a_gpu_the_ways_to_name_one_are_told(machine: Path) -> None:
    add_flashinfer(machine, "0.7.4")
    with pytest.raises(HardwareError) as caught:
        find().require_folder()
    assert caught.value.problem.startswith(("no GPU was found: ", "CUDA_VISIBLE_DEVICES='' shows none of "))
    assert caught.value.next_step == (
        "name the GPU with --device 'NVIDIA H200', "
        "or bring all facts with --environment FILE or --like 0.7.4/nvidia-h200"
    )


def test_without_gpu_and_flashinfer_both_are_told() -> None:
    reasons = (("gpu", "no GPU was found: no driver; name one"), ("flashinfer_version", "no FlashInfer; install it"))
    target = Target(Environment(), "of this machine", described=False, undetermined=reasons)
    with pytest.raises(HardwareError) as caught:
        target.require_folder()
    assert str(caught.value) == (
        "no GPU was found: no driver, and no FlashInfer; name the GPU with --device 'NVIDIA H200' and give the version "
        "with --fact flashinfer_version=0.7.4, or bring all facts with --environment FILE or --like 0.7.4/nvidia-h200"
    )


def test_a_gpu_that_is_not_there(machine: Path) -> None:
    with pytest.raises(HardwareError, match=r"no GPU was found|there is no GPU 99"):
        find(gpu_index=99)


def test_flashinfer_itself_is_asked_for_what_the_light_probe_lacks(machine: Path, gpu: None) -> None:
    add_unknown_flashinfer(machine, f"def _collect_metadata(): return {made.H200.metadata()}")
    said: list[str] = []
    target = find_target(TargetOptions(facts={"cuda_version": "13.1"}), (), said.append)

    assert target.environment == made.H200.with_facts({"cuda_version": "13.1"})
    assert target.undetermined == ()
    (line,) = said
    assert line.startswith("the light probe does not know ")
    assert line.endswith("; asking FlashInfer itself (--probe light prevents it)")
    assert "flashinfer_version" in line
    assert "cuda_version" not in line


@pytest.mark.parametrize("error", ["ImportError", "SystemExit"])
def test_where_it_can_not_tell_either_the_light_probe_stands(machine: Path, gpu: None, error: str) -> None:
    add_unknown_flashinfer(machine, f"raise {error}('no CUDA here')")
    said: list[str] = []
    target = find_target(TargetOptions(), (), said.append)

    assert target.environment.gpu == "NVIDIA H200"
    assert "flashinfer_version" in dict(target.undetermined)
    assert said[1] == (f"FlashInfer can't be imported: {error}: no CUDA here; going on with what the light probe knows")


def test_it_is_not_asked_where_only_light_is_allowed(machine: Path, gpu: None) -> None:
    add_unknown_flashinfer(machine, "raise SystemExit('it was imported')")
    assert find(probe="light").environment.gpu == "NVIDIA H200"


@pytest.mark.parametrize("probe", ["auto", "full"])
def test_what_flashinfer_prints_is_not_our_output(
    machine: Path, gpu: None, capsys: pytest.CaptureFixture[str], probe: str
) -> None:
    tell = f"print('hello'); _collect_metadata = lambda: (print('there'), {made.H200.metadata()})[1]"
    add_unknown_flashinfer(machine, tell)
    target = find_target(TargetOptions(probe=probe), (), lambda _: None)
    assert target.environment == made.H200
    assert capsys.readouterr() == ("", "hello\nthere\n")
