"""A bundle: a v1 file that names where it was tuned, read and written without loss; everything else is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made
import pytest
from bundle_strategies import bundles
from hypothesis import given
from hypothesis import strategies as st

from fi_tunecache.bundle import MARK, Bundle, Provenance, Workload, bundle_file_name, read_bundle, write_bundle
from fi_tunecache.entry import Entry, Lookup
from fi_tunecache.environment import Environment
from fi_tunecache.errors import FormatError
from fi_tunecache.flashinfer_json import read_cache_file
from fi_tunecache.key import Key
from fi_tunecache.measurement_policy import MeasurementPolicy

ROOT = Path(__file__).parent.parent
GEMM_A = Path(__file__).parent / "data" / "h200-flashinfer-0.7.4" / "gemm-a.v1.json"
EMBEDDED = sorted((ROOT / "manifests").glob("*/*/" + "[0-9a-f]" * 16 + ".json"))

CUBLASLT, CUDNN = made.entry(made.key(made.CUBLASLT), 3, 0.5), made.entry(made.key(made.CUDNN), (0, (1, 2)), 0.25)
SMALL = Bundle(
    environment=made.H200,
    entries={entry.key.text: entry for entry in (CUBLASLT, CUDNN)},
    provenance=Provenance(
        created="2026-12-01",
        tool="fi-tunecache 0.1.0",
        source="v1 file",
        tuning_seconds=58.8,
        driver="580.159.04",
        mapped_cublas="130100",
        power_limit_w=700.0,
        workload=Workload(model="m", engine="vllm 0.33.0", tensor_parallel=2, note="M <= 256"),
    ),
    policy=MeasurementPolicy.from_execution_mode("eager"),
    lookups=(
        made.lookup([made.CUDNN, made.CUBLASLT, made.TINY], made.CUDNN),
        made.lookup([made.CUBLASLT], made.CUBLASLT),
    ),
    default_raced=True,
)


def changed(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> bytes:
    """The small bundle's file after a change of the document or of the mark inside it."""
    document = json.loads(write_bundle(SMALL)[0])
    change(document, document["_metadata"][MARK])
    return json.dumps(document).encode()


# --- reading and writing


def test_a_bundle_comes_back_as_it_was() -> None:
    data, sha256 = write_bundle(SMALL)

    assert read_bundle(data) == SMALL
    assert sha256 == hashlib.sha256(data).hexdigest()
    assert bundle_file_name(sha256) == f"{sha256[:16]}.json"


@given(bundles())
def test_reading_is_the_inverse_of_writing(bundle: Bundle) -> None:
    data, sha256 = write_bundle(bundle)
    again = read_bundle(data)

    assert again == bundle
    assert write_bundle(again) == (data, sha256)  # 1, 1.0 and True are equal, but not the same bytes


def test_there_are_real_bundles() -> None:
    assert len(EMBEDDED) == 6


@pytest.mark.parametrize("path", EMBEDDED, ids=[f"{path.parent.parent.name}/{path.name}" for path in EMBEDDED])
def test_a_real_bundle(path: Path) -> None:
    data = path.read_bytes()
    bundle = read_bundle(data, source=path.name)

    assert write_bundle(bundle) == (data, hashlib.sha256(data).hexdigest())
    assert path.name == bundle_file_name(hashlib.sha256(data).hexdigest())
    assert bundle.environment.gpu == "NVIDIA H200"
    assert bundle.environment.undetermined() == ()
    assert bundle.lookups
    assert all(lookup.winning_key.text in bundle.entries for lookup in bundle.lookups)


def test_a_bundle_is_a_v1_file_with_unmodified_entries() -> None:
    original = json.loads(GEMM_A.read_bytes())
    (bundle,) = [json.loads(path.read_bytes()) for path in EMBEDDED if path.name == "92e3198da296966e.json"]

    metadata = bundle.pop("_metadata")
    assert {name: value for name, value in metadata.items() if name != MARK} == original.pop("_metadata")
    del original["_generation"]  # tells FlashInfer's processes apart, not its results
    assert bundle == original
    assert len(bundle) == 90


