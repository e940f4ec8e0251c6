"""The tree of errors: what each is, its exit code, and that its text can't break a line, a terminal or a pickle."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_tunecache import errors
from fi_tunecache.errors import (
    CacheError,
    FiTuneCacheError,
    FormatError,
    HardwareError,
    IntegrityError,
    NoMatchError,
    RegistryError,
    UsageError,
)

TREE = [
    pytest.param(UsageError, FiTuneCacheError, ValueError, 2, id="usage"),
    pytest.param(HardwareError, FiTuneCacheError, LookupError, 2, id="hardware"),
    pytest.param(CacheError, FiTuneCacheError, OSError, 2, id="cache"),
    pytest.param(NoMatchError, FiTuneCacheError, LookupError, 3, id="no match"),
    pytest.param(RegistryError, FiTuneCacheError, OSError, 4, id="registry"),
    pytest.param(FormatError, FiTuneCacheError, ValueError, 5, id="format"),
    pytest.param(IntegrityError, FormatError, ValueError, 5, id="integrity"),
]
EVERY_CLASS = [pytest.param(case.values[0], id=case.id) for case in TREE]


@pytest.mark.parametrize(("cls", "parent", "builtin", "exit_code"), TREE)
def test_the_tree(
    cls: type[FiTuneCacheError], parent: type[Exception], builtin: type[Exception], exit_code: int
) -> None:
    error = cls("no such thing", "name another")

    assert cls.__bases__[0] is parent
    assert isinstance(error, builtin)
    assert error.exit_code == exit_code


def test_the_tree_is_all_there_is() -> None:
    named = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}

    assert named == set(errors.__all__) == {case.values[0].__name__ for case in TREE} | {"FiTuneCacheError"}


@pytest.mark.parametrize("cls", EVERY_CLASS)
def test_the_text_is_the_problem_and_the_next_step(cls: type[FiTuneCacheError]) -> None:
    assert str(cls("no such thing", "name another")) == "no such thing; name another"
    assert str(cls("no such thing")) == "no such thing"
    assert cls("no such thing", "name another").args == ("no such thing",)
    assert traceback.format_exception_only(cls("no such thing")) == [
        f"{cls.__module__}.{cls.__name__}: no such thing\n"
    ]


def test_a_format_error_names_its_source_first() -> None:
    error = FormatError("not JSON", "write it again", source="a.json")

    assert str(error) == "a.json: not JSON; write it again"
    assert (error.problem, error.next_step, error.source) == ("a.json: not JSON", "write it again", "a.json")


@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])  # noqa: S301
@pytest.mark.parametrize(
    "error",
    [
        *(pytest.param(case.values[0]("no such thing", "name another"), id=case.id) for case in TREE),
        pytest.param(FormatError("not JSON", "write it again", source="a.json"), id="format, with its source"),
        pytest.param(
            IntegrityError("wrong", "fetch it again", source="a.json", expected="1", actual="2"),
            id="integrity, with what was compared",
        ),
    ],
)
def test_an_error_survives_pickling_and_copying(
    error: FiTuneCacheError, again: Callable[[FiTuneCacheError], FiTuneCacheError]
) -> None:
    restored = again(error)

    assert type(restored) is type(error)
    assert str(restored) == str(error)
    assert vars(restored) == vars(error)
    assert restored.args == error.args


def test_an_error_comes_back_from_another_process() -> None:
    program = (
        "import pickle, sys; from fi_tunecache.errors import RegistryError; "
        "sys.stdout.buffer.write(pickle.dumps(RegistryError('refused', 'log in')))"
    )
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout

    assert str(pickle.loads(output)) == "refused; log in"  # noqa: S301


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        pytest.param("two\nlines\r\nor three", "two lines or three", id="newlines"),
        pytest.param("tab\tand\x0bfeed\x0c.", "tab and feed .", id="other white space"),
        pytest.param("line\u2028paragraph\u2029next\x85.", "line paragraph next .", id="Unicode's line ends"),
        pytest.param("\x1b[31mred\x1b[0m", "\ufffd[31mred\ufffd[0m", id="terminal escapes"),
        pytest.param("a\x00b\x07c\x7f\x9b", "a\ufffdb\ufffdc\ufffd\ufffd", id="NUL, bell, DEL, C1"),
        pytest.param("evil\u202egpj.exe\u200b", "evil\ufffdgpj.exe\ufffd", id="text direction and zero width"),
        pytest.param("file\udcff", "file\ufffd", id="a name that is no UTF-8"),
        pytest.param("größe 速い 🚀", "größe 速い 🚀", id="whatever prints stays"),
    ],
)
@pytest.mark.parametrize("cls", EVERY_CLASS)
def test_text_from_outside_stays_on_one_line(cls: type[FiTuneCacheError], given: str, shown: str) -> None:
    error = cls(given, given)

    assert str(error) == f"{shown}; {shown}"
    assert error.args == (shown,)


@given(st.text(), st.text(), st.text())
def test_every_text_is_one_printable_line(problem: str, next_step: str, source: str) -> None:
    error = FormatError(problem, next_step, source=source)

    assert str(error).isprintable()
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301


@pytest.mark.parametrize("filler", ["x", "x " * 2, " \n"])
def test_a_huge_text_is_cut(filler: str) -> None:
    error = FormatError("start " + filler * 10_000_000, source="f")

    assert str(error).startswith("f: start")
    assert len(str(error)) <= 2000
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301


def test_a_text_is_cut_at_2000_characters() -> None:
    assert str(FormatError("x" * 2000)) == "x" * 2000
    assert str(FormatError("x" * 2001)) == "x" * 1999 + "…"


def test_an_os_error_without_a_number() -> None:
    error = RegistryError("refused")

    assert (error.errno, error.strerror, error.filename) == (None, None, None)
