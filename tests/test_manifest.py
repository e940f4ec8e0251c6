"""The manifest and the registry descriptor: read and written without loss, and what hostile ones are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import made
import msgspec
import pytest
from bundle_strategies import bundles, texts, yanks
from hypothesis import given
from hypothesis import strategies as st

from fi_tunecache.bundle import Bundle, Provenance, Workload, write_bundle
from fi_tunecache.environment import Environment
from fi_tunecache.errors import FormatError
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import (
    BundleRow,
    Manifest,
    RegistryDescriptor,
    Yank,
    describe_bundle,
    read_descriptor,
    read_manifest,
    write_descriptor,
    write_manifest,
)
from fi_tunecache.measurement_policy import MeasurementPolicy
from fi_tunecache.registry_tree import MAX_BUNDLE_BYTES, MAX_MANIFEST_BYTES

H200 = Folder("0.7.4", "nvidia-h200")


def row_of(bundle: Bundle, benefit: dict[str, float] | None = None) -> BundleRow:
    data, sha256 = write_bundle(bundle)
    return describe_bundle(bundle, data, sha256, benefit)


def bundle_of(m: int) -> Bundle:
    return made.bundle([made.entry(made.key(made.CUDNN, m))])


ROW = row_of(bundle_of(1))
MANIFEST = Manifest((ROW, row_of(bundle_of(2))))


def changed(change: Callable[[dict[str, Any], list[dict[str, Any]]], object]) -> bytes:
    """A manifest of two rows after a change of the document or of its rows."""
    document = json.loads(write_manifest(MANIFEST))
    change(document, document["bundles"])
    return json.dumps(document).encode()


# --- reading and writing


def test_what_a_row_says() -> None:
    entries = [made.entry(made.key(runner, m)) for runner in (made.CUDNN, made.TINY) for m in (1, 2)]
    entries.append(made.entry(made.key(made.CUDNN, op="bmm_bf16")))
    bundle = Bundle(
        environment=made.H200,
        entries={entry.key.text: entry for entry in entries},
        provenance=Provenance(created="2026-12-01", tuning_seconds=58.8, workload=Workload(model="m")),
        policy=MeasurementPolicy.from_execution_mode("eager"),
        lookups=(made.lookup([made.CUDNN, made.TINY], made.TINY),),
        default_raced=True,
    )
    data, sha256 = write_bundle(bundle)
    row = describe_bundle(bundle, data, sha256, {"bf16_gemm": 0.99})

    assert row == BundleRow(
        file=f"{sha256[:16]}.json",
        sha256=sha256,
        size=len(data),
        created="2026-12-01",
        environment=made.H200.metadata(),
        entries={"bf16_gemm": {made.CUDNN: 2, made.TINY: 2}, "bmm_bf16": {made.CUDNN: 1}},
        policy={"measure_execution_mode": "eager"},
        lookups=1,
        default_raced=True,
        tuning_seconds=58.8,
        benefit={"bf16_gemm": 0.99},
        workload=Workload(model="m"),
    )
    assert row.bundle_id == sha256[:16]
    assert row.tuned_in == made.H200
    assert row.measured_under == bundle.policy
    assert row.entry_count == 5


def test_a_manifest_comes_back_as_it_was() -> None:
    yanked = msgspec.structs.replace(ROW, yanked=Yank("slower than the default", "2026-12-02"))
    manifest = Manifest((MANIFEST.bundles[1], yanked))

    assert read_manifest(write_manifest(manifest), H200) == manifest
    assert [row.bundle_id for row in read_manifest(write_manifest(manifest), H200).bundles] == [
        MANIFEST.bundles[1].bundle_id,
        ROW.bundle_id,
    ]


def test_no_bundles() -> None:
    assert read_manifest(b'{"format": 1}', H200) == Manifest()
    assert read_manifest(write_manifest(Manifest()), H200) == Manifest()


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Rows of one folder, some of them yanked, some measured."""
    found = {}
    for bundle in draw(st.lists(bundles(), max_size=3)):
        metadata = {**bundle.environment.metadata(), "flashinfer_version": "0.7.4", "gpu": "NVIDIA H200"}
        moved = msgspec.structs.replace(bundle, environment=Environment.from_metadata(metadata))
        ratio = st.floats(0.001, 1000)
        row = row_of(moved, draw(st.dictionaries(texts, ratio, max_size=2)))
        found[row.file] = msgspec.structs.replace(row, yanked=draw(st.none() | yanks))
    return Manifest(tuple(found.values()))


@given(manifests())
def test_reading_is_the_inverse_of_writing(manifest: Manifest) -> None:
    data = write_manifest(manifest)
    again = read_manifest(data, H200)

    assert again == manifest
    assert write_manifest(again) == data


