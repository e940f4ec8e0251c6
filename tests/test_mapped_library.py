"""Which cuBLASLt a process has mapped. That it tells the version of a real one is a test on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from fi_tunecache.mapped_library import mapped_cublas

LINE = "7f0000000000-7f0000001000 r-xp 00000000 00:2a 1234                       {path}\n"


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param([], id="none"),
        pytest.param(["/usr/lib/libc.so.6", ""], id="others"),
        pytest.param(["/a/libcublasLt.so.13", "/b/libcublasLt.so.12"], id="two"),
        pytest.param(["/nowhere/libcublasLt.so.13"], id="one that is gone"),
    ],
)
def test_it_can_not_be_told(tmp_path: Path, paths: list[str]) -> None:
    maps = tmp_path / "maps"
    maps.write_text("".join(LINE.format(path=path) for path in paths))
    assert mapped_cublas(maps) is None


def test_a_library_that_is_another(tmp_path: Path) -> None:
    """It has the name, and not the function."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    some = next(line.split(maxsplit=5)[5] for line in lines if line.endswith(".so.6") or ".so." in line)
    (tmp_path / "libcublasLt.so.13").symlink_to(some)
    maps = tmp_path / "maps"
    maps.write_text(LINE.format(path=tmp_path / "libcublasLt.so.13"))
    assert mapped_cublas(maps) is None


def test_this_process_has_none_and_there_may_be_no_such_file(tmp_path: Path) -> None:
    assert mapped_cublas() is None
    assert mapped_cublas(tmp_path / "maps") is None
