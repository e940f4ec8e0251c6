"""``fi-tunecache resolve``: what would be chosen, every candidate with its reason, and nothing stored."""

from __future__ import annotations

import json
from pathlib import Path

import made
import pytest
from command_line import LIKE, CommandLine, only_line, snapshot
from msgspec import structs

from fi_tunecache.environment import FACTS, Environment
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import Manifest, Yank, read_manifest, write_manifest
from fi_tunecache.measurement_policy import MeasurementPolicy
from fi_tunecache.publish.directory import add_bundles

FOLDER = "0.7.4/nvidia-h200"


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """A bundle with two CUTLASS entries and a cuDNN entry, and one that was measured eagerly."""
    root = tmp_path / "registry"
    entries = [
        made.entry(made.key(made.CUTLASS, 1), 3),
        made.entry(made.key(made.CUTLASS, 2), -1),
        made.entry(made.key(made.CUDNN, 4), (0, ())),
    ]
    eager = MeasurementPolicy.from_execution_mode("eager")
    add_bundles(root, "made", [made.bundle(entries), made.bundle(entries[:1], policy=eager)])
    return root


@pytest.fixture
def arguments(registry: Path) -> list[str]:
    facts = registry.parent / "facts.json"
    facts.write_text(json.dumps(made.H200.metadata()), "utf-8")
    return ["resolve", "--environment", str(facts), "--registry", str(registry)]


def bundle_ids(registry: Path) -> list[str]:
    return [row.bundle_id for row in _rows(registry)]


def _rows(registry: Path) -> tuple[made.BundleRow, ...]:
    return read_manifest((registry / FOLDER / "manifest.json").read_bytes(), Folder.parse(FOLDER)).bundles


def test_what_is_printed(command_line: CommandLine, arguments: list[str], registry: Path) -> None:
    default, eager = bundle_ids(registry)
    before = snapshot(command_line.folder)
    assert command_line.output(*arguments).splitlines() == [
        f"NVIDIA H200, flashinfer 0.7.4 (from {registry.parent}/facts.json)",
        "3 entries of 1 bundle at match level exact, policy default",
        f"  bundle {default}: 3 of 3 entries",
        f"  bundle {eager}: rejected: measurement policy: registry eager, asked for default: 1 entry lost",
        "--match compatible would give the same number of entries.",
    ]
    assert snapshot(command_line.folder) == before
    assert not command_line.cache.exists()


def test_a_machine_that_differs_in_one_fact(command_line: CommandLine, arguments: list[str], registry: Path) -> None:
    """The fact, the entries lost, the nearest bundle, and what the other match level would give."""
    default, eager = bundle_ids(registry)
    done = command_line(*arguments, "--fact", "cudnn_version=92400")

    assert done.code == 3
    assert done.out.splitlines()[1:] == [
        "0 entries of 0 bundles at match level exact, policy default",
        f"  bundle {default}: rejected: cudnn_version: registry 91900, here 92400: 3 entries lost",
        f"  bundle {eager}: rejected: measurement policy: registry eager, asked for default: 1 entry lost",
        f"Nearest bundle not used: {default} (cudnn_version: registry 91900, here 92400)",
        "--match compatible would give 2 entries of 1 bundle.",
    ]
    assert only_line(done.err) == (
        f"nothing in {registry} fits NVIDIA H200, flashinfer 0.7.4 at match level exact "
        f"(nearest: bundle {default}: cudnn_version); --match compatible would give 2 entries"
    )


def test_the_same_at_level_compatible(command_line: CommandLine, arguments: list[str], registry: Path) -> None:
    default, _ = bundle_ids(registry)
    out = command_line.output(*arguments, "--fact", "cudnn_version=92400", "--match", "compatible")
    assert out.splitlines()[1:4] == [
        "2 entries of 1 bundle at match level compatible, policy default",
        f"  bundle {default}: 2 of 3 entries (differs in cudnn_version: registry 91900, here 92400)",
        f"    cudnn_version: registry 91900, here 92400: 1 entry of {made.CUDNN} dropped",
    ]
    assert out.splitlines()[-1] == "--match exact would give nothing."


