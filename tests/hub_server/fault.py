"""What can go wrong, on purpose."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .answer import Answer, error_answer

__all__ = ["Fault", "Faults"]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with the requests that match; the first rule that matches a request is applied.

    Parameters
    ----------
    path
        Regular expression, searched in the raw path with its query (``%2F`` stays so); the default matches all.
    method
        Regular expression that the whole method matches: ``"GET"``, ``"GET|HEAD"``.
    times
        How often it happens; None is for ever.
    skip
        How many matching requests pass unharmed before.
    delay
        Seconds before the request is worked on.
    status, code, message, headers, body
        Answer this instead of what was asked, which isn't done: an error with its ``X-Error-Code``, or with 200 a
        captive portal's page. Without ``status`` the answer stays, and ``headers`` and ``body`` replace its own
        (the ETag too only if named: poison).
    performed
        Do what was asked first, then answer ``status``: a commit that succeeded and seems to have failed.
    without
        Headers that are left out. Without Content-Length a body is sent in chunks.
    redirect
        An origin: answer 302 to the same path there, with the headers that a client takes a file's facts from.
    cut
        Send only so many bytes of the body, then close the connection.
    hang
        Seconds of silence before the connection is closed, without an answer or, with ``cut``, after these bytes.
        ``math.inf`` is until the server stops.
    """

    path: str = ""
    method: str = ".*"
    times: int | None = None
    skip: int = 0
    delay: float = 0.0
    status: int | None = None
    code: str = ""
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    performed: bool = False
    without: tuple[str, ...] = ()
    redirect: str = ""
    cut: int | None = None
    hang: float = 0.0

    def matches(self, method: str, path: str) -> bool:
        return bool(re.fullmatch(self.method, method) and re.search(self.path, path))

    @property
    def replaces(self) -> bool:
        """Whether what was asked isn't done."""
        return self.status is not None and not self.performed

    def apply(self, answer: Answer, path: str) -> Answer:
        """The answer as this fault changes it; ``answer`` is the true one, or empty if it ``replaces`` it."""
        if self.status is not None:
            answer = error_answer(self.status, self.code, self.message)
        if self.body is not None:
            answer = replace(answer, body=self.body)
        if self.redirect:
            linked = {"X-Linked-ETag": answer.headers.get("ETag", ""), "X-Linked-Size": str(len(answer.body))}
            answer = Answer(302, b"", {**answer.headers, **linked, "Location": self.redirect + path})
        return replace(answer, headers={**answer.headers, **self.headers})


class Faults:
    """The rules in force, in the order they were added."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[tuple[Fault, list[int]]] = []  # with how many requests each has matched

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._rules.append((fault, [0]))

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def of(self, method: str, path: str) -> Fault | None:
        """The fault that happens to this request, counted."""
        with self._lock:
            for fault, matched in self._rules:
                if fault.matches(method, path) and (fault.times is None or matched[0] < fault.skip + fault.times):
                    matched[0] += 1
                    if matched[0] > fault.skip:
                        return fault
        return None