def test_a_manifest_is_indented_text() -> None:
    lines = write_manifest(Manifest((ROW,))).decode().splitlines()

    assert lines[:4] == ["{", ' "bundles": [', "  {", '   "created": "2026-12-01",']
    assert lines[-1] == "}"
    assert write_manifest(Manifest((ROW,))).endswith(b"}\n")


def test_fields_that_are_not_known_are_passed_over() -> None:
    data = changed(lambda d, rows: (d.update(maintainer="m" * 4096), rows[0].update(stars=5)))

    assert read_manifest(data, H200) == MANIFEST


# --- hostile rows


def renamed(rows: list[dict[str, Any]], file: str) -> None:
    rows[0]["file"] = file


WRONG_NAMES = [
    pytest.param("../../../etc/passwd", id="leads up"),
    pytest.param("/etc/passwd", id="absolute"),
    pytest.param("..\\..\\secret.json", id="backslashes"),
    pytest.param("C:\\secret.json", id="drive"),
    pytest.param("sub/0123456789abcdef.json", id="sub-folder"),
    pytest.param(f"./{ROW.file}", id="dot"),
    pytest.param(f"{ROW.file}/../x", id="leads up from the file"),
    pytest.param(ROW.file.upper(), id="capitals"),
    pytest.param(ROW.file[1:], id="too short"),
    pytest.param(f"0{ROW.file}", id="too long"),
    pytest.param(f"{ROW.sha256}.json", id="whole hash"),
    pytest.param(f"{ROW.file}.gz", id="another suffix"),
    pytest.param(f"{ROW.file} ", id="space at the end"),
    pytest.param(f"{ROW.bundle_id}%2e.json", id="percent encoding"),
    pytest.param("\u0660" + ROW.file[1:], id="other digits"),
    pytest.param("", id="empty"),
    pytest.param("manifest.json", id="the manifest itself"),
    pytest.param("x" * 4000, id="4000 characters"),
]


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_a_file_name_that_is_none(name: str) -> None:
    with pytest.raises(FormatError, match=r"^m\.json: not a manifest \(.* is not a bundle's file name.*bundles\[0\]"):
        read_manifest(changed(lambda d, rows: renamed(rows, name)), H200, source="m.json")


def test_a_file_name_that_ends_in_a_newline() -> None:
    with pytest.raises(FormatError, match="not one printable line"):
        read_manifest(changed(lambda d, rows: renamed(rows, ROW.file + "\n")), H200)


