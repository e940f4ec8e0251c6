"""Adding bundles to a registry in a directory: what keeps the rules is added, once, and never half seen."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
from collections.abc import Callable
from pathlib import Path

import filelock
import made
import msgspec
import pytest
from command_line import snapshot
from publisher import bundle_of, edit_of, numbers, outcomes, publisher
from unprivileged import unprivileged

from fi_tunecache.atomic_file import is_temporary
from fi_tunecache.bundle import Bundle, Workload, write_bundle
from fi_tunecache.deadline import Deadline
from fi_tunecache.entry import Entry, Lookup
from fi_tunecache.environment import Environment
from fi_tunecache.errors import CacheError, FiTuneCacheError, FormatError, UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.key import Key
from fi_tunecache.manifest import Yank, read_manifest, write_manifest
from fi_tunecache.publish import directory
from fi_tunecache.publish.commit import commit
from fi_tunecache.publish.directory import DirectoryTarget, add_bundles
from fi_tunecache.publish.target import StaleError
from fi_tunecache.registry import open_registry
from fi_tunecache.verification import verify_registry

H200 = Folder("0.7.4", "nvidia-h200")
CUDNN = made.entry(made.key(made.CUDNN))
ONE = made.bundle([CUDNN], [made.lookup([made.TINY, made.CUDNN], made.CUDNN)])
TWO = made.bundle([made.entry(made.key(made.TINY))])
H100 = made.bundle([CUDNN], environment=made.H200.with_facts({"gpu": "NVIDIA H100"}))


CARD = ("README.md", "coverage.svg")


def contents(root: Path) -> dict[str, bytes]:
    """Every file but the lock and what a killed writer leaves."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not is_temporary(path.name) and path.suffix != ".lock"
    }


def test_a_new_registry(tmp_path: Path) -> None:
    rows = add_bundles(tmp_path / "registry", "ours", [ONE, H100, TWO])
    registry = open_registry(str(tmp_path / "registry"))

    assert registry.descriptor().name == "ours"
    assert registry.folders() == (Folder("0.7.4", "nvidia-h100"), H200)
    assert registry.manifest(H200).bundles == (rows[0], rows[2])
    assert registry.manifest(Folder("0.7.4", "nvidia-h100")).bundles == (rows[1],)
    assert [registry.bundle(H200, row) for row in (rows[0], rows[2])] == [ONE, TWO]
    assert verify_registry(registry).problems == ()


def test_adding_again_changes_nothing(tmp_path: Path) -> None:
    rows = add_bundles(tmp_path, "ours", [ONE, TWO])
    before = snapshot(tmp_path)

    assert add_bundles(tmp_path, "another name", [TWO, ONE]) == [rows[1], rows[0]]
    assert snapshot(tmp_path) == before


def test_the_same_bundle_twice_at_once_is_one(tmp_path: Path) -> None:
    rows = add_bundles(tmp_path, "ours", [ONE, ONE])

    assert rows[0] == rows[1]
    assert open_registry(str(tmp_path)).manifest(H200).bundles == (rows[0],)


def test_bundles_are_added_after_those_that_are_there(tmp_path: Path) -> None:
    first = add_bundles(tmp_path, "ours", [ONE])
    second = add_bundles(tmp_path, "ours", [TWO])

    assert open_registry(str(tmp_path)).manifest(H200).bundles == (*first, *second)
    assert open_registry(str(tmp_path)).bundle(H200, first[0]) == ONE


def test_what_others_wrote_into_a_manifest_stays(tmp_path: Path) -> None:
    (row,) = add_bundles(tmp_path, "ours", [ONE])
    path = tmp_path / str(H200) / "manifest.json"
    manifest = read_manifest(path.read_bytes(), H200)
    yanked = msgspec.structs.replace(row, yanked=Yank("slow", "2026-12-02"), benefit={"bf16_gemm": 0.99})
    path.write_bytes(write_manifest(msgspec.structs.replace(manifest, bundles=(yanked,))))
    add_bundles(tmp_path, "ours", [ONE, TWO])

    assert open_registry(str(tmp_path)).manifest(H200).bundles[0] == yanked


def test_an_empty_registry(tmp_path: Path) -> None:
    assert add_bundles(tmp_path, "ours", []) == []
    assert contents(tmp_path).keys() == {*CARD, "registry.json"}
    assert open_registry(str(tmp_path)).folders() == ()


# --- a reader in the middle


