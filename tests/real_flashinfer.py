"""The real FlashInfer in a process of its own, and what to ask it: see ``flashinfer_driver.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fi_tunecache.bundle import Bundle
from fi_tunecache.entry import Entry, Lookup, tactic_json
from fi_tunecache.folder import Folder
from fi_tunecache.key import Dtype, Extra, Key
from fi_tunecache.measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from fi_tunecache.registry import open_registry
from fi_tunecache.registry_tree import EMBEDDED

__all__ = ["RealFlashInfer", "answer_of", "embedded", "question", "recorded_question", "winners"]


class RealFlashInfer:
    """One release of FlashInfer, imported once; each scenario gets an autotuner of its own.

    ``folder`` is where the release was installed, ``scratch`` where it may write.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._errors = scratch / "stderr.txt"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("flashinfer_driver.py"))],
                env={**os.environ, "PYTHONPATH": str(folder), "FLASHINFER_WORKSPACE_BASE": str(scratch)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.version: str = self._answer()["version"]

    def play(self, **scenario: Any) -> dict[str, Any]:
        """Play one scenario; its fields and the answer's are those of ``flashinfer_driver.py``."""
        assert self._process.stdin is not None
        print(json.dumps(scenario, default=str), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"FlashInfer's process ended:\n{self._errors.read_text(errors='replace')[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()


def question(keys: Iterable[Key]) -> dict[str, Any]:
    """A lookup of one op by the keys that its runners have, in the caller's order."""
    keys = tuple(keys)
    runners = [[key.runner, _plain(key.extras)] for key in keys]
    return recorded_question({"custom_op": keys[0].custom_op, "runners": runners, "profile": keys[0].profile})


def recorded_question(record: Mapping[str, Any]) -> dict[str, Any]:
    """A lookup as it stands in ``tests/data``; what its profile leaves open is filled in, as any call would."""
    shapes = record.get("shapes") or [[3 if size == -1 else size for size in shape] for shape in record["profile"]]
    return {"custom_op": record["custom_op"], "runners": record["runners"], "shapes": shapes}


def _plain(extra: Extra) -> Any:
    if isinstance(extra, Dtype):
        return str(extra)
    return [_plain(item) for item in extra] if isinstance(extra, (tuple, list)) else extra


def answer_of(entry: Entry) -> list[Any]:
    """The answer of a lookup that this entry serves."""
    return [entry.runner, tactic_json(entry.tactic)]


def winners(*bundles: Bundle) -> dict[Lookup, list[Any]]:
    """Every recorded lookup with its winner, as the first bundle that has the lookup tells it."""
    found: dict[tuple[str, ...], tuple[Lookup, list[Any]]] = {}
    for bundle in bundles:
        for lookup in bundle.lookups:
            answer = answer_of(bundle.entries[lookup.winning_key.text])
            found.setdefault(tuple(key.text for key in lookup.keys), (lookup, answer))
    return dict(found.values())


def embedded(version: str, policy: MeasurementPolicy = DEFAULT_POLICY) -> list[Bundle]:
    """The embedded bundles of one FlashInfer version and policy, those whose default raced first."""
    registry, folder = open_registry(EMBEDDED), Folder(version, "nvidia-h200")
    bundles = [registry.bundle(folder, row) for row in registry.manifest(folder).bundles]
    return sorted(
        (bundle for bundle in bundles if bundle.policy == policy), key=lambda bundle: bundle.default_raced is not True
    )