REFUSED = [
    pytest.param(
        lambda d, rows: renamed(rows, "0123456789abcdef.json"),
        "0123456789abcdef.json: its name is not the start of its sha256",
        id="name of another bundle",
    ),
    pytest.param(lambda d, rows: rows[0].update(sha256="0" * 64), "its name is not the start", id="another sha256"),
    pytest.param(lambda d, rows: rows[0].update(sha256=ROW.sha256[:40]), "its name is not", id="short sha256"),
    pytest.param(lambda d, rows: rows[0].update(sha256=ROW.sha256.upper()), "its name is not", id="capitals in sha256"),
    pytest.param(lambda d, rows: rows[0].update(size=0), "a size of 0 bytes is not between 1 and", id="size 0"),
    pytest.param(lambda d, rows: rows[0].update(size=-1), "a size of -1 bytes is not between", id="negative size"),
    pytest.param(
        lambda d, rows: rows[0].update(size=MAX_BUNDLE_BYTES + 1), f"a size of {MAX_BUNDLE_BYTES + 1}", id="huge size"
    ),
    pytest.param(lambda d, rows: rows[0].update(size=2**64), "more than 64 bits", id="size beyond 64 bits"),
    pytest.param(lambda d, rows: rows[0].update(size="9"), "Expected `int`, got `str`", id="size is text"),
    pytest.param(lambda d, rows: rows[0].update(size=True), "Expected `int`, got `bool`", id="size is a bool"),
    pytest.param(lambda d, rows: rows[0].pop("sha256"), "missing required field `sha256`", id="no sha256"),
    pytest.param(lambda d, rows: rows[0].update(created="soon"), "'soon' is not a date like 2026-12-01", id="no date"),
    pytest.param(lambda d, rows: rows[0].update(created="9999-99-99"), "'9999-99-99' is not a date", id="month 99"),
    pytest.param(
        lambda d, rows: rows[0].update(yanked={"reason": "x", "date": "z"}), "'z' is not a date", id="yanked: no date"
    ),
    pytest.param(
        lambda d, rows: rows[0].update(yanked={"reason": "\x1b]0;x\x07", "date": "2026-12-01"}),
        "not one printable line",
        id="yanked: terminal escape",
    ),
    pytest.param(
        lambda d, rows: rows[0].update(entries={"op": {"R": -5}}),
        "Expected `int` >= 0",
        id="negative number of entries",
    ),
    pytest.param(lambda d, rows: rows[0].update(entries={"op": {"R": 10**9}}), "Expected `int` <=", id="a billion"),
    pytest.param(lambda d, rows: rows[0].update(entries={"op": 5}), "Expected `object`, got `int`", id="entries flat"),
    pytest.param(
        lambda d, rows: rows[0].update(entries={"op\x1b[2J": {}}),
        "not one printable line",
        id="terminal escape in an op",
    ),
    pytest.param(
        lambda d, rows: rows[0].update(entries={"op": {"R\nunner": 1}}),
        "not one printable line",
        id="newline in a runner",
    ),
    pytest.param(lambda d, rows: rows[0].update(benefit={"op": 0}), "Expected `float` > 0", id="benefit 0"),
    pytest.param(lambda d, rows: rows[0].update(lookups=-1), "Expected `int` >= 0", id="negative number of lookups"),
    pytest.param(
        lambda d, rows: rows[0].update(workload={"model": "a\u202eb"}), "not one printable line", id="text direction"
    ),
    pytest.param(lambda d, rows: rows[0].update(policy={"measure_timer": "x"}), "measure_timer = 'x'", id="policy"),
    pytest.param(lambda d, rows: d.update(format=2, bundles=5), "registry format 2 is newer than 1", id="newer format"),
    pytest.param(lambda d, rows: d.update(format=0), "Expected `int` >= 1", id="format 0"),
    pytest.param(lambda d, rows: d.update(format="1"), "Expected `int`, got `str`", id="format is text"),
    pytest.param(lambda d, rows: d.pop("format"), "missing required field `format`", id="no format"),
    pytest.param(lambda d, rows: rows.append(rows[0]), "a bundle is listed twice", id="listed twice"),
    pytest.param(lambda d, rows: d.update(bundles={}), "Expected `array`, got `object`", id="bundles are an object"),
    pytest.param(lambda d, rows: rows.insert(0, None), "Expected `object`, got `null`", id="row is null"),
    pytest.param(lambda d, rows: d.update(x="y" * 4097), "at most 4096 characters", id="long text in any field"),
    pytest.param(lambda d, rows: d.update(x=[[[[[[[[1]]]]]]]]), "nested deeper than 8", id="deep"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_manifest_is_refused(change: Callable[[dict[str, Any], list[dict[str, Any]]], object], message: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_manifest(changed(change), H200, source="m.json")

    assert str(caught.value).startswith("m.json: ")
    assert message in caught.value.problem
    assert caught.value.next_step
    assert len(str(caught.value)) < 400


def facts(**changes: str | None) -> Callable[[dict[str, Any], list[dict[str, Any]]], object]:
    def change(document: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        metadata = {**rows[0]["environment"], **changes}
        rows[0]["environment"] = {name: value for name, value in metadata.items() if value is not None}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(facts(flashinfer_version="0.7.2"), "was tuned with flashinfer 0.7.2 on NVIDIA H200", id="version"),
        pytest.param(
            facts(flashinfer_version="0.7.4+cu130"), "was tuned with flashinfer 0.7.4+cu130", id="local version"
        ),
        pytest.param(facts(gpu="NVIDIA H100"), "on NVIDIA H100, not for 0.7.4/nvidia-h200", id="device"),
        pytest.param(facts(gpu="NVIDIA H200 NVL"), "on NVIDIA H200 NVL, not for", id="a device that looks alike"),
        pytest.param(facts(flashinfer_version="../../x"), "was tuned with flashinfer ../../x", id="path for a version"),
        pytest.param(facts(gpu="N" * 200), "not for 0.7.4/nvidia-h200", id="a name that no GPU has"),
        pytest.param(facts(gpu="量子"), "on 量子, not for 0.7.4/nvidia-h200", id="a name without a slug"),
        pytest.param(facts(gpu="unknown"), "names no gpu", id="unknown device"),
        pytest.param(facts(cudnn_version=None, gpu="None"), "names no cudnn_version, gpu", id="missing facts"),
        pytest.param(facts(gpu="*"), "gpu is the wildcard '*'", id="wildcard"),
        pytest.param(facts(**{"a b": "x"}), "'a b' can't be the name of a fact", id="odd name"),
    ],
)
def test_a_row_that_does_not_belong_there(
    change: Callable[[dict[str, Any], list[dict[str, Any]]], object], message: str
) -> None:
    with pytest.raises(FormatError) as caught:
        read_manifest(changed(change), H200, source="m.json")

    assert str(caught.value).startswith(f"m.json: {ROW.file}: ")
    assert message in caught.value.problem
    assert caught.value.next_step


def test_a_device_of_the_same_slug_belongs_there() -> None:
    """The slug names a folder and nothing else; that the device is another one is for resolution to see."""
    manifest = read_manifest(changed(facts(gpu="NVIDIA-H200")), H200)

    assert [row.tuned_in.gpu for row in manifest.bundles] == ["NVIDIA-H200", "NVIDIA H200"]


def test_too_many_rows() -> None:
    row = json.loads(write_manifest(MANIFEST))["bundles"][0]
    rows = [{**row, "file": f"{n:016x}.json", "sha256": f"{n:016x}" + "0" * 48} for n in range(10_001)]
    data = json.dumps({"format": 1, "bundles": rows}).encode()

    with pytest.raises(FormatError, match="10001 bundles are more than 10000; tell the publisher"):
        read_manifest(data, H200)


DAMAGED = [
    pytest.param(b"", "the file is empty", id="empty"),
    pytest.param(b"<html>not found</html>", "not a JSON document", id="HTML"),
    pytest.param(write_manifest(MANIFEST)[:-3], "not a JSON document", id="truncated"),
    pytest.param(write_manifest(MANIFEST) * 2, "not a JSON document", id="two documents"),
    pytest.param(b"\xef\xbb\xbf" + write_manifest(MANIFEST), "byte order mark", id="byte order mark"),
    pytest.param(b'{"format": 1, "name": "\xff"}', "not a JSON document", id="not UTF-8"),
    pytest.param(b'{"format": NaN}', "not a JSON document", id="NaN"),
    pytest.param(b'{"format": 1e999}', "not a JSON document", id="infinite"),
    pytest.param(b'{"format": 1' + b"0" * 5000 + b"}", "not a JSON document", id="integer of 5001 digits"),
    pytest.param(b'{"format": 1.0}', "Expected `int`, got `float`", id="format is a float"),
    pytest.param(b"[" * 100_000 + b"]" * 100_000, "nested deeper than 8", id="100,000 deep"),
    pytest.param(b'{"format": 1, "x": ' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper than 8", id="100 deep"),
    pytest.param(b" " * (MAX_MANIFEST_BYTES + 1), f"bytes are more than {MAX_MANIFEST_BYTES}", id="too large"),
    pytest.param(b"[]", "got `array`", id="a list"),
    pytest.param(b"null", "got `null`", id="null"),
    pytest.param(b'"manifest"', "got `str`", id="a string"),
]


@pytest.mark.parametrize(("data", "message"), DAMAGED)
def test_bytes_that_are_no_manifest(data: bytes, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_manifest(data, H200)

    assert str(caught.value).startswith("0.7.4/nvidia-h200/manifest.json: ")
    assert message in caught.value.problem
    assert caught.value.next_step


# --- the descriptor


@given(texts, st.lists(texts, max_size=3).map(tuple))
def test_a_descriptor_comes_back_as_it_was(name: str, notices: tuple[str, ...]) -> None:
    descriptor = RegistryDescriptor(name, notices=notices)

    assert read_descriptor(write_descriptor(descriptor)) == descriptor


def test_a_descriptor_as_text() -> None:
    assert write_descriptor(RegistryDescriptor("ours")) == b'{\n "format": 1,\n "name": "ours",\n "notices": []\n}\n'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        *DAMAGED,
        pytest.param(b"{}", "missing required field `format`", id="no fields"),
        pytest.param(b'{"format": 1}', "missing required field `name`", id="no name"),
        pytest.param(b'{"format": 2}', "registry format 2 is newer than 1", id="newer format"),
        pytest.param(b'{"format": 1, "name": "\\u001b[2J"}', "not one printable line", id="terminal escape"),
        pytest.param(
            b'{"format": 1, "name": "x", "notices": ["\\u001b[2J"]}', "not one printable line", id="escape in a notice"
        ),
        pytest.param(b'{"format": 1, "name": 5}', "not a registry descriptor (Expected `str`", id="name is a number"),
        pytest.param(b'{"format": 1, "name": "x", "notices": "y"}', "Expected `array`", id="notices are text"),
    ],
)
def test_bytes_that_are_no_descriptor(data: bytes, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_descriptor(data, source="registry.json of x")

    assert str(caught.value).startswith("registry.json of x: ")
    assert message in caught.value.problem or "missing required field" in caught.value.problem
    assert caught.value.next_step
