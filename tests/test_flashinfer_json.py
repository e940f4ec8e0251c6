"""FlashInfer's v1 cache file: what is read, what is refused, and that nothing gets lost in between."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import entry_lists, environments, json_values, short_text

from fi_tunecache.entry import Entry, LegacyEntry
from fi_tunecache.errors import FormatError
from fi_tunecache.flashinfer_json import MAX_ENTRIES, MAX_FILE_BYTES, CacheFile, read_cache_file, write_cache_file
from fi_tunecache.key import Dtype, Key

DATA = Path(__file__).parent / "data"
REAL_FILES = sorted(DATA.glob("*/*.v1.json"))

KEY = "('mm', 'Runner', ((1, 2048), (0,)), (torch.bfloat16, True))"
OLD_KEY = "('mm', 'Runner', ((1, 2048), (0,)))"
POLICY = ["cuda_graph_profile_replays", 1, "l2_cache_policy", "cold-chain:8"]
SELECTION = {"time_ms": 0.5, "runner_up_ms": None, "margin": 0.1, "candidates": 8}
METADATA = {"flashinfer_version": "0.7.4", "gpu": "NVIDIA H200"}


def one_entry(value: object) -> bytes:
    return json.dumps({KEY: value}).encode()


def as_flashinfer_reads(data: bytes) -> str:
    """The rules of ``AutoTuner.load_configs``, 0.7.4; as text, since True == 1 == 1.0."""

    def tactic(value: Any) -> Any:
        return tuple(tactic(item) for item in value) if isinstance(value, list) else value

    configs = json.loads(data)
    fields = [configs.pop(name, None) for name in ("_metadata", "_generation")]
    records = configs.pop("_records", {})
    read = {
        key: (
            value[0],
            tactic(value[1]),
            tuple(value[2]) if len(value) > 2 else None,
            json.dumps(value[3], sort_keys=True) if len(value) > 3 and isinstance(value[3], dict) else None,
        )
        for key, value in configs.items()
    }
    return repr((json.dumps([*fields, records], sort_keys=True), sorted(read.items())))


# --- reading


def test_there_are_real_files() -> None:
    assert [path.name for path in REAL_FILES] == ["fp8-8k.v1.json", "gemm-a.v1.json"]


def test_a_real_file() -> None:
    cache_file = read_cache_file((DATA / "h200-flashinfer-0.7.4" / "gemm-a.v1.json").read_bytes())

    assert len(cache_file.entries) == 90
    assert cache_file.environment().gpu == "NVIDIA H200"
    assert cache_file.environment().undetermined() == ()
    assert len(cache_file.generation or "") == 64
    assert cache_file.records == {}
    assert cache_file.legacy == ()
    assert cache_file.entries[0] == Entry(
        key=Key(
            "bf16_gemm",
            "CublasltBf16GemmRunner",
            ((1, 2048), (2048, 4096), (0,), (0,), (-1, 4096), (-1,)),
            (Dtype("bfloat16"), Dtype("bfloat16"), Dtype("bfloat16"), True, True),
        ),
        runner="CublasltBf16GemmRunner",
        tactic=0,
        policy=("cuda_graph_profile_replays", 1, "l2_cache_policy", "cold-chain:8"),
        selection={"time_ms": 0.00836, "runner_up_ms": 0.008864, "margin": 0.060287, "candidates": 8},
    )
    assert cache_file.entries[0].time_ms == 0.00836


@pytest.mark.parametrize(
    ("value", "entry"),
    [
        pytest.param(["Runner", 3], Entry(Key.parse(KEY), "Runner", 3), id="until 0.7.0"),
        pytest.param(["Runner", 3, POLICY], Entry(Key.parse(KEY), "Runner", 3, tuple(POLICY)), id="0.7.1: policy"),
        pytest.param(
            ["Runner", 3, POLICY, SELECTION],
            Entry(Key.parse(KEY), "Runner", 3, tuple(POLICY), SELECTION),
            id="0.7.4: selection",
        ),
        pytest.param(["Runner", -1, []], Entry(Key.parse(KEY), "Runner", -1, ()), id="default tactic, empty policy"),
        pytest.param(
            ["Runner", [128, [1, 2], "x", None]],
            Entry(Key.parse(KEY), "Runner", (128, (1, 2), "x", None)),
            id="compound tactic",
        ),
        pytest.param(
            ["Other", 3], Entry(Key.parse(KEY), "Other", 3), id="another runner: loaded, never served, kept to be told"
        ),
    ],
)
def test_an_entry(value: object, entry: Entry) -> None:
    assert read_cache_file(one_entry(value)).entries == (entry,)


def test_policies_that_are_equal_but_not_the_same_stay_apart() -> None:
    other = KEY.replace("2048", "4096")
    cache_file = read_cache_file(json.dumps({KEY: ["r", 0, [1]], other: ["r", 0, [True]]}).encode())

    assert [repr(entry.policy) for entry in cache_file.entries] == ["(1,)", "(True,)"]


def test_keys_without_extras_are_told_apart() -> None:
    cache_file = read_cache_file(json.dumps({OLD_KEY: ["Runner", [1, 2]], KEY: ["Runner", 3]}).encode())

    assert cache_file.legacy == (LegacyEntry(OLD_KEY, "Runner", (1, 2)),)
    assert [entry.tactic for entry in cache_file.entries] == [3]


def test_fields_beside_the_entries() -> None:
    document = {"_metadata": METADATA, "_records": {"trtllm_moe_da": {"k": [1]}}, "_generation": "ab"}

    assert read_cache_file(json.dumps(document).encode()) == CacheFile(
        entries=(), metadata=METADATA, records={"trtllm_moe_da": {"k": [1]}}, generation="ab"
    )
    assert read_cache_file(b'{"_generation": null}') == CacheFile(entries=())


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


REFUSED = [
    pytest.param(b"", "the file is empty", id="empty"),
    pytest.param(b" \n", "not a JSON document", id="blank"),
    pytest.param(b"{}{}", "not a JSON document", id="two documents"),
    pytest.param(one_entry(["r", 1])[:-3], "not a JSON document", id="truncated"),
    pytest.param(b"\xef\xbb\xbf{}", "byte order mark", id="byte order mark"),
    pytest.param('{"é": 1}'.encode("latin-1"), "not a JSON document", id="not UTF-8"),
    pytest.param(b"<html>", "not a JSON document", id="HTML"),
    pytest.param(b"[]", "a JSON list, not an object", id="list"),
    pytest.param(b"null", "not an object", id="null"),
    pytest.param(b" " * (MAX_FILE_BYTES + 1), f"are more than {MAX_FILE_BYTES}", id="too large"),
    pytest.param(f'{{"{KEY}": ["r", {nested(50_000)}]}}'.encode(), "nested deeper", id="exhausts the stack"),
    pytest.param(one_entry(["r", json.loads(nested(17))]), "nested deeper", id="tactic nested deeper than 16"),
    pytest.param(f'{{"_records": {nested(18)}}}'.encode(), "nested deeper", id="records nested deeper than 18"),
    pytest.param(one_entry(["r", float("nan")]), "not a JSON document", id="NaN"),
    pytest.param(one_entry(["r", float("inf")]), "not a JSON document", id="Infinity"),
    pytest.param(f'{{"{KEY}": ["r", 1e999]}}'.encode(), "not a JSON document", id="float that overflows"),
    pytest.param(one_entry(["r", 2**63]), "more than 64 bits", id="tactic of more than 64 bits"),
    pytest.param(one_entry(["r", 0, [-(2**63) - 1]]), "more than 64 bits", id="policy of more than 64 bits"),
    pytest.param(one_entry(["r", 0, [], {"x": [2**63]}]), "more than 64 bits", id="selection of more than 64 bits"),
    pytest.param(b'{"_records": {"x": 9223372036854775808}}', "more than 64 bits", id="records of more than 64 bits"),
    pytest.param(
        json.dumps({f"('m', 'r', (({i},),), ())": ["r", 0] for i in range(MAX_ENTRIES + 1)}).encode(),
        "100001 entries are more than 100000",
        id="too many entries",
    ),
    pytest.param(b'{"_schema": {"x": 1}}', "_schema is not a field that is known", id="field that is not known"),
    pytest.param(b'{"_schema": ["r", 0]}', "_schema is not a field that is known", id="field that looks like an entry"),
    pytest.param(b'{"_metadata": null}', "_metadata is a NoneType, not an object", id="metadata null"),
    pytest.param(b'{"_metadata": ["0.7.4"]}', "_metadata is a list, not an object", id="metadata a list"),
    pytest.param(b'{"_records": []}', "_records is a list, not an object", id="records a list"),
    pytest.param(b'{"_generation": 7}', "_generation is a int, not a string", id="generation a number"),
    pytest.param(b'{"mm": ["r", 0]}', "not a key as FlashInfer writes it", id="not a key"),
    pytest.param(one_entry({"runner": "r"}), "not a list of runner and tactic", id="value an object"),
    pytest.param(one_entry("rt"), "not a list of runner and tactic", id="value a string"),
    pytest.param(one_entry([]), "not a list of runner and tactic", id="value empty"),
    pytest.param(one_entry(["r"]), "not a list of runner and tactic", id="no tactic"),
    pytest.param(one_entry([0, 5]), "not a list of runner and tactic", id="runner a position"),
    pytest.param(one_entry(["r", {"m": 1}]), "a tactic holds a dict", id="tactic an object"),
    pytest.param(one_entry(["r", 0, None]), "a policy is a NoneType, not a list", id="policy null"),
    pytest.param(one_entry(["r", 0, "hot"]), "a policy is a str, not a list", id="policy a string"),
    pytest.param(one_entry(["r", 0, {}]), "a policy is a dict, not a list", id="policy an object"),
    pytest.param(one_entry(["r", 0, [["hot"]]]), "a policy holds a list", id="policy nested"),
    pytest.param(one_entry(["r", 0, [], None]), "a selection is a NoneType, not an object", id="selection null"),
    pytest.param(one_entry(["r", 0, [], {}, 1]), "has 5 elements; four are known", id="fifth element"),
]


@pytest.mark.parametrize(("data", "problem"), REFUSED)
def test_refused(data: bytes, problem: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_cache_file(data, source="cache.json")

    assert problem in str(caught.value)
    assert str(caught.value).startswith("cache.json: ")
    assert "\n" not in str(caught.value)


def test_a_bad_entry_is_named() -> None:
    with pytest.raises(FormatError, match=r"^a policy is a NoneType, not a list, at \('mm', 'Runner'"):
        read_cache_file(one_entry(["r", 0, None]))


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps({KEY: value}).encode()))
def test_whatever_comes_is_read_or_refused(data: bytes) -> None:
    assert "\n" not in refusal(data)


@given(st.data())
def test_a_damaged_real_file_is_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(REAL_FILES[0].read_bytes()[:2000])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    assert "\n" not in refusal(bytes(content) + b"}")


def refusal(data: bytes) -> str:
    try:
        read_cache_file(data)
    except FormatError as error:
        return str(error)
    return ""


# --- the environment


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        pytest.param(None, "nobody can say where it was tuned", id="none: FlashInfer takes it everywhere"),
        pytest.param({"gpu": "*"}, "wildcard", id="wildcard: FlashInfer takes it everywhere"),
        pytest.param({"gpu": 7}, "gpu is a int, not a string", id="not a string"),
    ],
)
def test_no_environment_is_known(metadata: dict[str, Any] | None, problem: str) -> None:
    cache_file = CacheFile(entries=(), metadata=metadata)

    with pytest.raises(FormatError, match=problem):
        cache_file.environment("cache.json")
    with pytest.raises(FormatError, match=problem):
        write_cache_file(cache_file)


# --- writing


def test_the_canonical_form() -> None:
    cache_file = CacheFile(
        entries=(
            Entry(Key.parse(KEY), "Runner", (1, (2,)), tuple(POLICY), SELECTION),
            Entry(Key("é", "Runner", (), ()), "Runner", -1),
        ),
        metadata=METADATA,
        records={"moe": {}},
        generation="ab",
    )

    assert write_cache_file(cache_file).decode("ascii") == (
        f'{{"{KEY}":["Runner",[1,[2]],["cuda_graph_profile_replays",1,"l2_cache_policy","cold-chain:8"],'
        '{"candidates":8,"margin":0.1,"runner_up_ms":null,"time_ms":0.5}],'
        "\"('\\u00e9', 'Runner', (), ())\":[\"Runner\",-1],"
        '"_generation":"ab","_metadata":{"flashinfer_version":"0.7.4","gpu":"NVIDIA H200"},"_records":{"moe":{}}}'
    )


ENTRY = Entry(Key.parse(KEY), "Runner", 0)


@pytest.mark.parametrize(
    ("cache_file", "problem"),
    [
        pytest.param(
            CacheFile(entries=(ENTRY,), metadata=METADATA, legacy=(LegacyEntry(OLD_KEY, "Runner", 0),)),
            "1 entry with keys without extras would be lost",
            id="legacy entries",
        ),
        pytest.param(CacheFile(entries=(ENTRY, ENTRY), metadata=METADATA), "two entries for", id="one key twice"),
        pytest.param(
            CacheFile(entries=(Entry(ENTRY.key, "Runner", 0, None, SELECTION),), metadata=METADATA),
            "a selection without a policy",
            id="selection without policy: FlashInfer fails on null",
        ),
        pytest.param(
            CacheFile(entries=(Entry(ENTRY.key, "Runner", float("nan")),), metadata=METADATA),
            "JSON has no form",
            id="NaN",
        ),
        pytest.param(
            CacheFile(entries=(), metadata=METADATA, records={"x": Dtype("uint8")}), "JSON has no form", id="not JSON"
        ),
        pytest.param(
            CacheFile(entries=(ENTRY,) * (MAX_ENTRIES + 1), metadata=METADATA), "100001 entries", id="too many entries"
        ),
        pytest.param(
            CacheFile(entries=(), metadata=METADATA, records={"x": "x" * MAX_FILE_BYTES}), "are more than", id="too big"
        ),
    ],
)
def test_not_written(cache_file: CacheFile, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        write_cache_file(cache_file)


def test_mappings_that_are_no_dicts_are_written() -> None:
    frozen = CacheFile(
        entries=(Entry(ENTRY.key, "Runner", 0, (), MappingProxyType({"time_ms": 1.0})),),
        metadata=MappingProxyType(METADATA),
        records=MappingProxyType({"moe": 1}),
    )

    assert read_cache_file(write_cache_file(frozen)).entries[0].time_ms == 1.0


# --- nothing is lost


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in REAL_FILES])
def test_flashinfer_reads_the_same_from_a_rewritten_real_file(path: Path) -> None:
    data = path.read_bytes()
    written = write_cache_file(read_cache_file(data))

    assert as_flashinfer_reads(written) == as_flashinfer_reads(data)
    assert write_cache_file(read_cache_file(written)) == written


cache_files = st.builds(
    CacheFile,
    entries=entry_lists.map(tuple),
    metadata=st.builds(lambda env, ours: {**env.metadata(), "fi_tunecache": [ours]}, environments, json_values),
    records=st.dictionaries(short_text, json_values, max_size=2),
    generation=st.none() | short_text,
)


@given(cache_files)
def test_reading_is_the_inverse_of_writing(cache_file: CacheFile) -> None:
    read = read_cache_file(write_cache_file(cache_file))

    in_order = sorted(cache_file.entries, key=lambda entry: entry.key.text)
    assert [repr(entry) for entry in read.entries] == [repr(entry) for entry in map(with_sorted_names, in_order)]
    assert read.metadata == cache_file.metadata
    assert read.records == cache_file.records
    assert read.generation == cache_file.generation


def with_sorted_names(entry: Entry) -> Entry:
    selection = None if entry.selection is None else json.loads(json.dumps(entry.selection, sort_keys=True))
    return Entry(entry.key, entry.runner, entry.tactic, entry.policy, selection)


@given(cache_files, st.randoms(use_true_random=False))
def test_one_content_gives_one_sequence_of_bytes(cache_file: CacheFile, random: Any) -> None:
    shuffled = random.sample(cache_file.entries, len(cache_file.entries))
    other = CacheFile(
        tuple(shuffled), dict(reversed((cache_file.metadata or {}).items())), cache_file.records, cache_file.generation
    )

    assert write_cache_file(other) == write_cache_file(cache_file)


@given(cache_files)
def test_flashinfer_reads_what_was_meant(cache_file: CacheFile) -> None:
    meant: dict[str, Any] = {
        entry.key.text: [entry.runner, entry.tactic, entry.policy, entry.selection][
            : 2 + (entry.policy is not None) + (entry.selection is not None)
        ]
        for entry in cache_file.entries
    }
    meant |= {"_metadata": cache_file.metadata, "_records": cache_file.records, "_generation": cache_file.generation}

    as_flashinfer_writes = json.dumps(meant, indent=2).encode()
    assert as_flashinfer_reads(write_cache_file(cache_file)) == as_flashinfer_reads(as_flashinfer_writes)
    assert as_flashinfer_reads(write_cache_file(read_cache_file(as_flashinfer_writes))) == as_flashinfer_reads(
        as_flashinfer_writes
    )
