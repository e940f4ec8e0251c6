"""What a publisher says in words: the workload, and lines; nothing that tells where or by whom it was run."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from fi_tunecache.bundle import Workload
from fi_tunecache.errors import UsageError

__all__ = ["check_line", "parse_workload"]

_COUNTS = ("tensor_parallel", "expert_parallel")
_FIELDS = tuple(field.name for field in msgspec.structs.fields(Workload))
_MAX_COUNT = 1_000_000
_MAX_TEXT = 500

_PATH = re.compile(r"""^[/~.]|\\|(?:^|[\s'"(=,:])(?:~[\w.-]*/|\.{0,2}/\w|[A-Za-z]:/\w)""")
_TOKEN = re.compile(
    r"(?:hf_|api_org_|sk-|gh[opsur]_|github_pat_|glpat-|nvapi-|xox[abprs]-|AKIA|Bearer )[0-9A-Za-z_-]{16,}"
    r"|eyJ[0-9A-Za-z_-]{16,}\."
)
_MIN_NAME = 4
_NOBODY = frozenset({"admin", "default", "localhost", "nobody", "root", "ubuntu", "user"})
"""Names of hosts and users in so many containers that they tell nothing."""


def parse_workload(pairs: Iterable[str], *, names: Iterable[str] = ()) -> Workload:
    """Read ``model=meta-llama/Llama-3.1-8B``, ``tensor_parallel=8`` and so on.

    Parameters
    ----------
    pairs
        ``field=value``; the fields are those of :class:`~fi_tunecache.bundle.Workload`.
    names
        Names of this host and user, which must not stand in a value as a word; shorter ones than four letters and
        those that every container has are let through.

    Raises
    ------
    UsageError
        An unknown field, a field given twice or without a value, a count that is none, or a value that holds a path
        of this machine, what looks like a token, or one of the names.
    """
    given: dict[str, str] = {}
    for pair in pairs:
        if _TOKEN.search(pair):  # which the message does not repeat: it may be logged
            raise UsageError("--workload is given what looks like a token", "revoke it, and leave it out")
        field, _, value = pair.partition("=")
        value = value.strip()
        if field not in _FIELDS:
            raise UsageError(f"--workload {field[:80]!r} is not a field", f"the fields are {', '.join(_FIELDS)}")
        if not value:
            raise UsageError(f"--workload {field} has no value", f"write {field}=VALUE")
        if field in given:
            raise UsageError(f"--workload names {field} twice", "name it once")
        if field not in _COUNTS:
            check_line(f"--workload {field}", value, names)
        given[field] = value
    return Workload(
        model=given.get("model"),
        engine=given.get("engine"),
        tensor_parallel=_count(given, "tensor_parallel"),
        expert_parallel=_count(given, "expert_parallel"),
        note=given.get("note"),
    )


def _count(given: dict[str, str], field: str) -> int | None:
    value = given.get(field)
    if value is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,6}", value) or int(value) > _MAX_COUNT:
        raise UsageError(f"--workload {field}={value[:80]} is not a count", f"write a number like {field}=8")
    return int(value)


def check_line(option: str, text: str, names: Iterable[str], *, limit: int = _MAX_TEXT) -> None:
    """Check words that everybody will read, given as ``option``; ``names`` are as in :func:`parse_workload`.

    Raises UsageError for anything but one printable line, and for what must not stand in a workload.
    """
    if _TOKEN.search(text):
        raise UsageError(f"{option} is given what looks like a token", "revoke it, and leave it out")
    if len(text) > limit or not text.isprintable():
        raise UsageError(f"{option} is no printable line of at most {limit} characters", "shorten it")
    if _PATH.search(text):
        raise UsageError(
            f"{option} holds a path of this machine, and everybody will read it",
            "leave it out, or give the name that others know, such as meta-llama/Llama-3.1-8B",
        )
    for name in names:
        if len(name) >= _MIN_NAME and name.lower() not in _NOBODY and _word(name).search(text):
            raise UsageError(
                f"{option} holds {name!r}, the name of this host or user, and everybody will read it", "leave it out"
            )


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![0-9A-Za-z]){re.escape(name)}(?![0-9A-Za-z])", re.IGNORECASE)
