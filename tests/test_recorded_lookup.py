"""Recorded lookups as JSON: nothing is lost, and what is no lookup is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import made
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_lookups import lookup, lookups

from fi_tunecache.errors import FormatError
from fi_tunecache.key import Dtype, Key
from fi_tunecache.publish.recorded_lookups import Question, read_questions
from fi_tunecache.recorded_lookup import RecordedLookup, Served, lookup_json, read_lookups, write_lookups


@pytest.mark.parametrize(
    ("served", "lasts", "answers"),
    [
        (Served.REGISTRY, True, True),
        (Served.FILE, True, True),
        (Served.STORE, True, True),
        (Served.BUNDLED, True, True),
        (Served.MEMORY, False, True),
        (Served.TUNED, False, True),
        (Served.DEFAULT, False, False),
        (Served.SKIPPED, False, False),
    ],
)
def test_what_an_answer_is_worth(served: Served, lasts: bool, answers: bool) -> None:
    assert (served.lasts, served.answers) == (lasts, answers)


@pytest.mark.parametrize(
    ("answer", "is_default"),
    [
        pytest.param((made.CUDNN, -1), True, id="the first runner, left to choose"),
        pytest.param((made.CUDNN, 0), False, id="a tactic of the first runner"),
        pytest.param((made.TINY, -1), False, id="another runner, left to choose"),
    ],
)
def test_the_callers_default(answer: tuple[str, int], is_default: bool) -> None:
    assert lookup(Served.FILE, answer=answer).is_default is is_default


def test_the_form() -> None:
    asked = lookup(Served.TUNED, answer=(made.TINY, (0, ("a",))), raced=True, reason="op known, shape not", count=3)

    assert lookup_json(asked) == {
        "custom_op": "bf16_gemm",
        "runners": [[made.CUDNN, ["torch.bfloat16", True]], [made.TINY, ["torch.bfloat16", True]]],
        "profile": [[1, 4096], [4096, 4096], [-1, 4096]],
        "winner": [made.TINY, [0, ["a"]]],
        "served": "tuned",
        "raced": True,
        "tuning": True,
        "policy": ["cuda_graph_profile_replays", 1, "l2_cache_policy", "cold-chain:8"],
        "reason": "op known, shape not",
        "count": 3,
    }


@pytest.mark.parametrize("served", [Served.DEFAULT, Served.SKIPPED])
def test_the_default_is_no_winner(served: Served) -> None:
    assert lookup_json(lookup(served, policy=None))["winner"] is None


@given(st.lists(lookups(), max_size=3))
def test_reading_is_the_inverse_of_writing(recorded: list[RecordedLookup]) -> None:
    assert read_lookups(write_lookups(recorded)) == tuple(recorded)


def test_extras_that_json_has_no_form_for() -> None:
    extras = ("torch.x", [1, ["torch.y", (2,)]], Dtype("float16"), ())
    asked = RecordedLookup(keys=(Key("op", "R", ((1,),), extras),), served=Served.DEFAULT, runner="R", tactic=-1)
    (read,) = read_lookups(write_lookups([asked]))

    assert lookup_json(asked)["runners"] == [
        ["R", [{"text": "torch.x"}, {"list": [1, {"list": [{"text": "torch.y"}, [2]]}]}, "torch.float16", []]]
    ]
    assert read.keys[0].extras == extras


def test_publish_reads_what_is_written() -> None:
    tuned, missed = lookup(Served.TUNED, raced=True), lookup(Served.DEFAULT, m=2)
    extras = (Dtype("bfloat16"), True)

    assert read_questions(write_lookups([tuned, missed])) == (
        Question(
            custom_op="bf16_gemm",
            runners=((made.CUDNN, extras), (made.TINY, extras)),
            shapes=((1, 4096), (4096, 4096), (-1, 4096)),
            bucketed=True,
            winner=(made.TINY, 7),
            raced=True,
        ),
        Question(
            custom_op="bf16_gemm",
            runners=((made.CUDNN, extras), (made.TINY, extras)),
            shapes=((2, 4096), (4096, 4096), (-1, 4096)),
            bucketed=True,
        ),
    )


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(Key("it's", "R", ((1,),), ()), id="a quote in the op"),
        pytest.param(Key("op", "R", ((1,),), (math.nan,)), id="NaN"),
        pytest.param(Key("op", "R", ((2**70,),), ()), id="a huge size"),
        pytest.param(Key("op", "R" * 9000, ((1,),), ()), id="a long name"),
    ],
)
def test_a_key_that_flashinfer_could_not_read_back(key: Key) -> None:
    with pytest.raises(FormatError):
        lookup_json(RecordedLookup(keys=(key,), served=Served.DEFAULT, runner=key.runner, tactic=-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"served": "magic"}, "Invalid enum value 'magic'", id="served by something unknown"),
        pytest.param({"count": 0}, "Expected `int` >= 1", id="never asked"),
        pytest.param({"runners": []}, "names no runners", id="no runners"),
        pytest.param({"runners": [["R'", []]]}, "not a key as FlashInfer writes it", id="no runner's name"),
        pytest.param({"profile": [[1.5]]}, "Expected `int`, got `float`", id="a size is a float"),
        pytest.param({"winner": None}, "served by tuned, must say who won", id="tuned, and nobody won"),
        pytest.param({"served": "default"}, "served by default, must say who won, or must not", id="the default won"),
        pytest.param({"winner": ["Other", 1]}, "was won by 'Other', which is none of its runners", id="another runner"),
        pytest.param({"winner": [made.TINY, {}]}, "a tactic holds a dict", id="no tactic"),
        pytest.param({"policy": [[]]}, "a policy holds a list", id="no policy"),
        pytest.param({"reason": "\x1b[31m"}, "the reason of a lookup of bf16_gemm is no", id="a reason for a terminal"),
        pytest.param({"reason": "x" * 2001}, "length <= 2000", id="a long reason"),
        pytest.param({"runners": [[made.TINY, [{"a": 1}]]]}, "extras hold a dict", id="extras hold an object"),
        pytest.param({"runners": [[made.TINY, [{"text": "x", "list": []}]]]}, "extras hold a dict", id="of two forms"),
    ],
)
def test_what_is_no_recorded_lookup(change: dict[str, Any], message: str) -> None:
    document = {**lookup_json(lookup(Served.TUNED)), **change}

    with pytest.raises(FormatError) as caught:
        read_lookups(json.dumps([document]).encode(), source="lookups.json")
    assert str(caught.value).startswith("lookups.json: ")
    assert message in caught.value.problem


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"[" * 10_000 + b"]" * 10_000, b"[NaN]"])
def test_what_is_no_file_of_lookups(data: bytes) -> None:
    with pytest.raises(FormatError):
        read_lookups(data)
