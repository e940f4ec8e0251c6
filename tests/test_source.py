"""Sources: whatever holds tuning results, read into one shape, and what FlashInfer would not serve of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made
import pytest
from unprivileged import unprivileged

from fi_tunecache.bundle import MARK, write_bundle
from fi_tunecache.entry import Entry
from fi_tunecache.environment import Environment
from fi_tunecache.errors import FormatError, UsageError
from fi_tunecache.flashinfer_json import CacheFile, write_cache_file
from fi_tunecache.measurement_policy import MeasurementPolicy
from fi_tunecache.source import SourceKind, read_source

DATA = Path(__file__).parent / "data"
H200 = DATA / "h200-flashinfer-0.7.4"
STORE = H200 / "managed-store"
EMBEDDED = Path(__file__).parent.parent / "manifests"
MODULE = '''"""As FlashInfer's are."""
best_configs = {
    "('trtllm::fused_moe::gemm1', 'MoERunner', ((1, 7168), (256, 512, 7168)))": (0, 5),
    "('trtllm::fused_moe::gemm2', 'MoERunner', ((1, 512), (256, 7168, 512)))": (0, -1),
}
'''
STATEMENT = "no lookup of FlashInfer 0.6.13 or newer can hit a key without extras"

Document = dict[str, Any]


@pytest.fixture
def v1_file(tmp_path: Path) -> Callable[[Callable[[Document], object]], Path]:
    """Writes a good v1 file after something was done to it."""

    def write(spoil: Callable[[Document], object]) -> Path:
        entries = (made.entry(made.key(made.CUDNN)), made.entry(made.key(made.CUTLASS, 8), 3))
        document = json.loads(write_cache_file(CacheFile(entries, made.H200.metadata())))
        spoil(document)
        path = tmp_path / "tuned.json"
        path.write_text(json.dumps(document), "utf-8")
        return path

    return write


@pytest.mark.parametrize(("file", "entries"), [("gemm-a.v1.json", 90), ("fp8-8k.v1.json", 84)])
def test_what_flashinfer_saved(file: str, entries: int) -> None:
    source = read_source(H200 / file)

    assert (source.kind, source.problems) == (SourceKind.CACHE_FILE, ())
    (section,) = source.sections
    assert (section.name, len(section.entries), section.problems) == (file, entries, ())
    assert section.environment is not None
    assert section.environment.gpu == "NVIDIA H200"


def test_a_store_has_a_section_for_each_environment_and_policy() -> None:
    source = read_source(STORE)

    assert (source.kind, source.problems) == (SourceKind.STORE, ())
    assert {section.name: (str(section.policy), len(section.entries)) for section in source.sections} == {
        "429deefd17fea974": ("default", 90),
        "645f715d598ccd4e": ("eager", 90),
        "a27045c5dbc185b2": ("cuda_graph", 90),
    }
    assert {section.problems for section in source.sections} == {()}


def test_one_environment_of_a_store() -> None:
    (section,) = read_source(STORE / "v2" / "645f715d598ccd4e").sections
    assert section.policy == MeasurementPolicy.from_execution_mode("eager")
    assert len(section.entries) == 90


@pytest.mark.parametrize("path", sorted(EMBEDDED.glob("*/*/????????????????.json")), ids=lambda path: path.name)
def test_embedded_bundles_have_provenance_and_lookups(path: Path) -> None:
    source = read_source(path)

    assert source.kind is SourceKind.BUNDLE
    (section,) = source.sections
    assert section.provenance is not None
    assert section.provenance.created >= "2026-01-01"
    assert section.lookups
    assert section.problems == ()


def test_a_bundle_says_whether_the_default_raced(tmp_path: Path) -> None:
    path = tmp_path / "bundle.json"
    for raced in (True, False, None):
        bundle = made.bundle([made.entry(made.key(made.CUTLASS))], default_raced=raced)
        path.write_bytes(write_bundle(bundle)[0])
        assert read_source(path).sections[0].default_raced is raced


def test_a_bundled_module_can_not_hit(tmp_path: Path) -> None:
    path = tmp_path / "v0_1_trtllm_fused_moe_NVIDIA_B200.py"
    path.write_text(MODULE, "utf-8")
    source = read_source(path)

    assert source.kind is SourceKind.MODULE
    (section,) = source.sections
    assert (section.environment, section.entries, len(section.legacy)) == (None, (), 2)
    assert section.problems == (f"2 keys without extras: {STATEMENT}",)


def test_a_bundled_module_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"raise SystemExit('it was run')\n{MODULE}", "utf-8")
    assert len(read_source(path).sections[0].legacy) == 2


@pytest.mark.parametrize("mark", [{}, {"tool": "fi-tunecache 0.1.0"}, "?", []])
def test_whatever_bears_our_mark_was_pulled(v1_file: Any, mark: object) -> None:
    path = v1_file(lambda document: document["_metadata"].update({MARK: mark}))
    assert read_source(path).kind is SourceKind.PULLED


def without(*names: str) -> Callable[[Document], object]:
    return lambda document: [document["_metadata"].pop(name) for name in names]


def with_fact(name: str, value: object) -> Callable[[Document], object]:
    return lambda document: document["_metadata"].update({name: value})


def first_entry(document: Document) -> Any:
    return next(value for name, value in document.items() if made.CUDNN in name)


NO_OBJECT_PROBLEM = "no _metadata: FlashInfer accepts the file blindly, on any GPU and any version"
IGNORED = "not known: FlashInfer ignores the file and replaces it at its next save"


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        pytest.param(lambda document: document.pop("_metadata"), NO_OBJECT_PROBLEM, id="no metadata"),
        pytest.param(with_fact("gpu", "*"), "gpu is the wildcard '*'; tune again; a wildcard says nothing", id="*"),
        pytest.param(with_fact("gpu", 3), "gpu is a int, not a string; tune again", id="a number"),
        pytest.param(without("gpu"), f"gpu {IGNORED}", id="a missing fact"),
        pytest.param(with_fact("cudnn_version", "unknown"), f"cudnn_version {IGNORED}", id="unknown"),
        pytest.param(with_fact("cudnn_version", None), f"cudnn_version {IGNORED}", id="null"),
        pytest.param(without("gpu", "cuda_version"), f"cuda_version, gpu {IGNORED}", id="two missing facts"),
        pytest.param(
            lambda document: first_entry(document).__setitem__(0, made.TINY),
            f"1 entry with another runner than in the key, never served, e.g. {made.TINY} at "
            f"{made.key(made.CUDNN).text[:120]}",
            id="another runner",
        ),
        pytest.param(
            lambda document: first_entry(document).__setitem__(1, 2),
            "1 entry of cuDNN with a plan's position as tactic, dropped by FlashInfer since 0.6.16",
            id="an ordinal",
        ),
        pytest.param(
            lambda document: document.update({"('mm', 'MmRunner', ((1, 2),))": ["MmRunner", 0]}),
            f"1 key without extras: {STATEMENT}",
            id="an older key",
        ),
    ],
)
def test_what_flashinfer_would_not_serve_is_a_line(
    v1_file: Any, spoil: Callable[[Document], object], problem: str
) -> None:
    def spoil_and_add_no_ordinal(document: Document) -> None:
        first_entry(document).__setitem__(1, -1)
        spoil(document)

    (section,) = read_source(v1_file(spoil_and_add_no_ordinal)).sections
    assert section.problems == (problem.replace("2 cuDNN", "1 cuDNN"),)


def test_an_extra_fact_is_kept_and_no_problem(v1_file: Any) -> None:
    def extend(document: Document) -> None:
        document["_metadata"]["driver_version"] = "580.1"
        first_entry(document)[1] = -1

    (section,) = read_source(v1_file(extend)).sections
    assert section.environment == Environment.from_metadata({**made.H200.metadata(), "driver_version": "580.1"})
    assert section.problems == ()


def test_records_of_other_products_are_counted(v1_file: Any) -> None:
    (section,) = read_source(v1_file(lambda document: document.update(_records={"a": {}, "b": {}}))).sections
    assert section.records == 2


def test_a_bundle_with_tactics_that_flashinfer_drops(tmp_path: Path) -> None:
    path = tmp_path / "bundle.json"
    path.write_bytes(write_bundle(made.bundle([made.entry(made.key(made.CUDNN), 7)]))[0])
    assert read_source(path).sections[0].problems == (
        "1 entry of cuDNN with a plan's position as tactic, dropped by FlashInfer since 0.6.16",
    )


GOOD = write_cache_file(CacheFile((Entry(made.key(made.CUTLASS), made.CUTLASS, 1),), made.H200.metadata()))
KEY = made.key(made.CUTLASS).text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "the file is empty; remove it; whatever wrote it did not finish", id="empty"),
        pytest.param(GOOD + GOOD, "not a JSON document (", id="two documents"),
        pytest.param(GOOD[:-20], "not a JSON document (", id="truncated"),
        pytest.param(b"\xef\xbb\xbf" + GOOD, "starts with a byte order mark; ", id="a byte order mark"),
        pytest.param(GOOD.decode().encode("utf-16"), "not a JSON document (", id="UTF-16"),
        pytest.param(b"[]", "a JSON list, not an object of entries; name a v1 cache file", id="a list"),
        pytest.param(b'"gemm"', "a JSON str, not an object of entries; name a v1 cache file", id="a string"),
        pytest.param(b"\x00" * 4096, "not a JSON document (", id="zeros"),
        pytest.param(b"\x80\x04\x95pickle", "not a JSON document (", id="a pickle"),
        pytest.param(GOOD.replace(b",1]", b"," + b"[" * 100 + b"]" * 100 + b"]"), "nested deeper than 18; ", id="deep"),
        pytest.param(b"[" * 10**6, "nested deeper than 18; ", id="a million deep"),
        pytest.param(GOOD.replace(b",1]", b",NaN]"), "not a JSON document (", id="NaN"),
        pytest.param(GOOD.replace(b",1]", b",1e999]"), "not a JSON document (", id="a float that overflows"),
        pytest.param(
            GOOD.replace(b",1]", b"," + b"9" * 30 + b"]"), "holds an integer of more than 64 bits; ", id="huge integer"
        ),
        pytest.param(b'{"_metadata": []}', "_metadata is a list, not an object; ", id="metadata is a list"),
        pytest.param(b'{"_metadata": null}', "_metadata is a NoneType, not an object; ", id="metadata is null"),
        pytest.param(
            b'{"_other": {}}', "_other is not a field that is known; upgrade fi-tunecache", id="a newer field"
        ),
        pytest.param(b'{"best": {}}', "a value is not a list of runner and tactic, at best; ", id="no entry"),
        pytest.param(b'{"best": ["a", 1]}', "not a key as FlashInfer writes it: best; remove the entry", id="no key"),
        pytest.param(
            b'{"_metadata": {"fi_tunecache": {"provenance": {}}}}', "a bundle must name every fact; ", id="no bundle"
        ),
    ],
)
def test_a_file_that_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        read_source(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert caught.value.next_step


def test_a_file_of_200_mb_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    path.touch()
    os.truncate(path, 200_000_000)
    with pytest.raises(FormatError) as caught:
        read_source(path)
    assert str(caught.value) == f"{path}: 200000000 bytes are more than 67108864; check what wrote it"


def test_a_file_that_grows_for_ever_is_read_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "zeros.py"
    path.symlink_to("/dev/zero")
    with pytest.raises(FormatError, match=r"1048577 bytes are more than 1048576"):
        read_source(path)


def test_nothing_there(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(UsageError) as caught:
        read_source(path)
    assert str(caught.value) == f"{path} does not exist; name a v1 file, a store, a bundle or a bundled module"


def test_a_folder_that_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_source(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} is not a managed store of FlashInfer; "
        "give the folder that holds v2, or one environment's folder with its manifest.json"
    )


def test_a_file_that_may_not_be_read(shared_path: Path) -> None:
    closed_file, closed_folder = shared_path / "secret.json", shared_path / "secret"
    closed_file.write_bytes(GOOD)
    closed_folder.mkdir()
    (closed_folder / "tuned.json").write_bytes(GOOD)
    closed_file.chmod(0)
    closed_folder.chmod(0)
    for path in (closed_file, closed_folder / "tuned.json"):
        with unprivileged(), pytest.raises(UsageError) as caught:
            read_source(path)
        assert str(caught.value) == f"{path} can't be read (Permission denied); check its permissions"
    closed_folder.chmod(0o700)


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    """Opening it would wait for a writer."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(UsageError) as caught:
        read_source(path)
    assert str(caught.value) == f"{path} is a pipe; name a v1 file, a store, a bundle or a bundled module"


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(UsageError, match=r"x can't be read \(File name too long\); check its permissions"):
        read_source(Path("x" * 300))


def test_a_bad_entry_of_a_store_is_a_line(tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(STORE / "v2" / "645f715d598ccd4e", store / "v2" / "645f715d598ccd4e")
    entry = next((store / "v2" / "645f715d598ccd4e" / "entries").iterdir())
    entry.write_bytes(b"")

    (section,) = read_source(store).sections
    assert len(section.entries) == 89
    assert section.problems == (f"{entry}: the file is empty; remove it; whatever wrote it did not finish",)


# --- what a publisher needs to know of a source


def test_a_file_is_known_by_its_bytes(v1_file: Any) -> None:
    path = v1_file(lambda _: None)
    os.utime(path, (1.0, 1_700_000_000.5))

    (section,) = read_source(path).sections
    assert section.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert section.modified == 1_700_000_000.5


def test_a_bundle_is_known_by_its_bytes(tmp_path: Path) -> None:
    data, sha256 = write_bundle(made.bundle([made.entry(made.key(made.CUTLASS))]))
    (tmp_path / "bundle.json").write_bytes(data)
    assert read_source(tmp_path / "bundle.json").sections[0].digest == sha256


def test_an_environment_of_a_store_is_known_by_its_entries(tmp_path: Path) -> None:
    shutil.copytree(STORE / "v2" / "645f715d598ccd4e", tmp_path / "v2" / "645f715d598ccd4e")
    entries = sorted((tmp_path / "v2" / "645f715d598ccd4e" / "entries").iterdir())
    for number, entry in enumerate(entries):
        os.utime(entry, (1.0, 1_700_000_000.0 + number))
    (entries[0].parent / ".half.tmp").write_bytes(b"{")

    def section() -> tuple[str, float]:
        (only,) = read_source(tmp_path).sections
        return only.digest, only.modified

    digest, modified = section()
    original = {item.name: item for item in read_source(STORE).sections}["645f715d598ccd4e"]
    assert (digest, modified) == (original.digest, 1_700_000_089.0)
    assert len({item.digest for item in read_source(STORE).sections}) == 3
    entries[3].write_bytes(entries[3].read_bytes() + b" ")
    assert section()[0] != digest
    entries[3].unlink()
    assert section()[0] != digest


@pytest.mark.parametrize(
    ("bundles", "ids"),
    [
        pytest.param([f"embedded: {'0a' * 32}", f"/r: {'1b' * 32}"], ("0a" * 8, "1b" * 8), id="as pull writes them"),
        pytest.param([f"embedded: {'0a' * 32}"] * 2, ("0a" * 8,), id="twice"),
        pytest.param([], (), id="none"),
        pytest.param("0a" * 32, (), id="no list"),
        pytest.param([1, None, {"a": "b"}, "0a" * 31], (), id="no ids"),
        pytest.param(None, (), id="null"),
    ],
)
def test_the_bundles_that_a_pulled_file_names(v1_file: Any, bundles: object, ids: tuple[str, ...]) -> None:
    path = v1_file(lambda document: document["_metadata"].update({MARK: {"bundles": bundles}}))
    assert read_source(path).sections[0].bundles == ids


@pytest.mark.parametrize(
    ("repeated", "name"),
    [
        pytest.param('{"_metadata": {"gpu": "NVIDIA H100"}, ', "_metadata", id="metadata"),
        pytest.param('{"_metad\\u0061ta": {}, ', "_metadata", id="metadata, escaped"),
        pytest.param('{"_records": {"a": 1, "a": 2}, ', "a", id="inside of an object"),
        pytest.param('{"_generation": "1", "_generation": "2", ', "_generation", id="generation"),
    ],
)
def test_a_name_that_stands_twice_is_a_line(v1_file: Any, repeated: str, name: str) -> None:
    path = v1_file(lambda document: first_entry(document).__setitem__(1, -1))
    path.write_text(path.read_text().replace("{", repeated, 1))

    (section,) = read_source(path).sections
    assert section.problems == (f"{name} stands there twice, and the last counts",)