@pytest.mark.parametrize("fact", [fact for fact in FACTS if fact not in ("gpu", "flashinfer_version")])
def test_each_fact_is_named_where_it_differs(command_line: CommandLine, arguments: list[str], fact: str) -> None:
    done = command_line(*arguments, "--fact", f"{fact}=0.1")
    assert done.code == 3
    assert f"{fact}: registry " in done.out
    assert f": {fact})" in only_line(done.err)


def test_a_fact_that_is_unknown_is_to_be_given(command_line: CommandLine, arguments: list[str]) -> None:
    done = command_line(*arguments, "--fact", "cublas_version=unknown", "--match", "exact")
    assert done.code == 3
    assert "cublas_version: registry 13.1.0, here unknown" in done.out


LOOK_ALIKES = [
    pytest.param("NVIDIA H200", "NVIDIA H200 NVL", id="H200 NVL"),
    pytest.param("NVIDIA H200 NVL", "NVIDIA H200", id="H200"),
    pytest.param("NVIDIA H200", "nvidia h200", id="lower case"),
    pytest.param("NVIDIA H200", "NVIDIA-H200", id="one slug, another name"),
    pytest.param("NVIDIA RTX A4000", "NVIDIA A40", id="A40"),
    pytest.param("NVIDIA A40", "NVIDIA RTX A4000", id="RTX A4000"),
    pytest.param("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 D", id="RTX 4090 D"),
    pytest.param("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090", id="RTX 4090"),
    pytest.param("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", id="a MIG instance"),
    pytest.param("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3 MIG 2g.20gb", id="a larger MIG instance"),
    pytest.param("NVIDIA H200", "\N{FULLWIDTH LATIN CAPITAL LETTER N}VIDIA H200", id="a letter that looks alike"),
]


@pytest.mark.parametrize("command", ["resolve", "pull"])
@pytest.mark.parametrize("level", ["exact", "compatible"])
@pytest.mark.parametrize(("tuned_on", "here"), LOOK_ALIKES)
def test_gpus_that_look_alike_never_match(
    command_line: CommandLine, tmp_path: Path, tuned_on: str, here: str, level: str, command: str
) -> None:
    root = tmp_path / "gpus"
    environment = made.H200.with_facts({"gpu": tuned_on})
    add_bundles(root, "made", [made.bundle([made.entry(made.key(made.CUTLASS))], environment=environment)])
    folder = Folder.of(environment)

    arguments = [command, "--like", str(folder), "--registry", str(root), "--match", level]
    assert command_line(*arguments).code == 0
    done = command_line(*arguments, "--device", here)
    assert done.code == 3
    assert f"fits {here}, flashinfer 0.7.4" in only_line(done.err)
    assert ": gpu)" in done.err
    if command == "resolve":
        assert f": rejected: gpu: registry {tuned_on}, here {here}: 1 entry lost\n" in done.out
        assert done.out.endswith(" would give nothing either.\n")


@pytest.mark.parametrize(
    "version", ["0.7.4+cu130", "0.7.4.dev20261201", "0.7.4.post1", "0.7.2", "0.7.4-1", "0.7.40", "v0.7.4"]
)
def test_another_version_never_matches(
    command_line: CommandLine, arguments: list[str], registry: Path, version: str
) -> None:
    done = command_line(*arguments, "--fact", f"flashinfer_version={version}", "--match", "compatible")
    assert done.code == 3
    assert f": rejected: flashinfer_version: registry 0.7.4, here {version}: 3 entries lost\n" in done.out
    line = only_line(done.err)
    assert f"flashinfer {version} at match level compatible (nearest: bundle {bundle_ids(registry)[0]}: " in line
    assert line.endswith(": flashinfer_version)")


@pytest.mark.parametrize("version", ["../0.7.4", "0.7.4/nvidia-h200", "/etc", "..", "0.7.4\\"])
def test_a_version_leads_nowhere_else(command_line: CommandLine, arguments: list[str], version: str) -> None:
    line = command_line.fault(2, *arguments, "--fact", f"flashinfer_version={version}")
    assert line == f"{version!r} can't be the folder of a FlashInfer version; write a version like 0.7.4"