def test_a_row_is_never_seen_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every single file that is written, what the registry then shows is sound."""
    add_bundles(tmp_path, "ours", [ONE])
    write = directory.write_atomic
    seen: list[int] = []

    def write_and_verify(path: Path, data: bytes, *, advice: str) -> None:
        write(path, data, advice=advice)
        registry = open_registry(str(tmp_path))
        assert verify_registry(registry).problems == ()
        seen.append(sum(len(registry.manifest(folder).bundles) for folder in registry.folders()))

    monkeypatch.setattr(directory, "write_atomic", write_and_verify)
    add_bundles(tmp_path, "ours", [TWO, H100])

    assert seen == [1, 1, *(1 for _ in CARD), 2, 3]


@pytest.mark.parametrize("fails_at", range(5))
def test_what_fails_in_the_middle_leaves_a_sound_registry_and_can_be_repeated(
    tmp_path: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = directory.write_atomic
    written: list[Path] = []

    def fail(path: Path, data: bytes, *, advice: str) -> None:
        if len(written) == fails_at:
            raise CacheError("the disk is full", advice)
        written.append(path)
        write(path, data, advice=advice)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_atomic", fail)
        with pytest.raises(CacheError, match="the disk is full; check that the registry's directory can be written"):
            add_bundles(tmp_path, "ours", [ONE])
    if fails_at:
        assert verify_registry(open_registry(str(tmp_path))).problems == ()
        assert open_registry(str(tmp_path)).manifest(H200).bundles == ()
    rows = add_bundles(tmp_path, "ours", [ONE])
    assert open_registry(str(tmp_path)).manifest(H200).bundles == tuple(rows)


# --- another writer


def numbered(root: Path) -> list[int]:
    """Which of the publisher's bundles there are, sorted."""
    assert verify_registry(open_registry(str(root))).problems == ()
    return numbers(contents(root))


def test_processes_that_publish_at_once_lose_nothing(tmp_path: Path) -> None:
    root = tmp_path / "registry"
    parts = [[10 * publisher + bundle for bundle in range(1, 6)] for publisher in range(4)]
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(publisher(str(root), part, folder=tmp_path)) for part in parts]
        done = [outcomes(process) for process in running]

    assert [outcome["changed"] for part in done for outcome in part] == [True] * 20
    assert numbered(root) == sorted(itertools.chain(*parts))
    assert open_registry(str(root)).manifest(H200).serial == 20


def test_who_is_killed_at_any_step_leaves_a_sound_registry_to_the_next(tmp_path: Path) -> None:
    """Between any two files and in the middle of each: what is there is the old manifest or the new one."""
    for number in (1, 2):
        add_bundles(tmp_path / "undisturbed", "ours", [bundle_of(number)], address="ours")
    for step in itertools.count():
        root = tmp_path / str(step)
        add_bundles(root, "ours", [bundle_of(1)], address="ours")
        with publisher(str(root), [2], folder=tmp_path, killed_at=step) as process:
            process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        assert numbered(root) == [1]
        assert [path for path in root.rglob("*") if is_temporary(path.name)] != []

        add_bundles(root, "ours", [bundle_of(2)], address="ours")
        assert contents(root) == contents(tmp_path / "undisturbed")
    assert step == len((*CARD, "bundle", "manifest"))
    assert numbered(root) == [1, 2]


def test_who_is_killed_while_it_makes_a_registry(tmp_path: Path) -> None:
    for step in range(5):
        root = tmp_path / str(step)
        with publisher(str(root), [1], folder=tmp_path, killed_at=step) as process:
            process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (root / "registry.json").exists() or numbered(root) == []

        add_bundles(root, "ours", [bundle_of(1)])
        assert numbered(root) == [1]


def test_a_write_on_top_of_what_is_no_longer_there_is_refused(tmp_path: Path) -> None:
    target = DirectoryTarget(tmp_path, "ours")
    before = target.snapshot()
    add_bundles(tmp_path, "ours", [ONE])
    there = contents(tmp_path)

    with pytest.raises(StaleError, match=r"^ours: somebody else has published meanwhile; try again$"):
        target.write({"file": b""}, before, "", create_pr=False)
    now = target.snapshot()
    with filelock.FileLock(tmp_path / ".fi-tunecache.lock"), pytest.raises(StaleError, match=r"^ours is being written"):
        target.write({"file": b""}, now, "", create_pr=False)
    assert contents(tmp_path) == there
    assert target.tree(now).read("README.md", 1 << 20) == there["README.md"]


def test_a_writer_that_does_not_end_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    add_bundles(tmp_path, "ours", [ONE])
    before = snapshot(tmp_path)
    with filelock.FileLock(tmp_path / ".fi-tunecache.lock"):
        with publisher(str(tmp_path), [1], folder=tmp_path, seconds=1) as process:
            (outcome,) = outcomes(process)
        assert outcome["said"] == f"{tmp_path} is being written by somebody else; try again"
        assert snapshot(tmp_path) == before
        assert [row.bundle_id for row in open_registry(str(tmp_path)).manifest(H200).bundles] == [
            write_bundle(ONE)[1][:16]
        ]
    add_bundles(tmp_path, "ours", [bundle_of(1)])
    assert len(open_registry(str(tmp_path)).manifest(H200).bundles) == 2


# --- what is refused, and nothing written


def _changed(**fields: object) -> Bundle:
    return msgspec.structs.replace(ONE, **fields)


def _with_facts(**facts: str) -> Environment:
    return Environment.from_metadata({**made.H200.metadata(), **facts})