def test_entries_of_every_age_stay_as_they_are() -> None:
    entries = [
        Entry(made.key("Until0_7_0"), "Until0_7_0", 0),
        Entry(made.key("From0_7_1"), "From0_7_1", -1, ("hot", 1, None, True, 0.5)),
        Entry(made.key("From0_7_4"), "From0_7_4", (128, ("x", None)), (), {"time_ms": 0.1, "new": {"a": [1]}}),
    ]
    bundle = made.bundle(entries)

    assert list(read_bundle(write_bundle(bundle)[0]).entries.values()) == sorted(entries, key=lambda e: e.key.text)


def test_what_is_not_known_is_not_written() -> None:
    mark = json.loads(write_bundle(made.bundle([CUDNN], default_raced=None))[0])["_metadata"][MARK]

    assert mark == {"format": 1, "provenance": {"created": "2026-12-01"}}


# --- one content, one name


def test_the_name_of_a_bundle_does_not_change() -> None:
    """A change of this hash renames every bundle that is published again: raise the format instead."""
    assert write_bundle(SMALL)[1] == "b803601a56aa6735d176cf80e1246b90b10732c430f77cae2b097ce1e8ef69dd"


def test_the_order_of_entries_does_not_matter() -> None:
    turned = made.bundle([CUDNN, CUBLASLT])

    assert write_bundle(turned) == write_bundle(made.bundle([CUBLASLT, CUDNN]))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(made.bundle([CUDNN]), id="entry"),
        pytest.param(made.bundle([CUDNN, made.entry(made.key(made.CUBLASLT), 4, 0.5)]), id="tactic"),
        pytest.param(made.bundle([CUDNN, CUBLASLT], created="2026-12-02"), id="date"),
        pytest.param(made.bundle([CUDNN, CUBLASLT], default_raced=False), id="race"),
        pytest.param(
            made.bundle([CUDNN, CUBLASLT], environment=made.H200.with_facts({"cudnn_version": "1"})), id="environment"
        ),
        pytest.param(
            made.bundle([CUDNN, CUBLASLT], policy=MeasurementPolicy.from_execution_mode("eager")), id="policy"
        ),
        pytest.param(made.bundle([CUDNN, CUBLASLT], [made.lookup([made.CUDNN], made.CUDNN)]), id="lookup"),
    ],
)
def test_another_content_has_another_name(other: Bundle) -> None:
    assert write_bundle(other)[1] != write_bundle(made.bundle([CUDNN, CUBLASLT]))[1]


def test_a_bundle_is_plain_text_on_one_line() -> None:
    data = write_bundle(made.bundle([CUDNN]))[0]

    assert data.decode("ascii").isprintable()
    assert b": " not in data.replace(b'"(', b"")
    assert list(json.loads(data)) == ["('bf16_gemm'" + made.key(made.CUDNN).text[12:], "_metadata"]


# --- what is refused


def winner_of(mark: dict[str, Any], **fields: Any) -> None:
    mark["lookups"][0].update(fields)


KEY_TEXT = made.key(made.CUDNN).text
EXTRAS = "(torch.bfloat16, True)"