def test_a_version_that_is_not_known(command_line: CommandLine, arguments: list[str]) -> None:
    assert command_line.fault(2, *arguments, "--fact", "flashinfer_version=0.0.0+unknown") == (
        "flashinfer_version is not given; give the version with --fact flashinfer_version=0.7.4, or bring all facts "
        "with --environment FILE or --like 0.7.4/nvidia-h200"
    )


def test_a_device_that_nobody_has(command_line: CommandLine, arguments: list[str], registry: Path) -> None:
    """The neighbours are shown, and the reader of all reasons is not sent to read them."""
    default, eager = bundle_ids(registry)
    done = command_line(*arguments, "--device", "Voodoo 2")
    assert done.code == 3
    assert done.out.splitlines()[1:] == [
        "0 entries of 0 bundles at match level exact, policy default",
        f"  bundle {eager}: rejected: measurement policy: registry eager, asked for default: 1 entry lost",
        f"  bundle {default}: rejected: gpu: registry NVIDIA H200, here Voodoo 2: 3 entries lost",
        f"Nearest bundle not used: {default} (gpu: registry NVIDIA H200, here Voodoo 2)",
        "--match compatible would give nothing either.",
    ]
    problem = (
        f"nothing in {registry} fits Voodoo 2, flashinfer 0.7.4 at match level exact (nearest: bundle {default}: gpu)"
    )
    assert only_line(done.err) == problem
    assert command_line.fault(3, "pull", *arguments[1:], "--device", "Voodoo 2") == (
        f"{problem}; `fi-tunecache resolve` with the same options tells why, bundle by bundle"
    )


def test_neither_the_device_nor_the_version_is_there(command_line: CommandLine, arguments: list[str]) -> None:
    done = command_line(*arguments, "--device", "Voodoo 2", "--fact", "flashinfer_version=0.7.5")
    assert done.code == 3
    assert only_line(done.err).endswith(f" at match level exact; there is {FOLDER}; see `fi-tunecache list`")
    assert done.out.splitlines()[-1] == "--match compatible would give nothing either."


@pytest.mark.parametrize(
    ("device", "hint"),
    [
        pytest.param("H200", "; did you mean 'NVIDIA H200'?", id="without NVIDIA"),
        pytest.param("nvidia h200", "; did you mean 'NVIDIA H200'?", id="in lower case"),
        pytest.param("NVIDIA H200 NVL", "", id="a longer name is another GPU"),
        pytest.param("NVIDIA H100", "", id="another one"),
    ],
)
def test_a_name_that_contains_another_is_hinted_at_and_does_not_match(
    command_line: CommandLine, arguments: list[str], device: str, hint: str
) -> None:
    done = command_line(*arguments, "--device", device, "--match", "compatible")
    assert done.code == 3
    assert only_line(done.err).partition(": gpu)")[2] == hint
    tells_why = "`fi-tunecache resolve` with the same options tells why, bundle by bundle"
    line = command_line.fault(3, "pull", *arguments[1:], "--device", device, "--match", "compatible")
    assert line.partition(": gpu)")[2] == (f"{hint} {tells_why}" if hint else f"; {tells_why}")


@pytest.mark.parametrize("command", ["resolve", "pull"])
def test_all_facts_that_are_unknown_are_to_be_given(command_line: CommandLine, tmp_path: Path, command: str) -> None:
    add_bundles(tmp_path / "cudnn", "made", [made.bundle([made.entry(made.key(made.CUDNN), (0, ()))])])
    unknown = ["--fact", "cudnn_version=unknown", "--fact", "cublas_version=unknown"]
    done = command_line(command, *LIKE, "--registry", str(tmp_path / "cudnn"), *unknown)
    assert done.code == 3
    assert only_line(done.err).endswith(
        "; what is unknown matches nothing: give it with --fact cublas_version=VALUE --fact cudnn_version=VALUE"
    )


