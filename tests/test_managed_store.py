"""FlashInfer's managed store: what is found, what is reported, and that writing never harms anybody."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import entry_lists, environments, json_values, measurement_policies, short_text

from fi_tunecache.entry import Entry
from fi_tunecache.environment import Environment
from fi_tunecache.errors import CacheError, FormatError, UsageError
from fi_tunecache.key import Key
from fi_tunecache.managed_entry import MAX_ENTRY_BYTES, ProtocolRecord, entry_file_name
from fi_tunecache.managed_store import environment_hash, read_entries, read_store, write_entries
from fi_tunecache.measurement_policy import DEFAULT_POLICY, MeasurementPolicy

DATA = Path(__file__).parent / "data"
H200 = DATA / "h200-flashinfer-0.7.4" / "managed-store"
REAL_FOLDERS = sorted(path.parent for path in DATA.glob("*/managed-store/v2/*/manifest.json"))
real_folders = pytest.mark.parametrize("folder", [pytest.param(path, id=path.name) for path in REAL_FOLDERS])

ENVIRONMENT = Environment(
    flashinfer_version="0.7.4",
    cuda_version="13.0",
    cublas_version="13.1.0",
    cudnn_version="91900",
    cudnn_frontend_version="1.32.0",
    cutlass_dsl_version="nvidia-cutlass-dsl==4.8.1",
    gpu="NVIDIA H200",
)
KEY = Key("mm", "Runner", ((1, 2048), (0,)), (True,))
ENTRY = Entry(KEY, "Runner", 3, ("l2_cache_policy", "hot"))
RECORD = ProtocolRecord("moe::mega", '{"tokens":8}', {"stages": [1, 2]})


def as_flashinfer_serves(folder: Path) -> dict[str, str]:
    """The rules of ``ManagedAutotuneCache.lookup``, 0.7.4: key to runner, tactic and policy, as text."""

    def tactic(value: Any) -> Any:
        return tuple(tactic(item) for item in value) if isinstance(value, list) else value

    served = {}
    for path in (folder / "entries").glob("*.json"):
        entry = json.loads(path.read_text("utf-8"))
        if path.name == entry_file_name(entry["key"]):
            policy = entry.get("profiling_policy")
            read = (entry["runner"], tactic(entry["tactic"]), tuple(policy) if isinstance(policy, list) else None)
            served[entry["key"]] = repr(read)
    return served


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def written(root: Path) -> Path:
    """A store with one entry and one record; its only environment's folder."""
    return write_entries(root, ENVIRONMENT, DEFAULT_POLICY, [ENTRY], [RECORD]).path


# --- real stores


def test_there_are_real_stores() -> None:
    assert [path.name for path in REAL_FOLDERS] == [
        "8b1078426a4c2118",
        "429deefd17fea974",
        "645f715d598ccd4e",
        "a27045c5dbc185b2",
    ]


def test_the_environments_of_a_real_store() -> None:
    store = read_store(H200)

    assert store.problems == ()
    assert [(found.env_hash, str(found.policy)) for found in store.environments] == [
        ("429deefd17fea974", "default"),
        ("645f715d598ccd4e", "eager"),
        ("a27045c5dbc185b2", "cuda_graph"),
    ]
    assert {found.environment.gpu for found in store.environments} == {"NVIDIA H200"}
    assert {found.environment.flashinfer_version for found in store.environments} == {"0.7.4"}
    assert store.environments[1].manifest["measure_execution_mode"] == "eager"
    assert [found.problems for found in store.environments] == [(), (), ()]


@pytest.mark.parametrize(
    ("below", "hashes"),
    [
        pytest.param("", ["429deefd17fea974", "645f715d598ccd4e", "a27045c5dbc185b2"], id="root"),
        pytest.param("v2", ["429deefd17fea974", "645f715d598ccd4e", "a27045c5dbc185b2"], id="v2"),
        pytest.param("v2/645f715d598ccd4e", ["645f715d598ccd4e"], id="one environment"),
    ],
)
def test_a_store_by_any_of_its_folders(below: str, hashes: list[str]) -> None:
    assert [found.env_hash for found in read_store(H200 / below).environments] == hashes


