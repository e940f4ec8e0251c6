"""Seeding FlashInfer's managed store and clearing it again: never at the cost of what FlashInfer has put there."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import made
import pytest
from command_line import run_process, snapshot
from unprivileged import unprivileged

from fi_tunecache.bundle import MARK
from fi_tunecache.entry import Entry, Tactic
from fi_tunecache.errors import CacheError, FormatError, UsageError
from fi_tunecache.managed_entry import MAX_ENTRY_BYTES, ProtocolRecord, entry_file, entry_file_name, record_file
from fi_tunecache.managed_files import create_files, is_marked
from fi_tunecache.managed_store import read_folder, write_entries
from fi_tunecache.materialisation import store_entries
from fi_tunecache.measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.retrieval import pull
from fi_tunecache.seeding import Plan, clear_store, plan_seeding, seed_store
from fi_tunecache.selection import Request
from fi_tunecache.store_root import find_store_root
from fi_tunecache.user_cache import UserCache

FIRST, SECOND = "3f9a1c0e52d77b10", "d152cdd59e311f69"
"""Two bundles."""


def entry(runner: str, m: int = 1, tactic: Tactic = 3, bundle: str | None = FIRST) -> Entry:
    key = made.key(runner, m)
    return Entry(key, key.runner, tactic, made.POLICY, None if bundle is None else {MARK: bundle})


A, B = entry(made.CUDNN, 1, (0, ())), entry(made.TINY, 2, 0)
SELECTION = (A, B)


def seed(root: Path, entries: Iterable[Entry] = SELECTION) -> tuple[int, int, int, int]:
    """Seeded, kept, skipped, outdated."""
    seeded = seed_store(root, made.H200, DEFAULT_POLICY, entries)
    return seeded.seeded, seeded.kept, seeded.skipped, seeded.outdated


def folder(root: Path) -> Path:
    """The only environment's entries."""
    (found,) = root.glob("v2/*/entries")
    return found


def path_of(root: Path, of: Entry) -> Path:
    return folder(root) / entry_file_name(of.key.text)


def present(root: Path) -> set[tuple[str, int, Any, str | None]]:
    contents = read_folder(folder(root).parent)
    assert contents.problems == ()
    return {
        (found.key.runner, found.key.profile[0][0], found.tactic, (found.selection or {}).get(MARK))
        for found in contents.entries
    }


def publish(root: Path, own: Entry) -> Path:
    """As FlashInfer does: a file of its own, renamed over whatever has the name."""
    path = path_of(root, own)
    written = path.with_name(".autotune_x1.tmp")
    written.write_bytes(entry_file(own, None)[1])
    written.replace(path)
    return path


def own(of: Entry, tactic: Tactic = 77) -> Entry:
    return Entry(of.key, of.runner, tactic, of.policy)


# --- what is seeded


@pytest.mark.parametrize(
    ("there", "plan"),
    [
        pytest.param([], Plan(SELECTION, 0, 0, 0), id="nothing there"),
        pytest.param([A], Plan((B,), 0, 1, 0), id="seeded before"),
        pytest.param([own(A)], Plan((B,), 1, 0, 0), id="its own winner has the name"),
        pytest.param(
            [own(entry(made.CUBLASLT))], Plan((B,), 1, 0, 0), id="its own winner has the shape, under another runner"
        ),
        pytest.param([own(entry(made.CUDNN, 4))], Plan(SELECTION, 0, 0, 0), id="its own winner of another shape"),
        pytest.param([entry(made.CUDNN)], Plan((B,), 0, 1, 1), id="seeded before with another tactic"),
        pytest.param(
            [entry(made.CUDNN, 1, (0, ()), "0" * 16)], Plan((B,), 0, 1, 1), id="seeded before from another bundle"
        ),
        pytest.param(
            [entry(made.TINY, 1, 0)], Plan((B,), 0, 1, 1), id="seeded before under another runner: it might win"
        ),
        pytest.param([entry(made.CUDNN, 4)], Plan(SELECTION, 0, 0, 1), id="seeded before and not in the selection"),
        pytest.param(
            [own(entry(made.TINY)), entry(made.CUDNN)], Plan((B,), 0, 1, 1), id="seeded before, beside its own winner"
        ),
        pytest.param([Entry(A.key, A.runner, 3, None, {MARK: [1]})], Plan((B,), 0, 1, 1), id="a mark that is no name"),
    ],
)
def test_the_plan(there: list[Entry], plan: Plan) -> None:
    assert plan_seeding(SELECTION, there) == plan


