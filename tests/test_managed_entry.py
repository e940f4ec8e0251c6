"""One entry of a managed store: its file's name and content."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import entries, extra_values, json_values, short_text

from fi_tunecache.entry import Entry
from fi_tunecache.errors import FormatError
from fi_tunecache.key import Dtype, Key
from fi_tunecache.managed_entry import (
    MAX_ENTRY_BYTES,
    ProtocolRecord,
    decode_key_fields,
    encode_key_fields,
    entry_file,
    entry_file_name,
    read_entry,
    record_file,
)

KEY = "('mm', 'Runner', ((1, 2048), (0,)), (torch.bfloat16, True))"
KEY_FIELDS = {
    "__tuple__": [
        "mm",
        "Runner",
        {"__tuple__": [{"__tuple__": [1, 2048]}, {"__tuple__": [0]}]},
        {"__tuple__": [{"__dtype__": "bfloat16"}, True]},
    ]
}
POLICY = ["cuda_graph_profile_replays", 1, "l2_cache_policy", "hot"]
DOCUMENT = {"key": KEY, "runner": "Runner", "tactic": [0, []], "profiling_policy": POLICY, "key_fields": KEY_FIELDS}
ENTRY = Entry(Key.parse(KEY), "Runner", (0, ()), tuple(POLICY))

RECORD_KEY = "('__protocol__', 'moe::mega', '{\"tokens\":8}')"
RECORD_DOCUMENT = {
    "key": RECORD_KEY,
    "runner": "moe::mega",
    "tactic": {"knobs": {"stages": [1, 2]}},
    "key_fields": {"__tuple__": ["__protocol__", "moe::mega", '{"tokens":8}']},
}
RECORD = ProtocolRecord("moe::mega", '{"tokens":8}', {"knobs": {"stages": [1, 2]}})


def read(document: dict[str, Any], **changes: Any) -> Entry | ProtocolRecord:
    changed = {name: value for name, value in {**document, **changes}.items() if value is not ...}
    return read_entry(json.dumps(changed).encode(), entry_file_name(str(changed.get("key"))), source="it")


def test_the_name_of_a_real_file() -> None:
    key = (
        "('fp8_gemm', 'CudnnFp8GemmRunner', ((1, 1, 2048), (1, 2048, 4096), (1,), (1,), (1, -1, 4096), (-1,)),"
        " (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16))"
    )
    assert entry_file_name(key) == "26a13c6c453ebb9827244837.json"


@pytest.mark.parametrize(
    ("changes", "entry"),
    [
        pytest.param({}, ENTRY, id="as 0.7.1 and newer write it"),
        pytest.param({"profiling_policy": ...}, Entry(ENTRY.key, "Runner", (0, ())), id="without policy, as 0.7.0"),
        pytest.param({"profiling_policy": None}, Entry(ENTRY.key, "Runner", (0, ())), id="policy null"),
        pytest.param({"key_fields": ...}, ENTRY, id="without key_fields: served, not preloaded"),
        pytest.param({"tactic": -1}, Entry(ENTRY.key, "Runner", -1, tuple(POLICY)), id="the default"),
        pytest.param(
            {"runner": "Other"}, Entry(ENTRY.key, "Other", (0, ()), tuple(POLICY)), id="another runner than the key's"
        ),
        pytest.param({"hint": 7}, ENTRY, id="a field that FlashInfer ignores"),
        pytest.param(
            {"fi_tunecache": "3f9a1c0e52d77b10"},
            Entry(ENTRY.key, "Runner", (0, ()), tuple(POLICY), {"fi_tunecache": "3f9a1c0e52d77b10"}),
            id="our mark",
        ),
    ],
)
def test_an_entry(changes: dict[str, Any], entry: Entry) -> None:
    assert read(DOCUMENT, **changes) == entry


@pytest.mark.parametrize(
    ("changes", "record"),
    [
        pytest.param({}, RECORD, id="as 0.7.4 writes it"),
        pytest.param({"key_fields": ...}, RECORD, id="without key_fields"),
        pytest.param(
            {"fi_tunecache": "b"}, ProtocolRecord(RECORD.namespace, RECORD.key, RECORD.value, "b"), id="our mark"
        ),
    ],
)
def test_a_record(changes: dict[str, Any], record: ProtocolRecord) -> None:
    assert read(RECORD_DOCUMENT, **changes) == record


@pytest.mark.parametrize(
    ("document", "changes", "problem"),
    [
        pytest.param(DOCUMENT, {"key": ...}, "key, runner or tactic is missing", id="no key"),
        pytest.param(DOCUMENT, {"runner": 0}, "key, runner or tactic is missing", id="runner a position"),
        pytest.param(DOCUMENT, {"tactic": ...}, "key, runner or tactic is missing", id="no tactic"),
        pytest.param(DOCUMENT, {"tactic": {"m": 1}}, "a tactic holds a dict", id="tactic an object"),
        pytest.param(DOCUMENT, {"tactic": 2**63}, "more than 64 bits", id="tactic of more than 64 bits"),
        pytest.param(DOCUMENT, {"profiling_policy": "hot"}, "a policy is a str, not a list", id="policy a string"),
        pytest.param(DOCUMENT, {"key": "mm", "key_fields": ...}, "not a key as FlashInfer writes it", id="not a key"),
        pytest.param(
            DOCUMENT, {"key": KEY.replace("2048", "4096")}, "key_fields name another key than", id="key_fields differ"
        ),
        pytest.param(DOCUMENT, {"key_fields": KEY}, "key_fields name another key than", id="key_fields a text"),
        pytest.param(DOCUMENT, {"key_fields": {"__set__": []}}, "key_fields hold what", id="key_fields not known"),
        pytest.param(RECORD_DOCUMENT, {"runner": "other"}, "not the key of a record in the namespace", id="namespace"),
        pytest.param(
            RECORD_DOCUMENT,
            {"key": "('__protocol__', '', 'k')", "key_fields": ..., "runner": ""},
            "not the key of a record in the namespace ''",
            id="namespace empty",
        ),
        pytest.param(
            RECORD_DOCUMENT,
            {"key": "('__protocol__', 'moe::mega', 1)", "key_fields": ...},
            "not the key of a record",
            id="a record's key that is no string",
        ),
        pytest.param(
            RECORD_DOCUMENT,
            {"key": f"('__protocol__', 'moe::mega', '{'k' * 8192}')", "key_fields": ...},
            "not the key of a record",
            id="a record's key of more than 8 KiB",
        ),
    ],
)
def test_refused(document: dict[str, Any], changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(document, **changes)

    assert str(caught.value).startswith("it: ")
    assert problem in str(caught.value)


def test_an_entry_under_another_name_is_never_found() -> None:
    with pytest.raises(FormatError, match=f"FlashInfer looks for this key in {entry_file_name(KEY)}"):
        read_entry(json.dumps(DOCUMENT).encode(), entry_file_name("another"))


def test_a_file_that_is_too_large() -> None:
    with pytest.raises(FormatError, match="bytes are more than"):
        read_entry(b" " * (MAX_ENTRY_BYTES + 1), "name.json")


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"__tuple__": 1}, id="tuple of no list"),
        pytest.param({"__tuple__": [], "more": 1}, id="tuple and more"),
        pytest.param({"__dtype__": 1}, id="dtype of no name"),
        pytest.param({"__dtype__": "a, b"}, id="dtype of two names"),
        pytest.param({"__dtype__": "uint8", "__tuple__": []}, id="both"),
        pytest.param({}, id="neither"),
        pytest.param([{"__tuple__": [{}]}], id="deep inside"),
    ],
)
def test_key_fields_that_flashinfer_does_not_write(value: object) -> None:
    with pytest.raises(FormatError, match="key_fields hold what FlashInfer does not write"):
        decode_key_fields(value)


def test_key_fields() -> None:
    fields = ("mm", "Runner", ((1, 2048), (0,)), (Dtype("bfloat16"), True))

    assert encode_key_fields(fields) == KEY_FIELDS
    assert decode_key_fields(KEY_FIELDS) == fields


@given(extra_values)
def test_decoding_key_fields_is_the_inverse_of_encoding(fields: Any) -> None:
    encoded = json.loads(json.dumps(encode_key_fields(fields)))

    assert repr(decode_key_fields(encoded)) == repr(fields)


def test_the_files_content() -> None:
    name, data = entry_file(ENTRY, None)

    assert name == entry_file_name(KEY)
    assert data.decode("ascii") == json.dumps(DOCUMENT, indent=2, sort_keys=True)
    assert record_file(RECORD, None) == (
        entry_file_name(RECORD_KEY),
        json.dumps(RECORD_DOCUMENT, indent=2, sort_keys=True).encode(),
    )


@pytest.mark.parametrize(
    ("own", "given_mark", "written"),
    [
        pytest.param(None, None, None, id="none"),
        pytest.param(None, "new", "new", id="given"),
        pytest.param("old", None, "old", id="its own stays"),
        pytest.param("old", "new", "new", id="given takes the place of its own"),
    ],
)
def test_the_mark(own: str | None, given_mark: str | None, written: str | None) -> None:
    selection = {"time_ms": 1.0} if own is None else {"time_ms": 1.0, "fi_tunecache": own}
    entry = Entry(ENTRY.key, "Runner", 0, None, selection)
    record = ProtocolRecord("n", "k", 1, own)

    for _, data in (entry_file(entry, given_mark), record_file(record, given_mark)):
        assert json.loads(data).get("fi_tunecache") == written


def test_what_json_has_no_form_for() -> None:
    with pytest.raises(FormatError, match="JSON has no form"):
        record_file(ProtocolRecord("n", "k", float("nan")), None)


@given(entries(), st.none() | short_text.filter(bool))
def test_reading_is_the_inverse_of_writing(entry: Entry, mark: str | None) -> None:
    name, data = entry_file(entry, mark)

    kept = mark or (entry.selection or {}).get("fi_tunecache")
    selection = None if kept is None else {"fi_tunecache": kept}
    expected = Entry(entry.key, entry.runner, entry.tactic, entry.policy, selection)
    assert repr(read_entry(data, name)) == repr(expected)


@given(short_text.filter(bool), st.text(), json_values)
def test_reading_a_record_is_the_inverse_of_writing(namespace: str, key: str, value: Any) -> None:
    record = ProtocolRecord(namespace, key, value)
    name, data = record_file(record, None)

    assert read_entry(data, name) == record


@given(st.binary(max_size=100) | st.dictionaries(short_text, json_values).map(lambda value: json.dumps(value).encode()))
def test_whatever_comes_is_read_or_refused(data: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        read_entry(data, "name.json")

    assert "\n" not in str(caught.value)
