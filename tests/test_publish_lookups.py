"""Recorded lookups: read as they were recorded, and answered by entries as FlashInfer answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import made
import pytest

from fi_tunecache.entry import Entry, Lookup
from fi_tunecache.errors import FormatError, UsageError
from fi_tunecache.key import Dtype, Key
from fi_tunecache.publish.recorded_lookups import Question, answer, questions_at, questions_of, read_questions
from fi_tunecache.source import read_source

DATA = Path(__file__).parent / "data"
OF_0_7_4 = DATA / "h200-flashinfer-0.7.4"
OF_0_7_2_POST1 = DATA / "h200-flashinfer-0.7.2.post1"

RECORD = {
    "custom_op": "bf16_gemm",
    "runners": [
        ["CublasltBf16GemmRunner", [256, "torch.bfloat16", True, None, [1, "x"]]],
        ["TinyGemmBf16GemmRunner", []],
    ],
    "profile": [[1, 2048], [0], [-1]],
    "winner": ["CublasltBf16GemmRunner", [0, []]],
}


def read(*records: dict[str, Any]) -> tuple[Question, ...]:
    return read_questions(json.dumps(records).encode(), source="lookups.json")


def ask(*keys: Key, winner: Entry | None = None) -> Question:
    """A question by the keys that its runners have."""
    return Question(
        custom_op=keys[0].custom_op,
        runners=tuple((key.runner, key.extras) for key in keys),
        shapes=keys[0].profile,
        bucketed=True,
        winner=None if winner is None else (winner.runner, winner.tactic),
    )


CUBLASLT, CUDNN, TINY = (made.entry(made.key(runner), 1) for runner in (made.CUBLASLT, made.CUDNN, made.TINY))


# --- reading


def test_a_record() -> None:
    assert read(RECORD) == (
        Question(
            custom_op="bf16_gemm",
            runners=(
                ("CublasltBf16GemmRunner", (256, Dtype("bfloat16"), True, None, (1, "x"))),
                ("TinyGemmBf16GemmRunner", ()),
            ),
            shapes=((1, 2048), (0,), (-1,)),
            bucketed=True,
            winner=("CublasltBf16GemmRunner", (0, ())),
        ),
    )


def test_a_record_of_a_call() -> None:
    record = {"custom_op": "op", "runners": [["Runner", [1.5, False]]], "shapes": [[3, 4], [0]]}

    assert read(record) == (
        Question("op", (("Runner", (1.5, False)),), shapes=((3, 4), (0,)), bucketed=False, winner=None),
    )


def test_no_records() -> None:
    assert read_questions(b"[]") == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "the file is empty", id="empty"),
        pytest.param(b"[]]", "not a JSON document", id="not JSON"),
        pytest.param(b"[] []", "not a JSON document", id="two documents"),
        pytest.param(b"[NaN]", "not a JSON document", id="NaN"),
        pytest.param(b"{}", "Expected `array`, got `object`", id="object"),
        pytest.param(b"[[]]", "Expected `object`, got `array`", id="a record is a list"),
        pytest.param(b"[" * 10_000 + b"]" * 10_000, "nested deeper than", id="deep"),
        pytest.param({"custom_op": None}, "Expected `str`, got `null`", id="no op"),
        pytest.param({"runners": [["Runner"]]}, "Expected `array` of length 2", id="runner without extras"),
        pytest.param({"runners": []}, "a lookup of bf16_gemm names no shapes or no runners", id="no runners"),
        pytest.param({"profile": None}, "a lookup of bf16_gemm names no shapes or no runners", id="no shapes"),
        pytest.param({"profile": [[1.5]]}, "Expected `int`, got `float`", id="a size is a float"),
        pytest.param({"profile": [[2**63]]}, "more than 64 bits", id="huge size"),
        pytest.param({"runners": [["R", [{"a": 1}]]]}, "a lookup's extras hold a dict", id="extras hold an object"),
        pytest.param({"winner": ["R", {"a": 1}]}, "a tactic holds a dict", id="tactic is an object"),
        pytest.param({"winner": ["R"]}, "Expected `array` of length 2", id="winner without a tactic"),
    ],
)
def test_what_is_no_record(data: bytes | dict[str, Any], message: str) -> None:
    content = data if isinstance(data, bytes) else json.dumps([{**RECORD, **data}]).encode()

    with pytest.raises(FormatError) as caught:
        read_questions(content, source="lookups.json")
    assert str(caught.value).startswith("lookups.json: ")
    assert message in caught.value.problem


# --- answering


@pytest.mark.parametrize(
    ("question", "lookup"),
    [
        pytest.param(
            ask(CUDNN.key, CUBLASLT.key), Lookup((CUDNN.key, CUBLASLT.key), 0), id="the first of the caller's order"
        ),
        pytest.param(
            ask(CUBLASLT.key, CUDNN.key), Lookup((CUBLASLT.key, CUDNN.key), 0), id="the same in another order"
        ),
        pytest.param(ask(TINY.key, CUDNN.key), Lookup((TINY.key, CUDNN.key), 1), id="the first that has an entry"),
    ],
)
def test_who_answers(question: Question, lookup: Lookup) -> None:
    assert answer([question], [CUBLASLT, CUDNN], trust_winners=True) == (lookup,)


def test_a_question_that_nothing_answers_is_left_out() -> None:
    other_m, other_extras = (
        made.key(made.CUDNN, m=2),
        Key("bf16_gemm", made.CUDNN, CUDNN.key.profile, (Dtype("float16"),)),
    )
    questions = [ask(TINY.key), ask(other_m), ask(other_extras), ask(CUDNN.key)]

    assert answer(questions, [CUDNN], trust_winners=True) == (Lookup((CUDNN.key,), 0),)


def test_equal_questions_are_one() -> None:
    questions = [ask(CUDNN.key), ask(CUDNN.key, TINY.key), ask(CUDNN.key)]

    assert [lookup.runners for lookup in answer(questions, [CUDNN], trust_winners=True)] == [
        (made.CUDNN,),
        (made.CUDNN, made.TINY),
    ]


def test_a_recorded_winner_that_the_entries_do_not_give() -> None:
    other_tactic = made.entry(CUDNN.key, 2)
    question = ask(CUDNN.key, CUBLASLT.key, winner=other_tactic)

    with pytest.raises(FormatError) as caught:
        answer([question], [CUDNN, CUBLASLT], trust_winners=True)
    assert str(caught.value) == (
        "a lookup of bf16_gemm recorded CudnnBf16GemmRunner 2 as its winner, the entries give CudnnBf16GemmRunner 1; "
        "name the lookups of the run that gave these entries"
    )
    with pytest.raises(FormatError, match="recorded CublasltBf16GemmRunner 1 as its winner, the entries give Cudnn"):
        answer([ask(CUDNN.key, CUBLASLT.key, winner=CUBLASLT)], [CUDNN, CUBLASLT], trust_winners=True)


def test_winners_of_another_run_are_passed_over() -> None:
    question = ask(CUDNN.key, CUBLASLT.key, winner=made.entry(CUBLASLT.key, 7))

    assert answer([question], [CUDNN, CUBLASLT], trust_winners=False) == (Lookup((CUDNN.key, CUBLASLT.key), 0),)


def test_a_winner_that_is_given_and_right() -> None:
    assert answer([ask(CUDNN.key, winner=CUDNN)], [CUDNN], trust_winners=True) == (Lookup((CUDNN.key,), 0),)


@pytest.mark.parametrize(
    ("shapes", "answered"),
    [
        pytest.param(((1, 4096), (4096, 4096), (1, 4096)), True, id="the open dimension is anything"),
        pytest.param(((1, 4096), (4096, 4096), (77, 4096)), True, id="whatever it is"),
        pytest.param(((2, 4096), (4096, 4096), (2, 4096)), False, id="another bucket"),
        pytest.param(((1, 4096), (4096, 4096)), False, id="an input less"),
        pytest.param(((1, 4096), (4096, 4096), (1, 4096, 1)), False, id="a dimension more"),
        pytest.param(((1, 4096), (4096, 4096), (1, 4095)), False, id="another size"),
    ],
)
def test_the_profile_of_a_call(shapes: tuple[tuple[int, ...], ...], answered: bool) -> None:
    question = Question("bf16_gemm", ((made.CUDNN, CUDNN.key.extras),), shapes, bucketed=False)

    assert answer([question], [CUDNN], trust_winners=True) == ((Lookup((CUDNN.key,), 0),) if answered else ())


# --- real ones


@pytest.mark.parametrize(
    ("lookups", "source", "count"),
    [
        pytest.param("gemm-a.lookups.json", "gemm-a.v1.json", 90, id="gemm-a"),
        pytest.param("fp8-8k.lookups.json", "fp8-8k.v1.json", 84, id="fp8-8k"),
    ],
)
def test_every_lookup_of_a_real_v1_file_is_answered_by_its_winner(lookups: str, source: str, count: int) -> None:
    questions = read_questions((OF_0_7_4 / lookups).read_bytes())
    entries = {entry.key.text: entry for entry in read_source(OF_0_7_4 / source).sections[0].entries}
    answered = answer(questions, entries.values(), trust_winners=True)

    assert len(questions) == len(answered) == len(entries) == count
    for question, lookup in zip(questions, answered, strict=True):
        winner = entries[lookup.winning_key.text]
        assert question.winner == (winner.runner, winner.tactic)
        assert question.bucketed
        assert lookup.profile == question.shapes


def test_every_lookup_of_0_7_2_post1_is_answered_though_its_shapes_are_not_bucketed() -> None:
    questions = read_questions((OF_0_7_2_POST1 / "lookups.json").read_bytes())
    (section,) = read_source(OF_0_7_2_POST1 / "managed-store").sections
    answered = answer(questions, section.entries, trust_winners=True)

    assert len(questions) == 30  # the three while tuning were asked again in the replay
    assert not any(question.bucketed for question in questions)
    assert len(answered) == len(section.entries) == 27
    assert {lookup.winning_key for lookup in answered} == {entry.key for entry in section.entries}
    assert all(any(-1 in shape for shape in lookup.profile) for lookup in answered)


def test_lookups_of_one_run_do_not_pass_for_those_of_another() -> None:
    questions = read_questions((OF_0_7_4 / "gemm-a.lookups.json").read_bytes())
    section = read_source(OF_0_7_4 / "managed-store").sections[0]

    with pytest.raises(FormatError, match="as its winner, the entries give"):
        answer(questions, section.entries, trust_winners=True)
    assert len(answer(questions, section.entries, trust_winners=False)) == 90


# --- the lookups of a bundle, asked again


def test_questions_of_lookups() -> None:
    lookup = Lookup((TINY.key, CUDNN.key), 1)
    (question,) = questions_of([lookup])

    assert question == ask(TINY.key, CUDNN.key)
    assert question.winner is None
    assert answer([question], [CUDNN], trust_winners=True) == (lookup,)


@pytest.mark.parametrize("path", sorted((DATA.parent.parent / "manifests").glob("*/*/????????????????.json")))
def test_every_embedded_lookup_asked_again_is_itself(path: Path) -> None:
    (section,) = read_source(path).sections
    assert section.lookups
    assert answer(questions_at(path), section.entries, trust_winners=True) == section.lookups


def test_questions_at_a_file_of_records() -> None:
    path = OF_0_7_2_POST1 / "lookups.json"
    assert questions_at(path) == read_questions(path.read_bytes())


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        pytest.param(None, UsageError, "can't be read (No such file or directory); name a file of", id="nothing there"),
        pytest.param(b"", FormatError, "the file is empty", id="empty"),
        pytest.param(b"  [1]", FormatError, "not recorded lookups", id="a list of something else"),
        pytest.param(b"{", FormatError, "not a JSON document", id="half an object"),
        pytest.param(
            (OF_0_7_4 / "fp8-8k.v1.json").read_bytes(),
            UsageError,
            "is a FlashInfer v1 file and holds no lookups; name recorded lookups, or a bundle",
            id="a v1 file",
        ),
    ],
)
def test_what_holds_no_questions(tmp_path: Path, content: bytes | None, kind: type[Exception], message: str) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(kind) as caught:
        questions_at(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_store_holds_no_questions() -> None:
    with pytest.raises(UsageError, match=r"managed-store can't be read \(Is a directory\)"):
        questions_at(OF_0_7_4 / "managed-store")