def test_entries_of_one_bundle_stand_for_those_of_another_of_the_selection() -> None:
    assert plan_seeding([A, entry(made.TINY, 2, 0, SECOND)], [entry(made.CUDNN, 1, (0, ()), SECOND)]).outdated == 0


def test_each_entry_is_where_flashinfer_looks_with_its_bundles_mark(tmp_path: Path) -> None:
    mine = (A, entry(made.TINY, 2, 0, SECOND))
    assert seed(tmp_path, mine) == (2, 0, 0, 0)
    assert present(tmp_path) == {(made.CUDNN, 1, (0, ()), FIRST), (made.TINY, 2, 0, SECOND)}
    assert json.loads((folder(tmp_path).parent / "manifest.json").read_text()) == {
        **made.H200.metadata(),
        "cache_schema": "v2",
    }
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json"}


def test_each_policy_has_its_folder(tmp_path: Path) -> None:
    eager = seed_store(tmp_path, made.H200, MeasurementPolicy.from_execution_mode("eager"), SELECTION)
    default = seed_store(tmp_path, made.H200, DEFAULT_POLICY, SELECTION)
    assert (eager.seeded, default.seeded) == (2, 2)
    assert eager.path != default.path


def test_entries_without_a_policy_are_marked_too(tmp_path: Path) -> None:
    """A v1 file, and so the selection, has no room for their marks."""
    bundles = [
        made.bundle([Entry(made.key(made.CUTLASS, m), made.CUTLASS, 1, None)], created=f"2026-12-0{m}") for m in (1, 2)
    ]
    bundles.append(made.bundle([made.entry(made.key(made.TINY, 4))]))
    names = [row.bundle_id for row in add_bundles(tmp_path / "registry", "made", bundles)]
    request = Request(environment=made.H200, registries=(str(tmp_path / "registry"),))
    for hit in (False, True):
        pulled = pull(request, cache=UserCache(tmp_path / "cache"))
        assert pulled.hit == hit
        seed(tmp_path / f"store {hit}", store_entries(pulled.selection, pulled.data, only_raced=False))
        assert {(m, mark) for _, m, _, mark in present(tmp_path / f"store {hit}")} == {
            (1, names[0]),
            (2, names[1]),
            (4, names[2]),
        }


def test_seeding_again_writes_nothing(tmp_path: Path) -> None:
    seed(tmp_path)
    before = snapshot(tmp_path)
    assert seed(tmp_path) == (0, 0, 2, 0)
    assert snapshot(tmp_path) == before


