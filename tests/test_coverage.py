"""What a report says of recorded lookups, and the reasons for what was not answered. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

import made
import msgspec
import pytest
from made_lookups import lookup
from rich.console import Console

from fi_tunecache.coverage import coverage
from fi_tunecache.key import Dtype, Key
from fi_tunecache.match_level import MatchLevel
from fi_tunecache.miss import KnownKeys, Miss, nearest_miss
from fi_tunecache.recorded_lookup import RecordedLookup, Served
from fi_tunecache.selection import OtherLevel, Selection

LOOKUPS = [
    lookup(Served.REGISTRY, count=100),
    lookup(Served.REGISTRY, m=2, count=50),
    lookup(Served.REGISTRY, answer=(made.CUDNN, 3), m=4),
    lookup(Served.DEFAULT, m=8, reason="reason one", count=1000),
    lookup(Served.TUNED, m=8, reason="reason one"),
    lookup(Served.DEFAULT, m=16, reason="reason one"),
    lookup(Served.DEFAULT, m=16, reason="reason two"),
    lookup(Served.SKIPPED, op="another_op", reason=str(Miss.SKIPPED), count=3),
    lookup(Served.FILE, op="another_op", m=2),
    lookup(Served.STORE, op="another_op", m=4),
    lookup(Served.BUNDLED, op="another_op", m=8),
    lookup(Served.MEMORY, op="another_op", m=16),
]


SELECTION = Selection(
    format=1,
    id="0" * 32,
    tool="fi-tunecache",
    created="2026-12-01",
    gpu="NVIDIA H200",
    flashinfer_version="0.7.4",
    level=MatchLevel.EXACT,
    policy={},
    registries=(("hf://datasets/org/name", "1a2b3c4d5e"),),
    bundles=(),
    entries=412,
    other_level=OtherLevel(MatchLevel.COMPATIBLE, 412, 1),
)
REPORT = coverage(LOOKUPS, [SELECTION], ["a note"])


def test_text() -> None:
    assert str(REPORT).splitlines() == [
        "1,161 lookups of 10 questions: 151 registry, 1 memory, 1 file, 1 store, 1 bundled, 1 tuned, 1,002 default,"
        " 3 skipped",
        "with 412 entries for NVIDIA H200 (exact) from hf://datasets/org/name@1a2b3c4",
        "  another_op, CudnnBf16GemmRunner: 3 skipped",
        "  another_op, TinyGemmBf16GemmRunner: 1 memory, 1 file, 1 store, 1 bundled",
        "  bf16_gemm, CudnnBf16GemmRunner: 1 registry, 1,002 default",
        "  bf16_gemm, TinyGemmBf16GemmRunner: 150 registry, 1 tuned",
        "not answered:",
        "  another_op: the op is in skip_ops: 3 lookups of 1 question",
        "  bf16_gemm: reason one: 1,002 lookups of 2 questions",
        "  bf16_gemm: reason two: 1 lookup of 1 question",
        "a note",
    ]


def test_json() -> None:
    document = json.loads(msgspec.json.encode(REPORT.builtins()))
    nobody = dict.fromkeys(["registry", "memory", "file", "store", "bundled", "tuned", "default", "skipped"], 0)
    rows = [
        ("another_op", made.CUDNN, {"skipped": 3}),
        ("another_op", made.TINY, {"memory": 1, "file": 1, "store": 1, "bundled": 1}),
        ("bf16_gemm", made.CUDNN, {"registry": 1, "default": 1002}),
        ("bf16_gemm", made.TINY, {"registry": 150, "tuned": 1}),
    ]
    misses = [
        ("another_op", "the op is in skip_ops", 3, 1),
        ("bf16_gemm", "reason one", 1002, 2),
        ("bf16_gemm", "reason two", 1, 1),
    ]
    assert document == {
        "lookups": 1161,
        "questions": 10,
        "served": {
            **{"registry": 151, "memory": 1, "file": 1, "store": 1, "bundled": 1},
            **{"tuned": 1, "default": 1002, "skipped": 3},
        },
        "runners": [
            {"custom_op": op, "runner": runner, "lookups": sum(served.values()), "served": {**nobody, **served}}
            for op, runner, served in rows
        ],
        "misses": [
            {"custom_op": op, "reason": reason, "lookups": lookups, "questions": questions}
            for op, reason, lookups, questions in misses
        ],
        "selections": [
            {
                "id": "0" * 32,
                "gpu": "NVIDIA H200",
                "match": "exact",
                "entries": 412,
                "registries": ["hf://datasets/org/name@1a2b3c4"],
            }
        ],
        "notes": ["a note"],
    }


def test_table() -> None:
    """A column for each that has answered anything; what looks like markup is text."""
    lookups = [
        lookup(Served.REGISTRY, count=1000),
        lookup(Served.DEFAULT, m=2, op="[red]op"),
        lookup(Served.REGISTRY, m=4, op="[red]op"),
    ]
    console = Console(width=100, highlight=False)
    with console.capture() as capture:
        console.print(coverage(lookups).table())
    assert [line.split() for line in capture.get().splitlines()] == [
        ["op", "runner", "lookups", "registry", "default"],
        ["[red]op", made.CUDNN, "1", "0", "1"],
        ["[red]op", made.TINY, "1", "1", "0"],
        ["bf16_gemm", made.TINY, "1,000", "1,000", "0"],
    ]


def test_nothing() -> None:
    assert str(coverage([])) == "0 lookups of 0 questions: none"
    assert coverage([]).builtins()["served"]["registry"] == 0


@pytest.mark.parametrize("served", Served)
def test_every_lookup_is_counted_once(served: Served) -> None:
    given: list[RecordedLookup] = [lookup(served, count=3), lookup(served, m=2, count=4)]
    found = coverage(given)
    assert (found.lookups, found.served[served], found.questions) == (7, 7, 2)


ASKED = (made.key(made.CUDNN, 1), made.key(made.TINY, 1))
OTHER_EXTRAS = Key("bf16_gemm", made.TINY, ASKED[1].profile, (Dtype("float16"),))
CAUSE = {("bf16_gemm", made.TINY): "cudnn_version: 1 is not 2"}


@pytest.mark.parametrize(
    ("known", "dropped", "reason"),
    [
        pytest.param([], {}, Miss.NOTHING, id="nothing"),
        pytest.param([made.key(made.CUDNN, 1, "other_op")], {}, Miss.OP, id="another op"),
        pytest.param([made.key(made.TINY, 2)], {}, Miss.SHAPE, id="another shape"),
        pytest.param([made.key(made.CUTLASS, 1), made.key(made.TINY, 2)], {}, Miss.RUNNER, id="another runner"),
        pytest.param([OTHER_EXTRAS, made.key(made.CUTLASS, 1)], {}, Miss.EXTRAS, id="other extras"),
        pytest.param([OTHER_EXTRAS], CAUSE, Miss.EXTRAS, id="other extras, and dropped"),
        pytest.param(
            [made.key(made.CUTLASS, 1)], CAUSE, "dropped at resolution: cudnn_version: 1 is not 2", id="dropped"
        ),
        pytest.param([], CAUSE, "dropped at resolution: cudnn_version: 1 is not 2", id="dropped, and nothing else"),
        pytest.param([], {("bf16_gemm", made.CUTLASS): "x"}, Miss.NOTHING, id="another runner was dropped"),
        pytest.param(["", "('legacy', 'Runner', ((1, 2),))"], {}, Miss.NOTHING, id="what is no key"),
    ],
)
def test_the_nearest_miss(known: Sequence[object], dropped: dict[tuple[str, str], str], reason: object) -> None:
    """What is known lies in several tables: it does not matter in which."""
    tables = [KnownKeys.of([str(key)]) for key in known]
    runners = [key.runner for key in ASKED]
    texts = [key.text for key in ASKED]
    assert nearest_miss("bf16_gemm", runners, texts, tables, dropped) == str(reason)
    assert nearest_miss("bf16_gemm", runners, texts, [KnownKeys.of(map(str, known))], dropped) == str(reason)


def test_reasons_are_lines() -> None:
    """They are kept in records, which hold printable lines, and differ."""
    assert all(str(miss).isprintable() for miss in Miss)
    assert len({str(miss) for miss in Miss}) == len(Miss)
