"""What the server answers: a status, a body and headers; and the refusals that end a call early."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Answer", "Refusal", "error_answer", "json_answer"]


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def json_answer(data: object, status: int = 200, **headers: str) -> Answer:
    return Answer(status, json.dumps(data).encode(), {"Content-Type": "application/json", **headers})


def error_answer(status: int, code: str, message: str, **headers: str) -> Answer:
    text = json.dumps(message)[1:-1]  # a header is one line of ASCII
    named = {"X-Error-Code": code, "X-Error-Message": text, **headers}
    return json_answer({"error": message}, status, **{name: value for name, value in named.items() if value})


class Refusal(Exception):  # noqa: N818 - an answer, not an error here
    """The call is answered with an error, as the Hub does.

    ``code`` is its ``X-Error-Code``, by which the clients choose their exception; over http they classify by
    nothing else.
    """

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.answer = error_answer(status, code, message, **headers)
