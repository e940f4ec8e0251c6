"""Bad input to the command line: registries and files that are not what they claim to be, each with its line."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made
import msgspec
import pytest
from command_line import LIKE, CommandLine, only_line

from fi_tunecache.publish.directory import add_bundles

FOLDER = "0.7.4/nvidia-h200"


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    root = tmp_path / "registry"
    add_bundles(root, "made", [made.bundle([made.entry(made.key(made.CUTLASS))])])
    return root


def change_row(**fields: object) -> Callable[[Path], None]:
    """Writes other fields into the one row of the manifest."""

    def change(root: Path) -> None:
        path = root / FOLDER / "manifest.json"
        document = msgspec.json.decode(path.read_bytes())
        document["bundles"][0].update(fields)
        path.write_bytes(msgspec.json.encode(document))

    return change


def bundle_path(root: Path) -> Path:
    (path,) = (root / FOLDER).glob("????????????????.json")
    return path


def other_bytes(root: Path) -> None:
    data = bundle_path(root).read_bytes()
    bundle_path(root).write_bytes(data.replace(b"2026-12-01", b"2026-12-02"))


def longer(root: Path) -> None:
    bundle_path(root).write_bytes(bundle_path(root).read_bytes() + b" ")


def link_out(root: Path) -> None:
    outside = root.parent / "outside.json"
    shutil.move(bundle_path(root), outside)
    (root / FOLDER / f"{_row(root)['file']}").symlink_to(outside)


def _row(root: Path) -> Any:
    return msgspec.json.decode((root / FOLDER / "manifest.json").read_bytes())["bundles"][0]


def folder_link_out(root: Path) -> None:
    shutil.move(root / FOLDER, root.parent / "outside")
    (root / FOLDER).symlink_to(root.parent / "outside")


def pipe(root: Path) -> None:
    path = bundle_path(root)
    path.unlink()
    os.mkfifo(path)


def manifest_text(text: str) -> Callable[[Path], object]:
    return lambda root: (root / FOLDER / "manifest.json").write_text(text, "utf-8")


def huge_manifest(root: Path) -> None:
    os.truncate(root / FOLDER / "manifest.json", 200_000_000)


MANIFEST = f"{{root}}/{FOLDER}/manifest.json"
NO_FILE_NAME = "is not a bundle's file name"


@pytest.mark.parametrize(
    ("spoil", "code", "line"),
    [
        pytest.param(change_row(file="../../../etc/passwd"), 5, f"'../../../etc/passwd' {NO_FILE_NAME}", id=".."),
        pytest.param(change_row(file="/etc/passwd"), 5, f"'/etc/passwd' {NO_FILE_NAME}", id="an absolute path"),
        pytest.param(change_row(file="..\\..\\a.json"), 5, NO_FILE_NAME, id="a backslash"),
        pytest.param(change_row(file="0" * 16 + ".json\n"), 5, "one printable line", id="a newline"),
        pytest.param(change_row(file="0" * 16 + ".json"), 5, "its name is not the start of its sha256", id="a name"),
        pytest.param(change_row(size=10**12), 5, "a size of 1000000000000 bytes is not between 1 and", id="a size"),
        pytest.param(change_row(size=-1), 5, "a size of -1 bytes is not between 1 and", id="a negative size"),
        pytest.param(change_row(environment={}), 5, "names no flashinfer_version", id="no environment"),
        pytest.param(
            change_row(environment={**made.H200.metadata(), "gpu": "*"}), 5, "gpu is the wildcard '*'", id="a wildcard"
        ),
        pytest.param(
            change_row(environment={**made.H200.metadata(), "gpu": "NVIDIA H100"}),
            5,
            f"was tuned with flashinfer 0.7.4 on NVIDIA H100, not for {FOLDER}",
            id="another GPU",
        ),
        pytest.param(
            change_row(policy={"measure_mood": "good"}), 5, "measure_mood = 'good' is not known", id="a policy"
        ),
        pytest.param(other_bytes, 5, "the manifest says", id="another hash"),
        pytest.param(longer, 5, "has more than", id="another size"),
        pytest.param(link_out, 5, "leads out of the registry; remove the link", id="a link that leaves the tree"),
        pytest.param(folder_link_out, 5, "leads out of the registry; remove the link", id="a folder that leaves it"),
        pytest.param(pipe, 4, "is not a file; tell the registry's owner", id="a pipe"),
        pytest.param(lambda root: bundle_path(root).unlink(), 5, "it is missing; tell the publisher", id="missing"),
        pytest.param(manifest_text(""), 5, f"{MANIFEST}: the file is empty", id="an empty manifest"),
        pytest.param(manifest_text("{} {}"), 5, f"{MANIFEST}: not a JSON document", id="two documents"),
        pytest.param(manifest_text("[" * 99), 5, f"{MANIFEST}: not a JSON document", id="deep and truncated"),
        pytest.param(manifest_text("[" * 99 + "]" * 99), 5, f"{MANIFEST}: nested deeper than 8", id="deep"),
        pytest.param(manifest_text('{"format":1,"bundles":{}}'), 5, f"{MANIFEST}: not a manifest", id="no list"),
        pytest.param(
            manifest_text('{"format":2,"rows":[]}'),
            5,
            f"{MANIFEST}: registry format 2 is newer than 1; upgrade fi-tunecache",
            id="a newer format",
        ),
        pytest.param(
            change_row(entries={"bf16_gemm": {made.CUTLASS: 2}}),
            5,
            "the manifest is wrong about its entries",
            id="counts",
        ),
        pytest.param(huge_manifest, 5, f"{FOLDER}/manifest.json has more than 16777216 bytes", id="200 MB"),
    ],
)
def test_a_registry_that_is_hostile(
    command_line: CommandLine, registry: Path, spoil: Callable[[Path], object], code: int, line: str
) -> None:
    Path("facts.json").write_bytes(msgspec.json.encode(made.H200.metadata()))
    spoil(registry)
    for command in ("pull", "resolve"):
        found = command_line.fault(code, command, "--environment", "facts.json", "--registry", str(registry))
        assert line.format(root=registry) in found
        assert "; " in found, "there is a next step"
    assert command_line("verify", registry).code == 5
    assert not (command_line.cache / "bundles").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param(
            '{"format":2,"title":"made"}',
            "registry format 2 is newer than 1; upgrade fi-tunecache",
            id="a newer format",
        ),
        pytest.param("me", "not a JSON document", id="no document"),
    ],
)
def test_a_descriptor_that_is_hostile(command_line: CommandLine, registry: Path, text: str, line: str) -> None:
    """It is for who lists a registry; pull and resolve go by the manifests alone."""
    (registry / "registry.json").write_text(text, "utf-8")
    assert f"{registry}/registry.json: {line}" in command_line.fault(5, "list", "--registry", registry)
    assert command_line("verify", registry).code == 5
    assert command_line("pull", *LIKE, "--registry", registry).code == 0


def test_a_bundle_of_a_newer_format(command_line: CommandLine, registry: Path) -> None:
    data = bundle_path(registry).read_bytes().replace(b'"format":1', b'"format":2', 1)
    sha256 = hashlib.sha256(data).hexdigest()
    bundle_path(registry).write_bytes(data)
    bundle_path(registry).rename(registry / FOLDER / f"{sha256[:16]}.json")
    change_row(file=f"{sha256[:16]}.json", sha256=sha256, size=len(data))(registry)
    line = command_line.fault(5, "pull", *LIKE, "--registry", registry)
    assert line.endswith(f"{sha256[:16]}.json: bundle format 2 is newer than 1; upgrade fi-tunecache")


GOOD = b"""{"('op', 'Runner', ((1,),), ())": ["Runner", 1]}"""


@pytest.mark.parametrize(
    ("content", "line"),
    [
        pytest.param(b"", "the file is empty; remove it; whatever wrote it did not finish", id="empty"),
        pytest.param(GOOD + GOOD, "not a JSON document (", id="two documents"),
        pytest.param(GOOD[:-1], "not a JSON document (", id="truncated"),
        pytest.param(b"\xef\xbb\xbf" + GOOD, "starts with a byte order mark; save it as UTF-8 without one", id="BOM"),
        pytest.param(b"[1]", "a JSON list, not an object of entries; name a v1 cache file", id="not a dict"),
        pytest.param(GOOD.replace(b" 1]", b" NaN]"), "not a JSON document (", id="NaN"),
        pytest.param(
            GOOD.replace(b" 1]", b" 1" + b"0" * 40 + b"]"), "an integer of more than 64 bits", id="huge integer"
        ),
        pytest.param(
            GOOD.replace(b" 1]", b" " + b"[" * 100 + b"]" * 100 + b"]"),
            "nested deeper than 18; ",
            id="100-deep nesting",
        ),
        pytest.param(b'{"_metadata": "gpu"}', "_metadata is a str, not an object; ", id="metadata is no dict"),
    ],
)
def test_a_v1_file_that_can_not_be_read(command_line: CommandLine, content: bytes, line: str) -> None:
    Path("tuned.json").write_bytes(content)
    found = command_line.fault(5, "inspect", "tuned.json")
    assert line in found
    done = command_line("verify", "tuned.json")
    assert (done.code, done.err) == (5, "")
    assert done.out.splitlines() == [f"problem: {found}", "tuned.json: 1 file checked, 1 problem"]


def test_a_v1_file_of_200_mb(command_line: CommandLine) -> None:
    Path("tuned.json").touch()
    os.truncate("tuned.json", 200_000_000)
    assert command_line.fault(5, "inspect", "tuned.json") == (
        "tuned.json: 200000000 bytes are more than 67108864; check what wrote it"
    )


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        pytest.param(None, "no _metadata: FlashInfer accepts the file blindly, on any GPU and any version", id="none"),
        pytest.param({"gpu": "*"}, "gpu is the wildcard '*'; tune again; a wildcard says nothing", id="*"),
        pytest.param(
            {**made.H200.metadata(), "gpu": "unknown"},
            "gpu not known: FlashInfer ignores the file and replaces it at its next save",
            id="unknown",
        ),
        pytest.param(
            {name: value for name, value in made.H200.metadata().items() if name != "cudnn_version"},
            "cudnn_version not known: FlashInfer ignores the file and replaces it at its next save",
            id="missing",
        ),
    ],
)
def test_metadata_that_nobody_should_trust(
    command_line: CommandLine, metadata: dict[str, str] | None, problem: str
) -> None:
    document = msgspec.json.decode(GOOD)
    if metadata is not None:
        document["_metadata"] = metadata
    Path("tuned.json").write_bytes(msgspec.json.encode(document))
    assert f"  problem: {problem}\n" in command_line.output("inspect", "tuned.json")
    done = command_line("verify", "tuned.json")
    assert (done.code, done.out.splitlines()[0]) == (5, f"problem: {problem}")


def test_a_text_that_drives_a_terminal(command_line: CommandLine, registry: Path) -> None:
    change_row(yanked={"reason": "\x1b[2Jgone", "date": "2026-12-01"})(registry)
    line = command_line.fault(5, "list", "--registry", registry)
    assert "holds a text that is not one printable line" in line


def test_a_registry_may_lie_in_a_folder_with_other_things(command_line: CommandLine, registry: Path) -> None:
    for name in ("No Version", ".git", "0.7.4"):
        (registry / name / "Some Device").mkdir(parents=True, exist_ok=True)
        (registry / name / "Some Device" / "manifest.json").write_text("{")
    assert len(command_line.json("list", "--registry", registry)["bundles"]) == 1


def test_a_device_file_is_no_registry(command_line: CommandLine) -> None:
    done = command_line("list", "--registry", "/dev/null")
    assert done.code == 4
    assert only_line(done.err) == "/dev/null is not a registry: it has no registry.json; check the path"
