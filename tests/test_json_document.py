"""JSON from outside: the limits, to the unit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from strategies import json_values

from fi_tunecache.errors import FormatError
from fi_tunecache.json_document import MAX_CONTAINERS, decode_json, naming, repeated_names


def decode(text: str) -> object:
    return decode_json(text.encode(), max_bytes=10_000, max_nesting=3, source="it")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param("7", 7, id="scalar"),
        pytest.param("[[[1]]]", [[[1]]], id="nested 3 deep"),
        pytest.param('{"a": {"b": []}}', {"a": {"b": []}}, id="nested 3 deep, the last one empty"),
        pytest.param("[9223372036854775807, -9223372036854775808]", [2**63 - 1, -(2**63)], id="64 bits"),
        pytest.param('{"a": 1, "a": 2}', {"a": 2}, id="the last of two equal names"),
        pytest.param('"\\u00e9\\u0000"', "é\0", id="escapes"),
    ],
)
def test_within_limits(text: str, value: object) -> None:
    assert decode(text) == value == json.loads(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("[[[[1]]]]", "nested deeper than 3", id="nested 4 deep"),
        pytest.param('{"a": [[{}]]}', "nested deeper than 3", id="nested 4 deep, the last one empty"),
        pytest.param("[" * 5000 + "]" * 5000, "nested deeper than 3", id="deeper than the stack"),
        pytest.param("9223372036854775808", "more than 64 bits", id="2**63"),
        pytest.param('{"a": [-9223372036854775809]}', "more than 64 bits", id="-2**63 - 1"),
        pytest.param("1" * 10_001, "10001 bytes are more than 10000", id="one byte too many"),
        pytest.param('"\\ud800"', "not a JSON document", id="lone surrogate"),
    ],
)
def test_beyond_limits(text: str, problem: str) -> None:
    with pytest.raises(FormatError, match=f"^it: .*{problem}") as caught:
        decode(text)

    assert caught.value.next_step


@given(json_values)
def test_agrees_with_the_standard_library(value: Any) -> None:
    text = json.dumps(value)

    assert repr(decode_json(text.encode(), max_bytes=100_000, max_nesting=20)) == repr(json.loads(text))


@pytest.mark.parametrize(
    ("outer", "inner", "shown"),
    [
        pytest.param("a.json", "", "a.json: broken; mend it", id="named"),
        pytest.param("a.json", "b.json", "b.json: broken; mend it", id="the inner name stays"),
        pytest.param("", "", "broken; mend it", id="no name"),
    ],
)
def test_an_error_names_its_source(outer: str, inner: str, shown: str) -> None:
    with pytest.raises(FormatError) as caught, naming(outer):
        raise FormatError("broken", "mend it", source=inner)

    assert str(caught.value) == shown
    assert caught.value.source == (inner or outer)


def test_more_lists_than_any_file_has_are_refused_before_they_take_memory() -> None:
    data = b'{"a":[' + b"[]," * MAX_CONTAINERS + b"[]]}"
    with pytest.raises(FormatError, match=f"more than {MAX_CONTAINERS} lists and objects"):
        decode_json(data, max_bytes=len(data), max_nesting=9)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        pytest.param(b"{}", (), id="empty"),
        pytest.param(b'{"a": {"b": 1}, "b": [{"b": 1}, {"b": 2}]}', (), id="one in each object"),
        pytest.param(b'{"a": 1, "b": 2, "a": 1}', ("a",), id="twice"),
        pytest.param(b'{"a": 1, "a": 2, "a": 3, "b": 1, "b": 2}', ("a", "b"), id="three times, and another"),
        pytest.param(b'[[{"x": {"a": 1, "\\u0061": 2}}]]', ("a",), id="deep and escaped"),
        pytest.param(b'{"": 1, "": 2}', ("",), id="an empty name"),
        pytest.param(b"1", (), id="no object"),
    ],
)
def test_names_that_stand_twice(data: bytes, names: tuple[str, ...]) -> None:
    assert repeated_names(data) == names