def test_what_all_is_there_is_found_where_nothing_can_be_written(shared_path: Path) -> None:
    seed(shared_path)
    for name in ("left", "0123456789abcdef"):
        left = folder(shared_path) / f".{name}.tmp"
        left.touch()
        os.utime(left, (0, 0))
    for path in (shared_path, *shared_path.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    with unprivileged():
        assert seed(shared_path) == (0, 0, 2, 0)
        with pytest.raises(CacheError, match=r"can't be written: Permission denied; free space, check"):
            seed(shared_path, [entry(made.CUTLASS, 9)])
        with pytest.raises(CacheError, match=r"can't be cleared \(Permission denied\); check its permissions"):
            clear_store(shared_path)
    for path in (shared_path, *shared_path.rglob("*")):
        path.chmod(0o755)
    assert present(shared_path) == {(made.CUDNN, 1, (0, ()), FIRST), (made.TINY, 2, 0, FIRST)}


def test_its_own_winner_stays_to_the_byte(tmp_path: Path) -> None:
    seed(tmp_path, [B])
    path = publish(tmp_path, own(A))
    before = path.read_bytes()
    assert seed(tmp_path) == (0, 1, 1, 0)
    assert path.read_bytes() == before


SINGLE = entry(made.TINY, 1, 0)
"""Beside A: what a caller with that runner alone gets; to a caller with both, cuDNN comes first."""


def test_a_file_that_flashinfer_can_not_read_keeps_what_belongs_to_it_out(tmp_path: Path) -> None:
    """Else, as that file is a miss, the entry that is not meant for the same lookup would win."""
    seed(tmp_path, [B])
    path_of(tmp_path, A).touch()
    seeded = seed_store(tmp_path, made.H200, DEFAULT_POLICY, [A, SINGLE, B])
    assert (seeded.seeded, seeded.kept, seeded.skipped) == (0, 2, 1)
    (problem,) = seeded.problems
    assert problem.startswith(f"{path_of(tmp_path, A)}: the file is empty; ")
    assert path_of(tmp_path, A).read_bytes() == b""


def test_what_was_seeded_in_part_is_completed(tmp_path: Path) -> None:
    seed(tmp_path, [SINGLE])
    assert seed(tmp_path, [A, SINGLE]) == (1, 0, 1, 0)


def test_undetermined_facts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gpu not known"):
        seed_store(tmp_path, made.H200.with_facts({"gpu": "unknown"}), DEFAULT_POLICY, SELECTION)
    assert list(tmp_path.iterdir()) == []


def test_an_entry_that_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    huge = entry(made.CUTLASS, 1, ("x" * MAX_ENTRY_BYTES,))
    with pytest.raises(FormatError, match=rf"an entry of \d+ bytes is more than {MAX_ENTRY_BYTES}"):
        seed(tmp_path, [A, huge])
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_leads_out_of_the_store_is_not_followed(tmp_path: Path) -> None:
    seed(tmp_path / "elsewhere")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "v2").symlink_to(tmp_path / "elsewhere" / "v2")
    before = snapshot(tmp_path)

    with pytest.raises(CacheError, match="leads out of the store by a link; name the root that it leads to"):
        seed(tmp_path / "store", [entry(made.CUTLASS)])
    cleared = clear_store(tmp_path / "store")

    assert cleared.removed == ()
    (problem,) = cleared.problems
    assert "leads out of the store by a link, which is not followed" in problem
    assert snapshot(tmp_path) == before


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to("store")
    assert seed(tmp_path / "link") == (2, 0, 0, 0)
    assert clear_store(tmp_path / "link").removed == ((folder(tmp_path / "store").parent, 2),)


MANY = [entry(runner, m, m) for m in range(1, 41) for runner in (made.CUBLASLT, made.CUDNN, made.TINY)]


def seed_with_others(root: str, start: Any, reports: Any) -> None:
    start.wait()
    reports.put(seed(Path(root), MANY))


def test_processes_that_seed_at_once(tmp_path: Path) -> None:
    processes = get_context("spawn")
    start, reports = processes.Barrier(4), processes.Queue()
    seeding = [
        processes.Process(target=seed_with_others, args=(str(tmp_path), start, reports), daemon=True) for _ in range(4)
    ]
    for process in seeding:
        process.start()
    counts = [reports.get(timeout=60) for _ in seeding]
    for process in seeding:
        process.join(60)
    assert {(seeded + skipped, kept, outdated) for seeded, kept, skipped, outdated in counts} == {(len(MANY), 0, 0)}
    assert sum(seeded for seeded, *_ in counts) >= len(MANY)
    assert seed(tmp_path, MANY) == (0, 0, len(MANY), 0)
    assert {path.suffix for path in folder(tmp_path).iterdir()} == {".json"}


def test_a_file_of_the_same_content_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes seed the same: one that withdrew its part would leave the other's."""
    files = {tmp_path / f"{number}.json": b"{}" for number in range(3)}
    link = Path.hardlink_to

    def another_seeds_the_second(self: Path, target: Path) -> None:
        (tmp_path / "1.json").write_bytes(b"{}")
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", another_seeds_the_second)
    assert create_files(files)
    assert sorted(tmp_path.iterdir()) == sorted(files)


# --- all entries of a shape, or none