@real_folders
def test_the_hash_is_flashinfers(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())

    assert environment_hash(manifest) == folder.name
    assert environment_hash({name: value for name, value in manifest.items() if name != "cache_schema"}) == folder.name
    assert environment_hash({**manifest, "cudnn_version": "91901"}) != folder.name


@real_folders
def test_a_real_environment_written_again_is_the_same_to_the_byte(folder: Path, tmp_path: Path) -> None:
    (found,) = read_store(folder).environments
    contents = read_entries(found)
    report = write_entries(tmp_path, found.environment, found.policy, contents.entries, contents.records)

    assert contents.problems == ()
    assert report.path == tmp_path / "v2" / folder.name
    assert report.written == len(contents.entries) == len(list((folder / "entries").iterdir()))
    assert files_below(report.path) == files_below(folder)
    assert as_flashinfer_serves(report.path) == as_flashinfer_serves(folder)


def test_an_entry_of_a_real_store() -> None:
    contents = read_entries(read_store(H200 / "v2" / "a27045c5dbc185b2").environments[0])
    key = Key.parse(
        "('fp8_gemm', 'CudnnFp8GemmRunner', ((1, 1, 2048), (1, 2048, 4096), (1,), (1,), (1, -1, 4096), (-1,)),"
        " (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16))"
    )

    assert len(contents.entries) == 90
    assert contents.records == ()
    assert [entry for entry in contents.entries if entry.key == key] == [
        Entry(key, "CudnnFp8GemmRunner", (0, ()), ("cuda_graph_profile_replays", 1, "l2_cache_policy", "hot"))
    ]


# --- reading


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("missing", id="nothing there"),
        pytest.param("file", id="a file"),
        pytest.param("empty", id="a folder without v2"),
        pytest.param("x" * 300, id="a name that is too long"),
    ],
)
def test_not_a_store(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("{}")
    (tmp_path / "empty").mkdir()

    with pytest.raises(UsageError):
        read_store(tmp_path / path)


def test_a_store_that_is_still_empty(tmp_path: Path) -> None:
    (tmp_path / "v2").mkdir()

    assert read_store(tmp_path).environments == ()


def test_facts_that_contradict_the_folders_name(tmp_path: Path) -> None:
    folder = written(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text()) | {"gpu": "NVIDIA H100"}
    (folder / "manifest.json").write_text(json.dumps(manifest))

    (found,) = read_store(tmp_path).environments

    assert found.env_hash == folder.name
    assert len(found.problems) == 1
    assert environment_hash(manifest) in found.problems[0]


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        pytest.param(None, "missing, or not a file", id="no manifest"),
        pytest.param("{", "not a JSON document", id="truncated"),
        pytest.param("[]", "not an object of strings", id="a list"),
        pytest.param('{"gpu": 7}', "not an object of strings", id="a fact that is no string"),
        pytest.param('{"gpu": "*"}', "wildcard", id="wildcard"),
        pytest.param('{"measure_speed": "fast"}', "measure_speed = 'fast' is not known", id="policy of the future"),
        pytest.param(" " * (MAX_ENTRY_BYTES + 1), "bytes are more than", id="too large"),
    ],
)
def test_an_environment_that_cannot_be_read_is_a_problem(tmp_path: Path, manifest: str | None, problem: str) -> None:
    folder = written(tmp_path)
    bad = folder.with_name("0123456789abcdef")
    bad.mkdir()
    if manifest is not None:
        (bad / "manifest.json").write_text(manifest)
    (folder.parent / "notes").mkdir()

    store = read_store(tmp_path)

    assert [found.path for found in store.environments] == [folder]
    assert len(store.problems) == 1
    assert str(bad) in store.problems[0]
    assert problem in store.problems[0]


