"""Programs as tests write them: what they ask, the same program without us, and a result of a program's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from programs import Answer, Machine

__all__ = ["LOOKUPS", "STOCK", "VERSIONS", "Make", "local", "plain"]

VERSIONS = ("0.7.4", "0.7.2.post1", "0.7.2")
Make = Callable[..., Machine]

LOOKUPS = "[ask(lookup) for lookup in given]"
STOCK = 'AutoTuner.__dict__["choose_one"] is STOCK["choose_one"]'


def plain(here: Machine, program: str) -> Answer:
    """The same program without us."""
    return here.run(program.replace("fi_tunecache.enable", "(lambda *_, **__: None)"))


def local(lookup: dict[str, Any]) -> list[Any]:
    runner = lookup["runners"][-1][0]
    return [runner, [7, []] if runner.startswith("Cudnn") else 7]
