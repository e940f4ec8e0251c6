"""The user cache: where it is, that it verifies what it holds, and that nothing about it blocks or breaks a start."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import pytest
from unprivileged import unprivileged

from fi_tunecache.errors import CacheError, UsageError
from fi_tunecache.user_cache import CachedFile, UserCache

DATA = b'{"a bundle": 1}'
SHA256 = hashlib.sha256(DATA).hexdigest()
DAY, HOUR = 86_400.0, 3600.0
ID = "0" * 32


@pytest.fixture
def cache(tmp_path: Path) -> UserCache:
    return UserCache(tmp_path / "cache")


# --- where it is


def test_the_directory_of_the_variable(tmp_path: Path) -> None:
    assert UserCache.locate({"FI_TUNECACHE_DIR": str(tmp_path / "here")}).root == tmp_path / "here"


def test_a_home_in_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    assert UserCache.locate({"FI_TUNECACHE_DIR": "~/here"}).root == tmp_path / "here"


@pytest.mark.parametrize("environ", [{}, {"FI_TUNECACHE_DIR": ""}])
def test_the_platforms_directory(environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")

    assert UserCache.locate(environ).root == tmp_path / "fi-tunecache"


@pytest.mark.parametrize("directory", ["cache", "./cache", "../cache", "."])
def test_a_relative_directory_is_refused(directory: str) -> None:
    with pytest.raises(
        UsageError, match=r"FI_TUNECACHE_DIR=.* is not an absolute path: .*; set FI_TUNECACHE_DIR to one"
    ):
        UserCache.locate({"FI_TUNECACHE_DIR": directory})


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)  # of no user in the password file

    with pytest.raises(
        UsageError, match=r"the platform's cache directory (needs a home|is not an abs).*; set FI_TUNECACHE"
    ):
        UserCache.locate({})
    for directory in ("~/cache", "~nobody-has-this-name/cache"):
        with pytest.raises(
            UsageError, match=r"FI_TUNECACHE_DIR=~.*/cache needs a home, and there is none; set FI_TUNECACHE"
        ):
            UserCache.locate({"FI_TUNECACHE_DIR": directory})


# --- reading and storing


def test_nothing_is_created_until_something_is_stored(cache: UserCache) -> None:
    assert cache.read(cache.selection_path("0" * 32)) is None
    assert cache.read_bundle(SHA256) is None
    assert cache.files() == []
    assert cache.prune(older_than=0) == []
    assert cache.clear() == []
    assert not cache.root.exists()


def test_what_is_stored_is_read(cache: UserCache) -> None:
    cache.store_bundle(SHA256, DATA)
    cache.store(cache.selection_path(ID), b"selection")
    cache.store(cache.resolution_path(ID), b"why")
    cache.store(cache.branch_path(ID), b"seen")
    cache.store(cache.workload_path(ID), b"looked up")

    assert cache.read_bundle(SHA256) == DATA
    assert cache.read(cache.selection_path(ID)) == b"selection"
    assert cache.notices == []
    assert [(file.kind, file.path.relative_to(cache.root).as_posix(), file.size) for file in cache.files()] == [
        ("branches", f"branches/{ID}.json", 4),
        ("bundles", f"bundles/{SHA256}.json", len(DATA)),
        ("selections", f"selections/{ID}.json", 9),
        ("selections", f"selections/{ID}.resolution.json", 3),
        ("workloads", f"workloads/{ID}.json", 9),
    ]


def test_a_bundle_is_read_only_and_written_once(cache: UserCache) -> None:
    cache.store_bundle(SHA256, DATA)
    before = cache.bundle_path(SHA256).stat()
    cache.store_bundle(SHA256, DATA)

    assert stat.S_IMODE(before.st_mode) & 0o222 == 0
    assert cache.bundle_path(SHA256).stat().st_ino == before.st_ino


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(DATA[:-1], id="truncated"),
        pytest.param(b"", id="empty"),
        pytest.param(DATA.replace(b"1", b"2"), id="changed"),
        pytest.param(DATA + b"\n", id="longer"),
    ],
)
def test_a_damaged_bundle_is_set_aside_and_can_be_stored_again(cache: UserCache, content: bytes) -> None:
    path = cache.bundle_path(SHA256)
    cache.store(path, content)

    assert cache.read_bundle(SHA256) is None
    assert cache.notices == [
        f"{path} was damaged (its sha256 is not its name); it is set aside as {SHA256}.json.corrupt"
    ]
    assert [(item.name, item.read_bytes()) for item in path.parent.iterdir()] == [(f"{SHA256}.json.corrupt", content)]
    cache.store_bundle(SHA256, DATA)
    assert cache.read_bundle(SHA256) == DATA


def test_a_damaged_bundle_that_can_not_be_set_aside_is_as_if_not_there(shared_path: Path) -> None:
    cache = UserCache(shared_path)
    path = cache.bundle_path(SHA256)
    cache.store(path, b"damaged")
    path.parent.chmod(0o555)

    with unprivileged():
        assert cache.read_bundle(SHA256) is None
    assert cache.notices == [
        f"{path} is damaged (its sha256 is not its name) and can't be set aside (Permission denied)"
    ]
    path.parent.chmod(0o755)


def test_a_file_that_can_not_be_read(cache: UserCache) -> None:
    cache.bundle_path(SHA256).mkdir(parents=True)

    with pytest.raises(CacheError, match=r"json can't be read \(Is a directory\); fix it or set FI_TUNECACHE_DIR"):
        cache.read(cache.bundle_path(SHA256))
    assert cache.read_bundle(SHA256) is None
    assert len(cache.notices) == 1


def test_a_read_only_cache_is_read(shared_path: Path) -> None:
    cache = UserCache(shared_path)
    cache.store_bundle(SHA256, DATA)
    for folder in (shared_path, shared_path / "bundles"):
        folder.chmod(0o555)

    with unprivileged():
        assert cache.read_bundle(SHA256) == DATA
        assert [file.path for file in cache.files()] == [cache.bundle_path(SHA256)]
        cache.store_bundle(SHA256, DATA)  # is there already
        with pytest.raises(
            CacheError, match=r"Permission denied.*; free space or fix its permissions, or set FI_TUNECA"
        ):
            cache.store(cache.selection_path("ab"), b"selection")
    for folder in (shared_path, shared_path / "bundles"):
        folder.chmod(0o755)


def test_a_cache_that_may_not_be_entered(shared_path: Path) -> None:
    cache = UserCache(shared_path / "cache")
    cache.store_bundle(SHA256, DATA)
    cache.root.chmod(0)

    with unprivileged():
        assert cache.read_bundle(SHA256) is None
        with pytest.raises(CacheError, match=r"bundles can't be listed \(Permission denied\); fix its permissions"):
            cache.files()
        with pytest.raises(CacheError, match=r"can't be written \(Permission denied"):
            cache.store_bundle(SHA256, DATA)
    cache.root.chmod(0o755)
    assert cache.notices == [
        f"{cache.bundle_path(SHA256)} can't be read (Permission denied); fix it or set FI_TUNECACHE_DIR"
    ]


def test_a_file_in_the_place_of_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = UserCache(tmp_path / "file" / "cache")

    assert cache.read_bundle(SHA256) is None
    assert cache.files() == []
    with pytest.raises(CacheError, match=r"can't be written \(Not a directory: .*\); free space or fix"):
        cache.store_bundle(SHA256, DATA)


# --- the lock


@contextmanager
def another_process_holds(cache: UserCache, name: str) -> Iterator[subprocess.Popen[str]]:
    program = (
        "import sys; from pathlib import Path; from fi_tunecache.user_cache import UserCache\n"
        "with UserCache(Path(sys.argv[1])).lock(sys.argv[2]) as held: print(held, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(cache.root), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        try:
            yield process
        finally:
            process.kill()


def test_one_process_at_a_time(cache: UserCache) -> None:
    with another_process_holds(cache, "work") as process:
        started = time.monotonic()
        with cache.lock("work", timeout=0.2) as held:
            assert not held
            assert time.monotonic() - started >= 0.2
        with cache.lock("other work", timeout=0.2) as held:
            assert held
        process.kill()
        process.wait()
        with cache.lock("work", timeout=30) as held:
            assert held


def test_waiting_ends_with_the_other_process(cache: UserCache) -> None:
    with another_process_holds(cache, "work") as process:
        assert process.stdin is not None
        threading.Timer(0.2, process.stdin.close).start()
        with cache.lock("work", timeout=60) as held:
            assert held


def test_a_killed_process_blocks_nobody(cache: UserCache) -> None:
    with another_process_holds(cache, "work") as process:
        process.kill()
        process.wait()
        assert (cache.root / "locks" / "work.lock").exists()
        with cache.lock("work", timeout=30) as held:
            assert held


def test_a_lock_is_released_and_its_file_stays(cache: UserCache) -> None:
    for _ in range(2):
        with cache.lock("work", timeout=0) as held:
            assert held
            assert (cache.root / "locks" / "work.lock").is_file()
    with pytest.raises(ZeroDivisionError), cache.lock("work", timeout=0):
        _ = 1 / 0
    with cache.lock("work", timeout=0) as held:
        assert held
    assert (cache.root / "locks" / "work.lock").is_file()


def test_where_no_lock_can_be_made_the_work_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = UserCache(tmp_path / "file")

    with cache.lock("work") as held:
        assert not held
    with pytest.raises(ZeroDivisionError) as caught, cache.lock("work"):
        _ = 1 / 0
    assert caught.value.__context__ is None


def test_a_read_only_cache_does_not_stop_the_work(shared_path: Path) -> None:
    with unprivileged(), UserCache(shared_path).lock("work") as held:
        assert not held
    assert list(shared_path.iterdir()) == []


def test_a_file_system_without_locks(cache: UserCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: filelock.FileLock) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")  # as filelock until 3.2x does

    monkeypatch.setattr(filelock.FileLock, "_acquire", refuse)
    with cache.lock("work") as held:
        assert not held


# --- listing, pruning, clearing


def put(cache: UserCache, name: str, age: float, now: float = 1e9) -> Path:
    path = cache.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(name.encode())
    os.utime(path, (now - age, now - age))
    return path


TEMPORARY = ".0123456789abcdef.tmp"


OLD, NEW = "1" * 64, "2" * 64


def names(cache: UserCache) -> list[str]:
    return sorted(path.relative_to(cache.root).as_posix() for path in cache.root.rglob("*") if path.is_file())


REPOSITORY = "hub-cache/datasets--team--tuned"
IN_REPOSITORY = ["blobs/abc", "blobs/def", "snapshots/123/0.7.4/nvidia-h200/manifest.json"]


def filled(cache: UserCache) -> None:
    """What a cache may hold after a while, at Unix time 1e9: ours, old and new, and what is not ours."""
    put(cache, f"bundles/{OLD}.json", 31 * DAY)
    put(cache, f"bundles/{OLD}.json.corrupt", 31 * DAY)
    put(cache, f"bundles/{NEW}.json", 29 * DAY)
    put(cache, f"selections/{ID}.json", 31 * DAY)
    put(cache, f"selections/{ID}.resolution.json", 31 * DAY)
    put(cache, f"branches/{ID}.json", 29 * DAY)
    put(cache, f"workloads/{ID}.json", 31 * DAY)
    put(cache, f"workloads/{ID}.json.corrupt", 29 * DAY)
    for age, name in enumerate(IN_REPOSITORY):
        put(cache, f"{REPOSITORY}/{name}", (31 + age) * DAY)
    put(cache, f"bundles/{TEMPORARY}", 2 * HOUR)
    put(cache, f"selections/{TEMPORARY}", HOUR / 2)
    for name in NOT_OURS:
        put(cache, name, 99 * DAY)


NOT_OURS = [
    "bundles/notes.txt",
    "bundles/sub/" + "3" * 64 + ".json",
    "hub-cache/.locks/datasets--team--tuned/abc.lock",
    "hub-cache/datasets--a-file",
    "hub-cache/models--x/blobs/abc",
    "locks/old.lock",
    f"locks/{TEMPORARY}",
    "selections/mine.json",
    "workloads/llama.json",
    "not ours",
]
"""Such as a model in a Hugging Face cache that shares the directory."""


def test_the_files_of_a_cache(cache: UserCache) -> None:
    filled(cache)
    (cache.root / "bundles" / f"{'4' * 64}.json").symlink_to(f"{OLD}.json")

    assert [file.path.relative_to(cache.root).as_posix() for file in cache.files()] == [
        f"branches/{ID}.json",
        f"bundles/{OLD}.json",
        f"bundles/{OLD}.json.corrupt",
        f"bundles/{NEW}.json",
        REPOSITORY,
        f"selections/{ID}.json",
        f"selections/{ID}.resolution.json",
        f"workloads/{ID}.json",
        f"workloads/{ID}.json.corrupt",
    ]
    assert cache.files()[3] == CachedFile("bundles", cache.bundle_path(NEW), 77, 1e9 - 29 * DAY)


def test_a_repository_of_a_hub_counts_as_one_file(cache: UserCache, tmp_path: Path) -> None:
    """Of the size of its files, as old as the newest; links, as huggingface_hub makes them, are not followed."""
    filled(cache)
    (tmp_path / "outside").write_bytes(b"outside" * 1000)
    (cache.root / REPOSITORY / "snapshots/123/outside").symlink_to(tmp_path / "outside")
    os.utime(cache.root / REPOSITORY / "snapshots/123/outside", (0, 0), follow_symlinks=False)

    (found,) = (file for file in cache.files() if file.kind == "hub")
    size = sum(len(f"{REPOSITORY}/{name}") for name in IN_REPOSITORY)
    assert found == CachedFile("hub", cache.root / REPOSITORY, size, 1e9 - 31 * DAY)
    cache.clear()
    assert (tmp_path / "outside").exists()


def test_pruning(cache: UserCache) -> None:
    filled(cache)
    removed = cache.prune(older_than=30 * DAY, now=1e9)

    assert [file.path.name for file in removed] == [
        f"{OLD}.json",
        f"{OLD}.json.corrupt",
        f"{ID}.json",
        f"{ID}.resolution.json",
        f"{ID}.json",
        "datasets--team--tuned",
    ]
    at_work = f"selections/{TEMPORARY}"
    kept = [f"branches/{ID}.json", f"bundles/{NEW}.json", f"workloads/{ID}.json.corrupt"]
    assert names(cache) == sorted([*kept, at_work, *NOT_OURS])


def test_clearing_removes_ours_and_nothing_else(cache: UserCache) -> None:
    filled(cache)
    now = time.time()
    os.utime(cache.root / "selections" / TEMPORARY, (now, now))
    os.utime(cache.bundle_path(NEW), (now + DAY, now + DAY))  # a clock that was wrong

    assert len(cache.clear()) == 9
    assert names(cache) == sorted([f"selections/{TEMPORARY}", *NOT_OURS])


def test_a_link_is_not_followed(cache: UserCache, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{OLD}.json").write_bytes(b"")
    (outside / f"{ID}.json").write_bytes(b"")
    put(cache, f"bundles/{NEW}.json", DAY)
    (cache.root / "bundles" / f"{OLD}.json").symlink_to(outside / f"{OLD}.json")
    (cache.root / "selections").symlink_to(outside)
    (outside / "datasets--team--tuned").mkdir()
    (outside / "datasets--team--tuned" / "blob").touch()
    (cache.root / "hub-cache").symlink_to(outside)
    assert len(cache.files()) == 1
    (cache.root / "hub-cache").unlink()
    (cache.root / "hub-cache").mkdir()
    (cache.root / "hub-cache" / "datasets--team--tuned").symlink_to(outside / "datasets--team--tuned")

    assert [file.path.name for file in cache.clear()] == [f"{NEW}.json"]
    assert sorted(path.name for path in outside.rglob("*")) == sorted(
        [f"{OLD}.json", f"{ID}.json", "datasets--team--tuned", "blob"]
    )


@pytest.mark.parametrize("act", [UserCache.files, UserCache.clear, lambda cache: cache.prune(older_than=0)])
def test_another_process_removes_files_at_the_same_time(
    cache: UserCache, act: Callable[[UserCache], list[CachedFile]], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(cache)
    listing = Path.iterdir

    def list_and_remove(folder: Path) -> Iterator[Path]:
        children = list(listing(folder))
        for child in children:
            if child.is_file():
                child.unlink()
            elif child.name.startswith("datasets--"):
                shutil.rmtree(child)
        return iter(children)

    monkeypatch.setattr(Path, "iterdir", list_and_remove)

    assert act(cache) == []


def test_a_repository_loses_files_while_it_is_looked_at(cache: UserCache, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(cache)
    walking = os.walk

    def walk_and_remove(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for found in walking(folder):
            shutil.rmtree(folder, ignore_errors=True)
            yield found

    monkeypatch.setattr(os, "walk", walk_and_remove)
    assert "hub" not in [file.kind for file in cache.files() if file.size]


def test_a_file_that_can_not_be_removed(shared_path: Path) -> None:
    cache = UserCache(shared_path)
    cache.store_bundle(SHA256, DATA)
    (shared_path / "bundles").chmod(0o555)

    with (
        unprivileged(),
        pytest.raises(CacheError, match=r"json can't be removed \(Permission denied\); fix its permiss"),
    ):
        cache.clear()
    (shared_path / "bundles").chmod(0o755)