def good_bytes() -> bytes:
    return json.dumps({"key": KEY.text, "runner": "Runner", "tactic": 3}).encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param(b"", "the file is empty", id="empty"),
        pytest.param(good_bytes()[:-1], "not a JSON document", id="truncated"),
        pytest.param(b"[1]", "not an entry", id="not an object"),
        pytest.param(good_bytes() + b" " * MAX_ENTRY_BYTES, "bytes are more than", id="too large"),
        pytest.param(good_bytes().replace(b"2048", b"4096"), "FlashInfer looks for this key in", id="another key"),
        pytest.param("folder", "missing, or not a file", id="folder"),
        pytest.param("pipe", "missing, or not a file", id="pipe, which would block"),
        pytest.param("link out", "a link that leaves the store is not followed", id="link out of the store"),
        pytest.param("link to itself", "missing, or not a file", id="link to itself"),
    ],
)
def test_a_bad_entry_is_a_problem_and_the_rest_is_read(tmp_path: Path, content: bytes | str, problem: str) -> None:
    root = tmp_path / "store"
    folder = written(root)
    path = folder / "entries" / "0123456789abcdef01234567.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    elif content == "pipe":
        os.mkfifo(path)
    elif content == "link out":
        (tmp_path / "outside.json").write_bytes(good_bytes())
        path.symlink_to(tmp_path / "outside.json")
    else:
        path.symlink_to(path)

    contents = read_entries(read_store(root).environments[0])

    assert contents.entries == (ENTRY,)
    assert contents.records == (RECORD,)
    assert len(contents.problems) == 1
    assert contents.problems[0].startswith(f"{path}: ")
    assert problem in contents.problems[0]


def test_an_entry_that_is_a_link_inside_the_store_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path)
    path = folder / "entries" / entry_file_name(KEY.text)
    path.rename(folder / "entry")
    path.symlink_to(folder / "entry")

    assert read_entries(read_store(tmp_path).environments[0]).entries == (ENTRY,)


def test_folders_that_lead_out_of_the_store_are_not_followed(tmp_path: Path) -> None:
    elsewhere = written(tmp_path / "elsewhere")
    environment = tmp_path / "a" / "v2" / elsewhere.name
    environment.parent.mkdir(parents=True)
    environment.symlink_to(elsewhere)
    inner = tmp_path / "b" / "v2" / elsewhere.name
    inner.mkdir(parents=True)
    shutil.copy(elsewhere / "manifest.json", inner)
    (inner / "entries").symlink_to(elsewhere / "entries")

    store = read_store(tmp_path / "a")
    contents = read_entries(read_store(tmp_path / "b").environments[0])

    assert store.environments == ()
    assert contents.entries == ()
    for problems in (store.problems, contents.problems):
        assert len(problems) == 1
        assert "a link that leaves the store is not followed" in problems[0]


def test_a_store_that_is_itself_reached_by_a_link_is_read(tmp_path: Path) -> None:
    written(tmp_path / "store")
    (tmp_path / "link").symlink_to(tmp_path / "store")

    assert len(read_store(tmp_path / "link").environments) == 1


def test_an_environment_without_entries(tmp_path: Path) -> None:
    folder = written(tmp_path)
    shutil.rmtree(folder / "entries")
    (found,) = read_store(tmp_path).environments

    assert read_entries(found).problems == ()

    (folder / "entries").write_text("")

    (problem,) = read_entries(found).problems
    assert "can't be listed" in problem


def test_no_more_entries_than_the_limit_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.setattr("fi_tunecache.managed_store.MAX_ENTRIES", 1)

    contents = read_entries(read_store(tmp_path).environments[0])

    assert len(contents.entries) + len(contents.records) == 1
    assert "of 2 entries only 1 are read" in contents.problems[0]


@contextmanager
def without_privileges() -> Iterator[None]:
    user = os.geteuid()
    os.seteuid(user or 65534)  # no permission binds root
    try:
        yield
    finally:
        os.seteuid(user)


def test_an_entry_without_permission_to_read_it_is_a_problem() -> None:
    with TemporaryDirectory() as root:  # the parents of tmp_path are closed to other users
        Path(root).chmod(0o755)
        path = written(Path(root)) / "entries" / entry_file_name(KEY.text)
        path.chmod(0)
        with without_privileges():
            contents = read_entries(read_store(root).environments[0])

    assert contents.records == (RECORD,)
    assert contents.problems == (f"{path}: can't be read: Permission denied; check its permissions",)


def test_temporary_files_are_passed_over(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "entries" / ".autotune_x1.tmp").write_text("{")

    assert read_entries(read_store(tmp_path).environments[0]).problems == ()