def test_what_the_disk_refuses_leaves_none_of_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller with both runners would be served the other one's entry, which may be far slower."""
    links: list[Path] = []
    link = Path.hardlink_to

    def refuse_the_second(self: Path, target: Path) -> None:
        links.append(self)
        if len(links) == 2:
            raise OSError(errno.EIO, "Input/output error", str(self))
        link(self, target)

    files = {tmp_path / f"{number}.json": b"{}" for number in range(3)}
    monkeypatch.setattr(Path, "hardlink_to", refuse_the_second)
    monkeypatch.setattr(Path, "open", refuse_to_open)
    with pytest.raises(OSError, match="Read-only file system"):
        create_files(files)
    assert list(tmp_path.iterdir()) == []
    assert len(links) == 2


def refuse_to_open(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    if "x" in mode:
        raise OSError(errno.EROFS, "Read-only file system", str(self))
    return open(self, mode, *arguments, **options)  # noqa: PTH123


@pytest.mark.parametrize("discarded", [False, True], ids=["taken", "taken, and discarded again"])
def test_a_name_that_is_taken_in_this_moment_leaves_none_of_a_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, discarded: bool
) -> None:
    files = {tmp_path / f"{number}.json": b"{}" for number in range(3)}
    link = Path.hardlink_to

    def flashinfer_is_faster(self: Path, target: Path) -> None:
        (tmp_path / "1.json").write_bytes(b"tuned")
        try:
            link(self, target)
        finally:
            if discarded:
                (tmp_path / "1.json").unlink()

    monkeypatch.setattr(Path, "hardlink_to", flashinfer_is_faster)
    assert not create_files(files)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == ({} if discarded else {"1.json": b"tuned"})


def test_where_a_name_is_taken_nothing_is_written(shared_path: Path) -> None:
    (shared_path / "0.json").write_bytes(b"tuned")
    with unprivileged():
        assert not create_files({shared_path / f"{number}.json": b"{}" for number in range(2)})


# --- what is cleared


def test_only_what_bears_our_mark_is_removed(tmp_path: Path) -> None:
    seed(tmp_path, [A, B])
    kept = publish(tmp_path, own(entry(made.CUTLASS, 8)))
    others = [
        folder(tmp_path) / name
        for name in (".autotune_x2.tmp", "notes.txt", "0123456789abcdef01234567.json", "of-a-user.json")
    ]
    others[2].write_text(json.dumps({"key": f"ours? {MARK}", "tactic": {MARK: FIRST}}))
    others[3].write_text(json.dumps({MARK: None}))
    for path in others[:2]:
        path.write_text("x")
    before = snapshot(tmp_path)

    cleared = clear_store(tmp_path)

    assert cleared.removed == ((folder(tmp_path).parent, 2),)
    gone = {str(path_of(tmp_path, of).relative_to(tmp_path)) for of in (A, B)}
    assert snapshot(tmp_path) == {name: value for name, value in before.items() if name not in gone}
    assert kept.exists()
    assert clear_store(tmp_path).removed == ()


def test_every_environment_is_cleared(tmp_path: Path) -> None:
    policies = [DEFAULT_POLICY, MeasurementPolicy.from_execution_mode("eager")]
    folders = {seed_store(tmp_path, made.H200, policy, SELECTION).path for policy in policies}
    for path in folders:
        (path / "manifest.json").write_text("not what FlashInfer reads")
    record = write_entries(tmp_path, made.H200, policies[0], [], [ProtocolRecord("op", "key", 1)], mark=FIRST)
    assert record.written == 1
    assert dict(clear_store(tmp_path).removed) == {path: 2 + (path == record.path) for path in folders}


@pytest.mark.parametrize("content", [None, "folder", "file", "v2"])
def test_there_is_no_store(tmp_path: Path, content: str | None) -> None:
    root = tmp_path / "root"
    if content == "file":
        root.write_text("")
    elif content is not None:
        root.mkdir()
        (root / content).mkdir()
    cleared = clear_store(root)
    assert (cleared.found, cleared.removed) == (content == "v2", ())