REFUSED = [
    pytest.param(lambda d, m: d.pop("_metadata"), "no _metadata: nobody can say where it was tuned", id="no metadata"),
    pytest.param(lambda d, m: d["_metadata"].update(gpu="*"), "gpu is the wildcard '*'", id="wildcard"),
    pytest.param(
        lambda d, m: d["_metadata"].update(gpu="unknown", cudnn_version=None),
        "a bundle must name every fact; missing: cudnn_version, gpu",
        id="undetermined facts",
    ),
    pytest.param(lambda d, m: d["_metadata"].pop("cuda_version"), "missing: cuda_version", id="missing fact"),
    pytest.param(lambda d, m: d["_metadata"].pop(MARK), "no provenance: a v1 file, not a bundle", id="plain v1 file"),
    pytest.param(
        lambda d, m: d["_metadata"].update({MARK: [1]}), "no provenance: a v1 file, not a bundle", id="mark is a list"
    ),
    pytest.param(lambda d, m: m.pop("format"), "missing required field `format`", id="no format"),
    pytest.param(lambda d, m: m.update(format="1"), "Expected `int`, got `str`", id="format is a string"),
    pytest.param(lambda d, m: m.update(format=0), "Expected `int` >= 1", id="format 0"),
    pytest.param(
        lambda d, m: m.update(format=2, provenance=None), "bundle format 2 is newer than 1; upgrade", id="newer format"
    ),
    pytest.param(lambda d, m: m.pop("provenance"), "missing required field `provenance`", id="no provenance"),
    pytest.param(lambda d, m: m["provenance"].pop("created"), "missing required field `created`", id="no date"),
    pytest.param(
        lambda d, m: m["provenance"].update(created="01.12.2026"), "'01.12.2026' is not a date", id="another date form"
    ),
    pytest.param(
        lambda d, m: m["provenance"].update(created="2026-13-01"), "'2026-13-01' is not a date", id="month 13"
    ),
    pytest.param(lambda d, m: m["provenance"].update(created="\u0662026-12-01"), "is not a date", id="other digits"),
    pytest.param(
        lambda d, m: m["provenance"].update(tuning_seconds="58"), "Expected `float | null`", id="seconds are text"
    ),
    pytest.param(
        lambda d, m: m["provenance"].update(driver="\x1b[2J"), r"not one printable line", id="terminal escape"
    ),
    pytest.param(
        lambda d, m: m["provenance"]["workload"].update(note="a\nb"), "not one printable line", id="two lines in a note"
    ),
    pytest.param(lambda d, m: m["provenance"].update(tool="x" * 4097), "at most 4096 characters", id="long text"),
    pytest.param(lambda d, m: m["policy"].update(measure_timer="sundial"), "measure_timer = 'sundial'", id="policy"),
    pytest.param(lambda d, m: m.update(default_raced="yes"), "Expected `bool | null`", id="race is text"),
    pytest.param(lambda d, m: d.update(_records={"op": {}}), "holds _records: a bundle has entries only", id="records"),
    pytest.param(
        lambda d, m: [d.pop(key) for key in list(d) if key != "_metadata"], "no entries; tell", id="no entries"
    ),
    pytest.param(
        lambda d, m: d.update({"('mm', 'Runner', ((1,), (0,)))": ["Runner", 0]}),
        "keys without extras never hit",
        id="key of FlashInfer before 0.6.13",
    ),
    pytest.param(lambda d, m: d.update({"mm": ["Runner", 0]}), "not a key as FlashInfer writes it", id="not a key"),
    pytest.param(
        lambda d, m: d.update({"('\x1b[2J', 'Runner', ((1,),), ())": ["Runner", 0]}),
        "not a key as FlashInfer writes it",
        id="terminal escape in an op",
    ),
    pytest.param(
        lambda d, m: d[KEY_TEXT].__setitem__(0, "OtherRunner"),
        "a value names OtherRunner, its key CudnnBf16GemmRunner",
        id="value of another runner than its key",
    ),
    pytest.param(lambda d, m: d[KEY_TEXT].__setitem__(1, {"a": 1}), "a tactic holds a dict", id="tactic is an object"),
    pytest.param(lambda d, m: d[KEY_TEXT].__setitem__(1, 2**63), "more than 64 bits", id="huge tactic"),
    pytest.param(lambda d, m: m.update(lookups={}), "Expected `array`", id="lookups are an object"),
    pytest.param(lambda d, m: winner_of(m, winner=2), "has no entry for its winner", id="winner without an entry"),
    pytest.param(lambda d, m: winner_of(m, winner=3), "has no entry for its winner", id="winner out of range"),
    pytest.param(lambda d, m: winner_of(m, winner=-1), "has no entry for its winner", id="negative winner"),
    pytest.param(lambda d, m: winner_of(m, runners=[], winner=0), "has no entry for its winner", id="no runners"),
    pytest.param(lambda d, m: winner_of(m, profile="((1, 1),)"), "has no entry for its winner", id="another profile"),
    pytest.param(lambda d, m: winner_of(m, custom_op="fp8_gemm"), "has no entry for its winner", id="another op"),
    pytest.param(
        lambda d, m: winner_of(m, runners=[[made.CUDNN, EXTRAS], [made.TINY, "(1,"]], winner=0),
        "extras can't be read",
        id="extras that are no tuple",
    ),
    pytest.param(
        lambda d, m: winner_of(m, runners=[[made.CUDNN, EXTRAS], [made.TINY, "(__import__('os'),)"]], winner=0),
        "Call is not allowed in extras",
        id="extras that call",
    ),
]
"""Changes of the document or of the mark inside it, and what is said then."""


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_bundle_is_refused(change: Callable[[dict[str, Any], dict[str, Any]], object], message: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_bundle(changed(change), source="b.json")

    assert str(caught.value).startswith("b.json: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def test_the_small_bundle_is_not_refused_unchanged() -> None:
    assert read_bundle(changed(lambda d, m: None)) == SMALL


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(write_bundle(SMALL)[0][:-1], id="truncated"),
        pytest.param(write_bundle(SMALL)[0] * 2, id="twice"),
        pytest.param(b"\xef\xbb\xbf" + write_bundle(SMALL)[0], id="byte order mark"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b"null", id="null"),
        pytest.param(GEMM_A.read_bytes(), id="v1 file"),
    ],
)
def test_what_is_no_bundle(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^b\.json: "):
        read_bundle(data, source="b.json")


@given(st.data())
def test_a_damaged_byte_is_refused_or_gives_another_sound_bundle(data: st.DataObject) -> None:
    good = write_bundle(SMALL)[0]
    position = data.draw(st.integers(0, len(good) - 1))
    damaged = good[:position] + data.draw(st.binary(min_size=0, max_size=2)) + good[position + 1 :]
    try:
        bundle = read_bundle(damaged)
    except FormatError:
        return
    assert read_bundle(write_bundle(bundle)[0]) == bundle


# --- a lookup's fields that only together spell its winner's key


def spoofed(entry: Key, **fields: Any) -> bytes:
    document = json.loads(write_bundle(made.bundle([made.entry(entry)], [Lookup((entry,), 0)]))[0])
    document["_metadata"][MARK]["lookups"][0].update(fields)
    return json.dumps(document).encode()


STRINGS = Key("op", "Runner", ((1,),), ("a", "b", "c"))
LONG = Key("op", "Runner", ((1,),), ("a", "b", "c", "d"))
NESTED = Key("op", "Runner", ((1,),), ("a", (2,)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(
            spoofed(STRINGS, custom_op="op', 'Runner', ((1,),), ('a", runners=[["b", "'c')"]], profile=""),
            "a lookup of op', 'Runner', .* has no entry for its winner",
            id="op, with an empty profile",
        ),
        pytest.param(
            spoofed(LONG, custom_op="op', 'Runner', ((1,),), ('a", runners=[["b", "'d')"]], profile="'c'"),
            "a lookup of op', 'Runner', .* is not what its winner's key says",
            id="op",
        ),
        pytest.param(
            spoofed(STRINGS, runners=[["Runner', ((1,),), ('a", "'c')"]], profile="'b'"),
            "a lookup of op is not what its winner's key says; tell the publisher",
            id="runner",
        ),
        pytest.param(
            spoofed(NESTED, runners=[["Runner", "(2,))"]], profile="((1,),), ('a'"),
            "extras can't be read",
            id="profile",
        ),
    ],
)
def test_a_lookup_whose_fields_are_shifted_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_bundle(data)


@pytest.mark.parametrize("runner", ["", "A', 'B", "A\\", "A\nB", "\x1b[2J"])
def test_a_losing_runner_needs_a_name(runner: str) -> None:
    runners = [["Runner", "('a', (2,))"], [runner, "()"]]

    with pytest.raises(FormatError, match=r"a lookup of op has .* for a runner class; tell the publisher"):
        read_bundle(spoofed(NESTED, runners=runners))


def test_too_many_lookups() -> None:
    data = changed(lambda d, m: m.update(lookups=m["lookups"][-1:] * 200_001))

    with pytest.raises(FormatError, match="200001 lookups are more than 200000; split the bundle"):
        read_bundle(data)


def test_facts_of_a_newer_flashinfer_are_kept() -> None:
    other = made.bundle([CUDNN], environment=Environment.from_metadata({**made.H200.metadata(), "arch_list": "9.0a"}))

    assert read_bundle(write_bundle(other)[0]).environment.other == (("arch_list", "9.0a"),)
    assert read_cache_file(write_bundle(other)[0]).environment() == other.environment