# --- writing


def test_what_is_written(tmp_path: Path) -> None:
    policy = MeasurementPolicy.from_execution_mode("cuda_graph")
    report = write_entries(tmp_path / "new" / "root", ENVIRONMENT, policy, [ENTRY], [RECORD], mark="3f9a1c0e52d77b10")

    manifest = json.loads((report.path / "manifest.json").read_text())
    assert manifest == {**ENVIRONMENT.metadata(), "measure_execution_mode": "cuda_graph", "cache_schema": "v2"}
    assert report.path == tmp_path / "new" / "root" / "v2" / environment_hash(manifest)
    assert (report.written, report.kept) == (2, 0)
    assert as_flashinfer_serves(report.path)[KEY.text] == "('Runner', 3, ('l2_cache_policy', 'hot'))"

    (found,) = read_store(tmp_path / "new" / "root").environments
    contents = read_entries(found)
    assert (found.environment, found.policy) == (ENVIRONMENT, policy)
    assert [entry.selection for entry in contents.entries] == [{"fi_tunecache": "3f9a1c0e52d77b10"}]
    assert [record.mark for record in contents.records] == ["3f9a1c0e52d77b10"]


@pytest.mark.parametrize(
    "present",
    [
        pytest.param('{"key": "tuned by FlashInfer"}', id="another entry"),
        pytest.param("", id="an empty file"),
        pytest.param(None, id="a link that leads nowhere"),
    ],
)
def test_what_is_there_stays(tmp_path: Path, present: str | None) -> None:
    folder = written(tmp_path)
    taken = folder / "entries" / entry_file_name(KEY.text)
    taken.unlink()
    if present is None:
        taken.symlink_to("nowhere")
    else:
        taken.write_text(present)
    (folder / "manifest.json").write_text("{}")
    other = Entry(Key("mm", "Runner", (), ()), "Runner", 1)

    report = write_entries(tmp_path, ENVIRONMENT, DEFAULT_POLICY, [ENTRY, other], [RECORD])

    assert (report.written, report.kept) == (1, 2)
    assert (folder / "manifest.json").read_text() == "{}"
    if present is None:
        assert not (folder / "entries" / "nowhere").exists()
    else:
        assert taken.read_text() == present


def test_other_users_can_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        folder = written(tmp_path)
    finally:
        os.umask(before)

    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*.json")} == {0o644}


def test_undetermined_facts_are_refused(tmp_path: Path) -> None:
    environment = Environment.from_metadata({**ENVIRONMENT.metadata(), "cudnn_version": "unknown", "gpu": None})

    with pytest.raises(UsageError, match=r"cudnn_version, gpu not known; .*--environment"):
        write_entries(tmp_path, environment, DEFAULT_POLICY, [ENTRY])
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_if_one_entry_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="JSON has no form"):
        write_entries(tmp_path, ENVIRONMENT, DEFAULT_POLICY, [ENTRY, Entry(KEY, "Runner", float("nan"))])
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")

    with pytest.raises(CacheError, match=r"root/v2/.*can't be written: Not a directory; free space"):
        write_entries(tmp_path / "root", ENVIRONMENT, DEFAULT_POLICY, [ENTRY])


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel cuts every write of this process there, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_whole_files_only(tmp_path: Path) -> None:
    big = Entry(Key("mm", "Big", (), ()), "Big", ("x" * 2000,))

    with pytest.raises(CacheError, match="can't be written: File too large; free space"), files_of_at_most(1500):
        write_entries(tmp_path, ENVIRONMENT, DEFAULT_POLICY, [ENTRY, big])

    (found,) = read_store(tmp_path).environments
    assert read_entries(found).entries == (ENTRY,)
    assert len(files_below(tmp_path)) == 2


# No file system without hard links can be mounted by a test: os.link is told to refuse as FAT does.
def refuse_links(monkeypatch: pytest.MonkeyPatch, then: Any = lambda: None) -> None:
    def hardlink_to(self: Path, target: Path) -> None:
        then()
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", hardlink_to)


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_links(monkeypatch)
    folder = written(tmp_path)

    assert read_entries(read_store(tmp_path).environments[0]).entries == (ENTRY,)
    assert len(files_below(folder)) == 3