@pytest.mark.parametrize(
    ("data", "marked"),
    [
        pytest.param(entry_file(A, None)[1], True, id="an entry"),
        pytest.param(record_file(ProtocolRecord("op", "key", 1, FIRST), None)[1], True, id="a record"),
        pytest.param(entry_file(own(A), None)[1], False, id="FlashInfer's own"),
        pytest.param(entry_file(A, None)[1][:-1], False, id="cut off"),
        pytest.param(b"", False, id="empty"),
        pytest.param(b"[" * 100_000, False, id="deep"),
        pytest.param(b"[]", False, id="a list"),
    ],
)
def test_what_is_marked(data: bytes, marked: bool) -> None:
    assert is_marked(data) == marked


@pytest.mark.parametrize("kind", ["link to a marked one", "folder", "pipe", "huge"])
def test_what_we_do_not_write_is_not_ours(tmp_path: Path, kind: str) -> None:
    seed(tmp_path)
    marked = path_of(tmp_path, A)
    path = folder(tmp_path) / "0123456789abcdef01234567.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "huge":
        path.write_bytes(marked.read_bytes() + b" " * MAX_ENTRY_BYTES)
    else:
        (tmp_path / "outside.json").write_bytes(marked.read_bytes())
        path.symlink_to(tmp_path / "outside.json")
    assert clear_store(tmp_path).removed == ((folder(tmp_path).parent, 2),)
    assert [found.name for found in folder(tmp_path).iterdir()] == [path.name]
    assert (tmp_path / "outside.json").exists() == path.is_symlink()


def test_what_only_another_user_can_read_is_told(shared_path: Path) -> None:
    """As FlashInfer's own files are."""
    seed(shared_path)
    path = publish(shared_path, own(entry(made.CUTLASS, 8)))
    path.chmod(0o600)
    for found in (shared_path, *shared_path.rglob("*")):
        if found.is_dir():
            found.chmod(0o777)
    with unprivileged():
        cleared = clear_store(shared_path)
    assert cleared.removed == ((folder(shared_path).parent, 2),)
    assert cleared.problems == (f"1 file can't be read, seeded or not, e.g. {path}",)


# --- while FlashInfer publishes


def refuse_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file system without hard links can be mounted by a test: links are refused as FAT does."""

    def hardlink_to(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", hardlink_to)


def between_look_and_rename(monkeypatch: pytest.MonkeyPatch, *do: Callable[[], object]) -> None:
    """Do the first before the first file is taken aside, the second after it."""
    rename, todo = Path.rename, list(do)

    def renamed(self: Path, target: Path) -> Path:
        if todo:
            todo.pop(0)()
        result = rename(self, target)
        if todo:
            todo.pop(0)()
        return result

    monkeypatch.setattr(Path, "rename", renamed)


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
@pytest.mark.parametrize(
    ("then", "stays"),
    [
        pytest.param([], 77, id="it is put back"),
        pytest.param([own(A, 88)], 88, id="a newer one of its own stays"),
        pytest.param([A], 77, id="what we have seeded in its place gives way"),
    ],
)
def test_a_winner_that_comes_in_this_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool, then: list[Entry], stays: int
) -> None:
    seed(tmp_path, [A])
    if not links:
        refuse_links(monkeypatch)
    between_look_and_rename(
        monkeypatch, lambda: publish(tmp_path, own(A, 77)), *(lambda of=of: publish(tmp_path, of) for of in then)
    )
    assert clear_store(tmp_path).removed == ()
    assert present(tmp_path) == {(made.CUDNN, 1, stays, None)}
    assert len(list(folder(tmp_path).iterdir())) == 1


def test_an_entry_that_flashinfer_discards_in_this_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed(tmp_path, [A])
    between_look_and_rename(monkeypatch, path_of(tmp_path, A).unlink)
    assert clear_store(tmp_path).removed == ()
    assert list(folder(tmp_path).iterdir()) == []


def test_another_clearing_in_this_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds what lies aside and does what is to be done; each entry is counted once."""
    seed(tmp_path, [A])
    others: list[int] = []
    between_look_and_rename(
        monkeypatch, lambda: None, lambda: others.extend(count for _, count in clear_store(tmp_path).removed)
    )
    assert clear_store(tmp_path).removed == ()
    assert others == [1]
    assert list(folder(tmp_path).iterdir()) == []


