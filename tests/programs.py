"""Programs that use the real FlashInfer, on a machine like that of an embedded bundle: see ``serving_driver.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from command_line import TOKENS, isolated
from real_flashinfer import embedded, question, winners

from fi_tunecache.bundle import Bundle
from fi_tunecache.entry import Entry, Lookup
from fi_tunecache.measurement_policy import DEFAULT_POLICY, MeasurementPolicy

__all__ = ["Answer", "Machine", "Programs", "bundles_of"]


class Answer(NamedTuple):
    """What a program said, how many kernels FlashInfer timed in it, what we logged, and how long it took (seconds)."""

    result: Any
    profiles: int
    log: list[list[str]]
    seconds: float

    def lines(self, level: str) -> list[str]:
        return [message for at, message in self.log if at == level]


class Programs:
    """One release of FlashInfer, imported once; each program is a process forked from there.

    ``folder`` is where the release was installed, ``scratch`` where it may write.
    """

    def __init__(self, version: str, folder: Path, scratch: Path) -> None:
        self.version = version
        self._errors = scratch / "stderr.txt"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("serving_driver.py"))],
                env={**os.environ, "PYTHONPATH": str(folder), "FLASHINFER_WORKSPACE_BASE": str(scratch)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self._answer()["version"] == version

    def run(self, **asked: Any) -> Answer:
        assert self._process.stdin is not None
        print(json.dumps(asked, default=str), file=self._process.stdin, flush=True)
        answer = self._answer()
        assert "error" not in answer, f"{answer['error']}\n{answer.get('log')}"
        assert not any(token in message for _, message in answer["log"] for token in TOKENS)
        return Answer(**answer)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"FlashInfer's process ended:\n{self._errors.read_text(errors='replace')[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()


def bundles_of(version: str, policy: MeasurementPolicy = DEFAULT_POLICY, *, raced: bool = True) -> list[Bundle]:
    """The embedded bundles whose default raced, or did not, as if tuned with that version of FlashInfer and policy.

    Of 0.7.2.post1 there is one bundle, which is taken for one of each kind, and of 0.7.2, with the policy that
    entries have that were timed under that measurement policy (default and eager).
    """
    if version == "0.7.4":
        found = [bundle for bundle in embedded(version, policy) if bundle.default_raced is raced]
    else:
        found = embedded("0.7.2.post1")
    return [
        msgspec.structs.replace(
            bundle,
            entries={text: _timed_under(policy, entry) for text, entry in bundle.entries.items()},
            environment=bundle.environment.with_facts({"flashinfer_version": version}),
            policy=policy,
            default_raced=raced,
        )
        for bundle in found
    ]


def _timed_under(policy: MeasurementPolicy, entry: Entry) -> Entry:
    if policy == DEFAULT_POLICY or entry.policy is None:
        return entry
    name, _, *rest = entry.policy
    return msgspec.structs.replace(entry, policy=(name, None, *rest))  # without a graph there are no replays


class Machine:
    """A machine with one release of FlashInfer and the facts of the H200; everything it writes is below ``folder``.

    ``lookups`` are what its programs ask, ``expected`` what the bundles answer.
    """

    def __init__(self, programs: Programs, folder: Path, bundles: Sequence[Bundle], **environ: str) -> None:
        self.version = programs.version
        self.folder = folder
        self.cache = folder / "cache"
        self.home = folder / "home"
        self.bundles = list(bundles)
        self.environ = isolated(folder, {"FLASHINFER_WORKSPACE_BASE": str(folder / "flashinfer"), **environ})
        self._programs = programs
        # Of this runner 0.7.2 names the call's own M in the key of every smaller shape too, and so never finds them.
        self._winners = winners(*bundles)
        self.keep(
            lookup
            for lookup in self._winners
            if programs.version == "0.7.4" or "CublasltBf16GemmRunner" not in lookup.runners
        )

    def keep(self, lookups: Iterable[Lookup]) -> None:
        """Ask these alone."""
        self.asked = {lookup: self._winners[lookup] for lookup in lookups}
        self.lookups = [question(lookup.keys) for lookup in self.asked]
        self.expected = list(self.asked.values())

    def run(self, program: str, given: Any = None, **environ: str) -> Answer:
        """Run a program; ``given`` are its lookups, unless it says otherwise."""
        return self._programs.run(
            program=program,
            folder=self.folder,
            environ={**self.environ, **environ},
            metadata=self.bundles[0].environment.metadata(),
            given=self.lookups if given is None else given,
        )