def test_without_hard_links_a_name_taken_in_this_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path) / "entries" / entry_file_name(KEY.text)
    path.unlink()
    refuse_links(monkeypatch, then=lambda: path.write_text("tuned by FlashInfer"))

    report = write_entries(tmp_path, ENVIRONMENT, DEFAULT_POLICY, [ENTRY])

    assert (report.written, report.kept) == (0, 1)
    assert path.read_text() == "tuned by FlashInfer"


def test_a_name_taken_in_this_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path) / "entries" / entry_file_name(KEY.text)
    path.unlink()
    link = Path.hardlink_to

    def another_was_faster(self: Path, target: Path) -> None:
        path.write_text("tuned by FlashInfer")
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", another_was_faster)
    report = write_entries(tmp_path, ENVIRONMENT, DEFAULT_POLICY, [ENTRY])

    assert (report.written, report.kept) == (0, 1)
    assert path.read_text() == "tuned by FlashInfer"


def test_without_hard_links_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path)
    (folder / "entries" / entry_file_name(KEY.text)).unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    refuse_links(monkeypatch, then=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard)))
    try:
        with pytest.raises(CacheError, match="File too large"):
            write_entries(tmp_path, ENVIRONMENT, DEFAULT_POLICY, [ENTRY])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert sorted(files_below(folder)) == [f"entries/{entry_file_name(str(RECORD.fields))}", "manifest.json"]


CONTENDED = [Key("mm", "Runner", ((size,),), ()) for size in range(60)]


def contend(root: str, number: int, start: Any, reports: Any) -> None:
    start.wait()
    report = write_entries(
        root, ENVIRONMENT, DEFAULT_POLICY, [Entry(key, "Runner", (number,) * 500) for key in CONTENDED]
    )
    reports.put((report.written, report.kept))


def test_of_several_processes_one_wins_each_entry(tmp_path: Path) -> None:
    processes = get_context("spawn")
    start, reports = processes.Barrier(4), processes.Queue()
    writers = [processes.Process(target=contend, args=(str(tmp_path), number, start, reports)) for number in range(4)]
    for writer in writers:
        writer.start()
    seen: dict[str, bytes] = {}
    while any(writer.is_alive() for writer in writers):
        for path in tmp_path.glob("v2/*/entries/*.json"):
            data = path.read_bytes()
            json.loads(data)  # never half a file
            assert seen.setdefault(path.name, data) == data
    counts = [reports.get(timeout=10) for _ in writers]

    assert [writer.exitcode for writer in writers] == [0] * 4
    assert sum(won for won, _ in counts) == len(CONTENDED)
    assert {won + kept for won, kept in counts} == {len(CONTENDED)}
    contents = read_entries(read_store(tmp_path).environments[0])
    assert contents.problems == ()
    assert {entry.key for entry in contents.entries} == set(CONTENDED)
    assert len(files_below(tmp_path)) == len(CONTENDED) + 1


# --- nothing is lost


@settings(deadline=None)  # every example writes files
@given(
    environments,
    measurement_policies,
    entry_lists,
    st.lists(st.builds(ProtocolRecord, short_text.filter(bool), short_text, json_values), max_size=3),
)
def test_reading_is_the_inverse_of_writing(
    environment: Environment, policy: MeasurementPolicy, entries: list[Entry], records: list[ProtocolRecord]
) -> None:
    with TemporaryDirectory() as root:
        report = write_entries(root, environment, policy, entries, records)
        (found,) = read_store(root).environments
        contents = read_entries(found)
        served = as_flashinfer_serves(report.path)

    assert (found.environment, found.policy, found.problems) == (environment, policy, ())
    assert contents.problems == ()
    plain = {entry.key.text: repr((entry.runner, entry.tactic, entry.policy)) for entry in entries}
    assert {e.key.text: repr((e.runner, e.tactic, e.policy)) for e in contents.entries} == plain
    assert {key: served[key] for key in plain} == plain
    first = {record.fields: record for record in reversed(records)}
    assert {record.fields: record for record in contents.records} == first