def test_an_interruption_puts_back_what_is_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed(tmp_path, [A])

    def interrupt() -> None:
        raise KeyboardInterrupt

    between_look_and_rename(monkeypatch, lambda: publish(tmp_path, own(A)), interrupt)
    with pytest.raises(KeyboardInterrupt):
        clear_store(tmp_path)
    assert present(tmp_path) == {(made.CUDNN, 1, 77, None)}
    assert len(list(folder(tmp_path).iterdir())) == 1


def tune(path: str, data: list[bytes], go_on: Any, stop: Any) -> None:
    """A process of FlashInfer: publishes and discards, as fast as it can, and at last publishes."""
    name, scratch = Path(path), Path(path).with_name(".autotune_x1.tmp")
    while not stop.is_set():
        for winner in data:
            scratch.write_bytes(winner)
            scratch.replace(name)
            go_on.set()
        name.unlink(missing_ok=True)
    scratch.write_bytes(data[-1])
    scratch.replace(name)


def test_a_race_with_flashinfer(tmp_path: Path) -> None:
    seed(tmp_path)
    processes = get_context("spawn")
    go_on, stop = processes.Event(), processes.Event()
    winners = [entry_file(own(A, tactic), None)[1] for tactic in (77, 88)]
    arguments = (str(path_of(tmp_path, A)), winners, go_on, stop)
    flashinfer = processes.Process(target=tune, args=arguments)
    flashinfer.start()
    assert go_on.wait(60)
    removed, until = 0, time.monotonic() + 1.5
    while time.monotonic() < until:
        seed(tmp_path)
        removed += sum(count for _, count in clear_store(tmp_path).removed)
    stop.set()
    flashinfer.join(60)
    assert flashinfer.exitcode == 0
    assert removed > 0
    clear_store(tmp_path)
    assert path_of(tmp_path, A).read_bytes() == winners[-1]
    assert [path.name for path in folder(tmp_path).iterdir()] == [path_of(tmp_path, A).name]


# --- killed at any point

KILLED = """
import os, signal, sys
from pathlib import Path

import test_seeding

task, root, when, published, victim = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
events = 0

def count(event, arguments):
    global events, published
    if event in ("open", "os.rename", "os.link", "os.remove", "os.mkdir") and str(root) in str(arguments[0]):
        if event == "os.rename" and str(arguments[0]) == victim and published:
            source, published = published, ""
            os.replace(source, victim)  # FlashInfer has tuned it again, after it was looked at
        events += 1
        if events == when:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
getattr(test_seeding, task)(root)
"""