def test_a_difference_that_may_cost_speed_is_told(command_line: CommandLine, arguments: list[str]) -> None:
    other = [*arguments, "--match", "compatible", "--fact", "cudnn_frontend_version=1.31.0"]
    assert (
        command_line.output(*other)
        .splitlines()[2]
        .endswith(
            ": 3 of 3 entries (differs in cudnn_frontend_version: registry 1.32.0, here 1.31.0; "
            "cudnn_frontend_version may cost speed)"
        )
    )
    document = command_line.json(*other)
    assert [row["may_cost_speed"] for row in document["bundles"]] == [["cudnn_frontend_version"], []]


def test_a_choice_that_would_be_left_over_is_told(command_line: CommandLine, tmp_path: Path) -> None:
    entries = [
        made.entry(made.key(made.CUDNN), (0, ())),
        made.entry(made.key(made.TINY)),
        made.entry(made.key(made.CUTLASS, 2)),
    ]
    lookups = [made.lookup([made.CUDNN], made.CUDNN), made.lookup([made.TINY], made.TINY)]
    add_bundles(tmp_path / "left", "made", [made.bundle(entries, lookups)])
    out = command_line.output(
        "resolve", *LIKE, "--registry", tmp_path / "left", "--match", "compatible", "--fact", "cudnn_version=92400"
    )
    assert out.splitlines()[3:5] == [
        f"    cudnn_version: registry 91900, here 92400: 1 entry of {made.CUDNN} dropped",
        "    one more choice is not left over at a shape where its rivals are dropped: "
        f"1 entry of {made.TINY} dropped (rivals: {made.CUDNN})",
    ]


def test_a_yanked_bundle_is_told_and_not_used(command_line: CommandLine, arguments: list[str], registry: Path) -> None:
    rows = [structs.replace(row, yanked=Yank("wrong clocks", "2026-12-04")) for row in _rows(registry)]
    (registry / FOLDER / "manifest.json").write_bytes(write_manifest(Manifest(tuple(rows))))
    done = command_line(*arguments)
    assert done.code == 3
    assert done.out.count("rejected: yanked on 2026-12-04: wrong clocks: ") == 2


def test_a_damaged_bundle_in_the_cache_is_told(command_line: CommandLine, arguments: list[str]) -> None:
    command_line.output("pull", *arguments[1:])
    (bundle,) = (command_line.cache / "bundles").iterdir()
    bundle.chmod(0o644)
    bundle.write_bytes(b"")
    done = command_line(*arguments)
    assert done.code == 0
    assert only_line(done.err) == (
        f"{bundle} was damaged (its sha256 is not its name); it is set aside as {bundle.name}.corrupt"
    )


def test_several_registries_in_order(command_line: CommandLine, arguments: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    add_bundles(other, "other", [made.bundle([made.entry(made.key(made.CUTLASS, 1), 7)])])
    document = command_line.json(*arguments, "--registry", other)
    assert document["registries"] == [arguments[-1], str(other)]
    assert {row["registry"]: row["taken"] for row in document["bundles"] if row["taken"]} == {arguments[-1]: 3}
    document = command_line.json(*arguments[:3], "--registry", other, *arguments[3:])
    assert {row["registry"]: row["taken"] for row in document["bundles"] if row["taken"]} == {
        str(other): 1,
        arguments[-1]: 2,
    }


def test_a_registry_that_fits_nothing_in_json(command_line: CommandLine, arguments: list[str], registry: Path) -> None:
    document = command_line.json(*arguments, "--fact", "cuda_version=12.9", code=3)
    assert document["entries"] == 0
    assert document["nearest"] == bundle_ids(registry)[0]
    assert document["other_match"] == {"match": "compatible", "entries": 3, "bundles": 1}


def test_the_embedded_registry_by_default(command_line: CommandLine) -> None:
    document = command_line.json("resolve", *LIKE)
    assert document["registries"] == ["embedded"]
    assert document["entries"] > 0
    assert Environment.from_metadata(document["environment"]).gpu == "NVIDIA H200"
