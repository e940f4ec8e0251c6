"""What this process and the one that talks to a Hub say to each other: every message is a line, and its own inverse."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from strategies import finite, int64

from fi_tunecache import hub_messages
from fi_tunecache.hub_failure import FAILURES, hub_error
from fi_tunecache.hub_messages import Answer, Asked, Failure, Question

QUESTIONS, ANSWERS = typing.get_args(Question), typing.get_args(Answer)
NUMBERS = {"limit": int64, "status": st.none() | int64, "retry_after": st.none() | finite}


def messages(kinds: tuple[type[Struct], ...]) -> st.SearchStrategy[Struct]:
    def fields(kind: type[Struct]) -> dict[str, st.SearchStrategy[object]]:
        return {name: NUMBERS[name] for name in kind.__struct_fields__ if name in NUMBERS}

    return st.one_of([st.builds(kind, **fields(kind)) for kind in kinds])


@given(messages(QUESTIONS), finite)
def test_a_question(question: Question, timeout: float) -> None:
    asked = Asked(question, timeout)
    line = msgspec.json.encode(asked)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=Asked) == asked


@given(messages(ANSWERS))
def test_an_answer(answer: Answer) -> None:
    line = msgspec.json.encode(answer)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=Answer) == answer


def test_every_message_is_a_question_an_answer_or_a_part_of_one() -> None:
    structs = {name for name in hub_messages.__all__ if isinstance(getattr(hub_messages, name), type)}
    assert structs == {kind.__name__ for kind in (*QUESTIONS, *ANSWERS)} | {"Asked", "TreeFile"}


@pytest.mark.parametrize(
    "line", [b"", b"{}", b'{"type":"Exec"}', b'{"type":"Head"}', b'{"type":"Head","commit":1}', b"\xff"]
)
def test_what_is_no_answer(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(line, type=Answer)


# --- what a failure says to a user


@pytest.mark.parametrize("kind", FAILURES)
def test_every_failure_is_a_line_with_a_next_step(kind: str) -> None:
    error = hub_error("hf://datasets/team/tuned", Failure(kind, 418, "I'm a teapot"))
    assert error.problem == f"hf://datasets/team/tuned: {FAILURES[kind][0]} (418: I'm a teapot)"
    assert error.next_step == FAILURES[kind][1] != ""
    assert error.exit_code == (2 if kind == "disk" else 4)
    assert len(str(error)) < 350


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        pytest.param(
            Failure("unreachable", detail="Connection refused"),
            "x: the Hub can't be reached (Connection refused); "
            "check the network, HF_ENDPOINT and proxies; --offline takes what is cached",
            id="a detail",
        ),
        pytest.param(
            Failure("server", 503), "x: the Hub has a fault of its own (503); try again later", id="only a status"
        ),
        pytest.param(
            Failure("server", 503, retry_after=30),
            "x: the Hub has a fault of its own (503); try again in 30 s",
            id="when to try again",
        ),
        pytest.param(
            Failure("rate", 429, retry_after=299.6),
            "x: the Hub limits the number of requests (429); "
            "try again in 300 s, or log in with `hf auth login` or set HF_TOKEN: the limits are higher then",
            id="when the limit ends",
        ),
        pytest.param(Failure("stale"), "x: somebody else has published meanwhile; try again", id="nothing known"),
    ],
)
def test_what_is_known_is_said(failure: Failure, line: str) -> None:
    assert str(hub_error("x", failure)) == line
