"""``fi-tunecache verify``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..errors import FormatError, UsageError
from ..registry import Registry
from ..registry_tree import DESCRIPTOR, EMBEDDED, HUB_SCHEME, registry_names
from ..user_cache import UserCache
from ..verification import Report, verify_cache, verify_file, verify_registry
from ..wording import plural
from .options import as_json, opening, timeout_option
from .output import print_json, print_line

__all__ = ["command"]


@click.command("verify")
@click.argument("target", required=False, metavar="[REGISTRY|FILE|cache]")
@timeout_option
@as_json
def command(target: str | None, timeout: float, as_json: bool) -> int:
    """Check hashes, schema and rules of a registry (by default those in use), a bundle or v1 file, or the cache.

    Every problem is a line. Exit code 5 if there is one.
    """
    reports: dict[str, Report] = {}
    if target == "cache":
        cache = UserCache.locate()
        reports[str(cache.root)] = verify_cache(cache)
    elif target is None or target == EMBEDDED or target.startswith(HUB_SCHEME) or Path(target, DESCRIPTOR).is_file():
        # Where nothing is trusted, a directory that is a registry may be named without its ./
        is_name = target is None or target == EMBEDDED or target.startswith(HUB_SCHEME)
        given = target if is_name else str(Path(target or "").absolute())
        with opening(None, timeout=timeout) as opener:
            for name in registry_names((given,) if given else (), os.environ):
                reports[name] = verify_registry(Registry(opener(name)))
    else:
        reports[target] = _verify_path(Path(target))
    problems = sum(len(report.problems) for report in reports.values())
    if as_json:
        print_json(
            {
                "ok": not problems,
                "checked": [
                    {"target": name, "sort": report.sort, "count": report.checked, "problems": list(report.problems)}
                    for name, report in reports.items()
                ],
            }
        )
    else:
        for name, report in reports.items():
            for problem in report.problems:
                print_line(f"problem: {problem}")
            many = {"file": "files", "entry": "entries"}[report.sort]
            checked = plural(report.checked, report.sort, many)
            print_line(f"{name}: {checked} checked, {plural(len(report.problems), 'problem')}")
    return FormatError.exit_code if problems else 0


def _verify_path(path: Path) -> Report:
    try:
        return verify_file(path)
    except UsageError as error:
        if not path.is_dir():
            raise
        raise UsageError(f"{error.problem}, and no registry: it has no {DESCRIPTOR}", "check the path") from None
