"""Writing a file in one step: whatever happens in the middle, there is the old content or the new, and nothing else."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import child
from unprivileged import unprivileged

from fi_tunecache.atomic_file import is_temporary, write_atomic
from fi_tunecache.errors import CacheError


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """The usual one, whatever the tests run under."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def write(path: Path, data: bytes = b"new", **options: int) -> None:
    write_atomic(path, data, advice="free space", **options)


def program(body: str, *arguments: object) -> list[str]:
    """A Python program that has ``write``, ``path`` (the first argument) and ``sys`` at hand."""
    head = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom fi_tunecache.atomic_file import write_atomic\n"
        "path = Path(sys.argv[1])\ndef write(data): write_atomic(path, data, advice='free space')\n"
    )
    return [sys.executable, "-c", head + body, *map(str, arguments)]


# --- what is there afterwards


@pytest.mark.parametrize(
    "data", [pytest.param(b"", id="empty"), pytest.param(b"new\r\n\x00\xff" * 100_000, id="600 kB")]
)
def test_a_new_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a" / "b" / "file"
    write(path, data)

    assert path.read_bytes() == data
    assert [item.name for item in path.parent.iterdir()] == ["file"]


def test_all_bytes_are_on_the_disk_before_the_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_size, (tmp_path / "file").exists()))

    monkeypatch.setattr(os, "fsync", watch)
    write(tmp_path / "file", b"new")

    assert synced == [(3, False)]


def test_an_old_file_is_replaced_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old content")
    with path.open("rb") as reader:
        write(path)

        assert reader.read() == b"old content"
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize(
    ("mode", "mask", "permissions"),
    [
        pytest.param(0o644, 0o022, 0o644, id="usual"),
        pytest.param(0o444, 0o022, 0o444, id="read-only"),
        pytest.param(0o644, 0o077, 0o600, id="private by the umask"),
    ],
)
def test_permissions(tmp_path: Path, mode: int, mask: int, permissions: int) -> None:
    os.umask(mask)
    path = tmp_path / "file"
    write(path, mode=mode)
    write(path, b"again", mode=mode)

    assert stat.S_IMODE(path.stat().st_mode) == permissions
    assert path.read_bytes() == b"again"


def test_a_link_is_replaced_by_the_file(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    write(tmp_path / "link")

    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"old"


# --- what can go wrong


def _directory(tmp_path: Path) -> Path:
    (tmp_path / "file").mkdir()
    return tmp_path / "file"


def _below_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"")
    return tmp_path / "file" / "below"


def _far_below_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"")
    return tmp_path / "file" / "below" / "it"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(_directory, "Is a directory", id="directory"),
        pytest.param(_below_a_file, "File exists: {tmp_path}/file", id="a file for its folder"),
        pytest.param(_far_below_a_file, "Not a directory: {tmp_path}/file/below", id="a file among its folders"),
        pytest.param(lambda tmp_path: tmp_path / ("x" * 300), "File name too long", id="long name"),
    ],
)
def test_a_path_that_can_not_be_written(tmp_path: Path, make: Callable[[Path], Path], reason: str) -> None:
    path = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(CacheError) as caught:
        write(path)
    assert str(caught.value) == f"{path} can't be written ({reason.format(tmp_path=tmp_path)}); free space"
    assert isinstance(caught.value.__cause__, OSError)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_may_not_be_written(shared_path: Path) -> None:
    (shared_path / "file").write_bytes(b"old")
    shared_path.chmod(0o555)

    with unprivileged(), pytest.raises(CacheError, match=r"/file can't be written \(Permission denied\); free space"):
        write(shared_path / "file")
    assert [(item.name, item.read_bytes()) for item in shared_path.iterdir()] == [("file", b"old")]


def test_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    full = program(
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: write(b'x' * 1_000_000)\n"
        "except OSError as error: print(type(error).__name__, error)",
        path,
    )
    output = subprocess.run(full, check=True, capture_output=True, text=True).stdout

    assert output == f"CacheError {path} can't be written (File too large); free space\n"
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("file", b"old")]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_ctrl_c_in_the_middle(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    where = os if step == "fsync" else Path
    monkeypatch.setattr(where, step, lambda *_: signal.raise_signal(signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        write(path)
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("file", b"old")]


@pytest.mark.parametrize("seconds", [0.0, 0.003, 0.01, 0.03])
def test_ctrl_c_at_any_time(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "file"
    command = program(
        "try:\n"
        "    print('go', flush=True)\n"
        "    for n in range(1_000_000): write(b'%d' % (n % 10) * 100_000)\n"
        "except KeyboardInterrupt: print('interrupted')",
        path,
    )
    with child(*command) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "go\n"
        time.sleep(seconds)
        writer.send_signal(signal.SIGINT)
        assert writer.communicate(timeout=60)[0] == "interrupted\n"
    assert [item for item in tmp_path.iterdir() if item != path] == []
    assert not path.exists() or (path.stat().st_size == 100_000 and len(set(path.read_bytes())) == 1)


def test_a_killed_writer_leaves_the_old_content_and_a_file_that_tells_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    killed = program("os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\nwrite(b'new' * 1000)", path)

    assert subprocess.run(killed, check=False).returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (left,) = (item.name for item in tmp_path.iterdir() if item != path)
    assert is_temporary(left)


def test_several_writers(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    body = "for _ in range(100): write(sys.argv[2].encode() * 100_000)"
    writers = [subprocess.Popen(program(body, path, letter)) for letter in "abc"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        content = path.read_bytes()
        assert len(content) == 100_000
        assert len(set(content)) == 1
        seen.add(content[:1])

    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert len(seen) > 1
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


# --- temporary files


@pytest.mark.parametrize(
    ("name", "temporary"),
    [
        (".0123456789abcdef.tmp", True),
        ("0123456789abcdef.tmp", False),
        (".0123456789abcdef.tmp~", False),
        (".0123456789ABCDEF.tmp", False),
        (".0123.tmp", False),
        (".0123456789abcdef.json", False),
        (".0123456789abcdef.tmp\n", False),
        ("a.tmp", False),
    ],
)
def test_the_name_of_a_temporary_file(name: str, temporary: bool) -> None:
    assert is_temporary(name) == temporary


def test_temporary_files_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    replace = Path.replace

    def watch(self: Path, target: Path) -> Path:
        names.extend(item.name for item in tmp_path.iterdir() if item.name != "file")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watch)
    for _ in range(3):
        write(tmp_path / "file")

    assert len(set(names)) == 3
    assert all(re.fullmatch(r"\.[0-9a-f]{16}\.tmp", name) and is_temporary(name) for name in names)