def killed(task: str, root: Path, when: int, published: Path | str = "", victim: Path | str = "") -> bool:
    """Do a task in a process that is killed before its n-th step on the disk; False if it has not so many."""
    root.parent.mkdir(exist_ok=True)
    environ = {"PYTHONPATH": str(Path(__file__).parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_process(task, root, str(when), published, victim, folder=root.parent, environ=environ, code=KILLED)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


@pytest.mark.parametrize("next_task", [clear_store, seed], ids=["clear", "seed"])
def test_a_killed_clearing_loses_nothing_of_flashinfers(tmp_path: Path, next_task: Callable[[Path], object]) -> None:
    seen = set()
    for when in range(1, 100):
        root, published = tmp_path / f"{when}" / "store", tmp_path / f"{when}" / "published.json"
        seed(root)
        victim = path_of(root, A)
        published.write_bytes(entry_file(own(A), None)[1])
        if not killed("clear_store", root, when, published, victim):
            break
        tuned = not published.exists()
        seen.add((tuned, victim.exists()))

        next_task(root)

        if tuned:
            assert victim.read_bytes() == entry_file(own(A), None)[1]
        elif next_task is seed:
            assert victim.read_bytes() == entry_file(A, None)[1]
        else:
            assert not victim.exists()
        assert {path.suffix for path in folder(root).iterdir()} <= {".json"}
    assert seen == {(False, True), (True, True), (True, False)}


def test_a_killed_seeding_leaves_whole_files_and_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fi_tunecache.managed_files._STALE_SECONDS", -1.0)  # an hour has gone by
    seen = set()
    for when in range(1, 100):
        root = tmp_path / f"{when}" / "store"
        if not killed("seed", root, when):
            break
        left = [path for path in root.rglob("*") if path.is_file()]
        seen |= {path.suffix for path in left}
        for path in left:
            assert path.suffix == ".tmp" or json.loads(path.read_bytes())

        seeded = sum(seed(root)[::2])
        assert seeded == 2
        assert present(root) == {(made.CUDNN, 1, (0, ()), FIRST), (made.TINY, 2, 0, FIRST)}
        assert {path.suffix for path in root.rglob("*") if path.is_file()} == {".json"}
    assert seen == {".tmp", ".json"}


def test_a_temporary_file_of_a_process_that_may_be_alive_stays(tmp_path: Path) -> None:
    seed(tmp_path)
    path = folder(tmp_path) / ".0123456789abcdef.tmp"
    path.touch()
    clear_store(tmp_path)
    assert path.exists()
    os.utime(path, (time.time() - 4000,) * 2)
    clear_store(tmp_path)
    assert not path.exists()


# --- where the store lies


@pytest.mark.parametrize(
    ("destination", "environ", "root"),
    [
        pytest.param("flashinfer", {}, "HOME/.cache/flashinfer/autotune", id="default"),
        pytest.param("flashinfer", {"FLASHINFER_WORKSPACE_BASE": "/w"}, "/w/.cache/flashinfer/autotune", id="base"),
        pytest.param("flashinfer", {"FLASHINFER_AUTOTUNE_CACHE_DIR": "/d"}, "/d", id="directory"),
        pytest.param("flashinfer", {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "/v"}, "HOME/.cache/flashinfer/autotune"),
        pytest.param("vllm", {}, "HOME/.cache/flashinfer/autotune", id="vLLM: FlashInfer's"),
        pytest.param("vllm", {"FLASHINFER_AUTOTUNE_CACHE_DIR": "/d"}, "/d", id="vLLM: FlashInfer's directory"),
        pytest.param(
            "vllm",
            {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "/v", "FLASHINFER_AUTOTUNE_CACHE_DIR": "/d"},
            "/v",
            id="vLLM: its own",
        ),
        pytest.param("vllm", {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "~/v"}, "HOME/v", id="vLLM expands a home"),
        pytest.param("flashinfer:/r", {"FLASHINFER_AUTOTUNE_CACHE_DIR": "/d"}, "/r", id="named"),
        pytest.param("flashinfer:r/s", {}, "r/s", id="named, relative"),
        pytest.param("flashinfer:~/r", {}, "HOME/r", id="named, below the home"),
        pytest.param("flashinfer:a:b", {}, "a:b", id="named, with a colon"),
        *(
            pytest.param(name, {}, None, id=name or "empty")
            for name in ("./flashinfer", "./vllm", "flashinfer.json", "flashinfer/x", "cache", "", ":flashinfer")
        ),
    ],
)
def test_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, destination: str, environ: dict[str, str], root: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = None if root is None else Path(root.replace("HOME", str(tmp_path)))
    assert find_store_root(destination, environ) == expected


@pytest.mark.parametrize(
    ("destination", "line"),
    [
        pytest.param(
            "sglang",
            "SGLang (0.5.23) reads no managed store, but a file for each rank, which must not be placed by hand; "
            "use --to FILE to look at the entries",
            id="SGLang",
        ),
        pytest.param(
            "flashinfer:",
            "--to 'flashinfer:' names no managed store; name its root like --to flashinfer:DIR",
            id="no folder",
        ),
        pytest.param(
            "vllm:/v",
            "--to 'vllm:/v' names no managed store; name its root like --to flashinfer:DIR",
            id="a folder of vLLM's",
        ),
        pytest.param(
            "flashinfer:~nobody-has-this-name/r",
            "--to flashinfer:~nobody-has-this-name/r needs a home, and there is none; "
            "name the store's root like --to flashinfer:DIR",
            id="no home",
        ),
    ],
)
def test_what_names_no_root(destination: str, line: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_store_root(destination, {})
    assert str(caught.value) == line
