"""Is autotuning needed? A program is watched, an op that nobody declared comes in, and is covered.

Real FlashInfer, of which the timing of kernels alone is replaced; the commands are processes of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Done
from programs import Machine, Programs, bundles_of

from fi_tunecache.publish.directory import add_bundles

pytestmark = pytest.mark.slow

WATCHED = """
fi_tunecache.enable()
with fi_tunecache.record_lookups(workload="served") as lookups:
    {serves}
need = fi_tunecache.autotune_needed("served")
result = [need.needed, sorted(need.missing), need.covered]
"""
SERVES = "[ask(lookup) for lookup in given]"
TOY = {"custom_op": "toy_op", "runners": [["ToyRunner", ["torch.bfloat16"]]], "shapes": [[8, 64]]}


class Team(Machine):
    """A machine with a registry in a directory, and its command line."""

    def command(self, *arguments: str) -> Done:
        facts = self.folder / "facts.json"
        facts.write_text(json.dumps(self.bundles[0].environment.metadata()))
        done = subprocess.run(
            [sys.executable, "-m", "fi_tunecache", *arguments],
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def needed(self) -> tuple[int, list[str]]:
        """The exit code of `needed`, and the ops that it names."""
        done = self.command("needed", "served", "--environment", "facts.json", "--json")
        assert done.err == ""
        document: dict[str, Any] = json.loads(done.out)
        return done.code, sorted(document["missing"])


@pytest.fixture
def team(programs: Callable[[str], Programs], tmp_path: Path) -> Callable[[str], Team]:
    def make(version: str) -> Team:
        bundles = bundles_of(version)
        add_bundles(tmp_path / "registry", "made", bundles)
        folder = tmp_path / "machine"
        folder.mkdir()
        return Team(programs(version), folder, bundles, FI_TUNECACHE_REGISTRY=str(tmp_path / "registry"))

    return make


@pytest.mark.parametrize("version", ["0.7.4", "0.7.2.post1"])
def test_an_op_that_nobody_declared(team: Callable[[str], Team], version: str) -> None:
    here = team(version)
    watched = WATCHED.format(serves=SERVES)
    assert here.run(watched).result == [False, [], len(here.lookups)]
    assert here.needed() == (0, [])

    more = [*here.lookups, TOY]
    assert here.run(watched, more).result == [True, ["toy_op"], len(here.lookups)]
    assert here.needed() == (1, ["toy_op"])

    tuned = here.run('with autotune(True, cache="toy.json"): result = [ask(lookup) for lookup in given]', [TOY])
    assert tuned.profiles > 0
    published = here.command("publish", "toy.json", "--to", here.environ["FI_TUNECACHE_REGISTRY"], "--yes")
    assert published.code == 0, published.err
    assert here.command("pull", "--environment", "facts.json").code == 0
    code, missing = here.needed()
    assert (code, missing) == (3, []), "the selection has changed since it was recorded"

    again = here.run(watched, more)
    assert again.result == [False, [], len(more)]
    assert again.profiles == 0
    assert here.needed() == (0, [])


def test_what_the_program_has_tuned_and_saved_itself_is_covered(team: Callable[[str], Team]) -> None:
    here = team("0.7.4")
    serves = f'with autotune(True, cache="toy.json"): {SERVES}'
    assert here.run(WATCHED.format(serves=serves), [TOY]).result == [True, ["toy_op"], 0]
    assert here.run(WATCHED.format(serves=serves), [TOY]).result == [False, [], 1]


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        pytest.param("raise SystemExit(0)", 0, id="the program ends"),
        pytest.param("raise KeyboardInterrupt", 0, id="it is interrupted"),
        pytest.param("raise RuntimeError('no memory')", 3, id="it fails"),
    ],
)
def test_how_the_program_ends(team: Callable[[str], Team], ends: str, code: int) -> None:
    """After a failure nobody knows what it would have asked, and what was recorded before does not tell."""
    here = team("0.7.4")
    here.run(WATCHED.format(serves=SERVES))
    program = f"""
fi_tunecache.enable()
try:
    with fi_tunecache.record_lookups(workload="served"):
        {SERVES}
        {ends}
except BaseException:
    pass
"""
    here.run(program)
    assert here.needed()[0] == code


def test_switched_off(team: Callable[[str], Team]) -> None:
    here = team("0.7.4")
    here.run(WATCHED.format(serves=SERVES))
    assert here.needed()[0] == 0
    here.environ["FI_TUNECACHE"] = "off"
    assert here.needed()[0] == 3


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        pytest.param({"flashinfer_version": "0.7.2"}, "flashinfer_version", id="another FlashInfer"),
        pytest.param({"gpu": "NVIDIA B200"}, "gpu", id="another GPU"),
    ],
)
def test_another_environment_is_unknown(team: Callable[[str], Team], facts: dict[str, str], why: str) -> None:
    here = team("0.7.4")
    here.run(WATCHED.format(serves=SERVES))
    given = [argument for name, value in facts.items() for argument in ("--fact", f"{name}={value}")]
    done = here.command("needed", "served", "--environment", "facts.json", *given)
    assert (done.code, done.err) == (3, "")
    assert why in done.out


def test_observing(team: Callable[[str], Team]) -> None:
    """Nothing is served; at the end it is said what would have been."""
    here = team("0.7.4")
    answer = here.run(
        f"fi_tunecache.enable()\nresult = [{SERVES}, str(fi_tunecache.report())]\nfi_tunecache.disable()",
        FI_TUNECACHE="observe",
    )
    given, report = answer.result
    assert given == here.run(f"result = {SERVES}").result
    assert "an entry would be served: FI_TUNECACHE=observe serves none" in report
    found, observed = answer.lines("INFO")
    assert found.endswith(" ms (observed only)")
    assert observed.startswith(f"fi-tunecache: observed {len(here.lookups)} lookups of {len(here.lookups)} questions: ")
    assert answer.lines("WARNING") == []