@pytest.mark.parametrize(
    ("bundle", "error", "message"),
    [
        pytest.param(made.bundle([]), FormatError, "no entries", id="no entries"),
        pytest.param(_changed(environment=_with_facts(gpu="unknown")), FormatError, "missing: gpu", id="unknown fact"),
        pytest.param(
            _changed(environment=_with_facts(flashinfer_version="../up")),
            UsageError,
            "'../up' can't be the folder of a FlashInfer version",
            id="version that leads up",
        ),
        pytest.param(
            _changed(environment=_with_facts(gpu="量子")), UsageError, "can't be the folder of a device", id="no slug"
        ),
        pytest.param(
            _changed(entries={CUDNN.key.text: Entry(CUDNN.key, "Other", 0)}),
            FormatError,
            "a value names Other",
            id="runner",
        ),
        pytest.param(
            _changed(lookups=(Lookup((made.key(made.TINY),), 0),)),
            FormatError,
            "has no entry for its winner",
            id="lookup",
        ),
        pytest.param(
            _changed(lookups=(Lookup((CUDNN.key, Key("bf16_gemm", "A'B", CUDNN.key.profile, ())), 0),)),
            FormatError,
            "for a runner class",
            id="name of a runner",
        ),
        pytest.param(
            _changed(provenance=msgspec.structs.replace(ONE.provenance, workload=Workload(note="\x1b[2J"))),
            FormatError,
            "not one printable line",
            id="terminal escape",
        ),
        pytest.param(
            _changed(entries={CUDNN.key.text: Entry(CUDNN.key, CUDNN.runner, float("nan"))}), FormatError, "", id="NaN"
        ),
        pytest.param(
            _changed(entries={CUDNN.key.text: Entry(CUDNN.key, CUDNN.runner, 2**64)}), FormatError, "64 bits", id="huge"
        ),
        pytest.param(
            _changed(entries={"another text": CUDNN}), UsageError, "does not survive being written and read", id="names"
        ),
    ],
)
def test_a_bundle_that_can_not_be_added(
    tmp_path: Path, bundle: Bundle, error: type[FiTuneCacheError], message: str
) -> None:
    with pytest.raises(error) as caught:
        add_bundles(tmp_path / "registry", "ours", [TWO, bundle])

    assert message in str(caught.value)
    assert not (tmp_path / "registry").exists()


def _newer_format(root: Path) -> None:
    (root / "registry.json").write_text(json.dumps({"format": 2, "name": "ours"}))


def _damaged_manifest(root: Path) -> None:
    (root / str(H200) / "manifest.json").write_bytes(b"{")


def _newer_manifest(root: Path) -> None:
    (root / str(H200) / "manifest.json").write_bytes(b'{"format": 2}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(_newer_format, "registry format 2 is newer than 1; upgrade fi-tunecache", id="newer registry"),
        pytest.param(_newer_manifest, "registry format 2 is newer than 1; upgrade fi-tunecache", id="newer manifest"),
        pytest.param(_damaged_manifest, "manifest.json: not a JSON document", id="damaged manifest"),
    ],
)
def test_a_registry_that_can_not_be_added_to(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    add_bundles(tmp_path, "ours", [ONE])
    damage(tmp_path)
    before = contents(tmp_path)

    with pytest.raises(FormatError) as caught:
        add_bundles(tmp_path, "ours", [H100, TWO])
    assert message in str(caught.value)
    assert contents(tmp_path) == before


def test_a_card_that_is_no_text_is_not_replaced(tmp_path: Path) -> None:
    add_bundles(tmp_path, "ours", [ONE])
    (tmp_path / "README.md").write_bytes("# Größe".encode("latin-1"))
    before = contents(tmp_path)

    with pytest.raises(FormatError, match=r"README\.md: not UTF-8 text; save it as UTF-8$"):
        add_bundles(tmp_path, "ours", [TWO])
    assert contents(tmp_path) == before


def test_there_are_no_pull_requests(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^there is a directory: there are no pull requests; leave out --create-pr$"):
        commit(DirectoryTarget(tmp_path / "there", "there"), edit_of(1), "", deadline=Deadline(1), create_pr=True)
    assert not (tmp_path / "there").exists()


def test_a_directory_that_may_only_be_read(shared_path: Path) -> None:
    add_bundles(shared_path, "ours", [ONE])
    for path in (shared_path, *(path for path in shared_path.rglob("*") if path.is_dir())):
        path.chmod(0o555)
    before = snapshot(shared_path)

    with unprivileged():
        (row,) = add_bundles(shared_path, "ours", [ONE])
        assert row.bundle_id == write_bundle(ONE)[1][:16]
        with pytest.raises(
            CacheError, match=r"can't be written \(Permission denied\); check that the registry's direct"
        ):
            add_bundles(shared_path, "ours", [TWO])
    assert snapshot(shared_path) == before


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(
        CacheError, match=r"can't be written \(.*\); check that the registry's directory can be written"
    ):
        add_bundles(tmp_path / "file", "ours", [ONE])
