"""The README and the docs show real output, name files that exist, and say nothing of one machine."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fi_tunecache.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def shown() -> list[tuple[str, str]]:
    """(command line, expected output) of every command of ours that a page shows with its output."""
    found = []
    for page in PAGES:
        for block in _BLOCK.findall(page.read_text()):
            command, _, output = block.removeprefix("$ ").partition("\n")
            if "fi-tunecache " in command and output.strip() and not output.startswith("$ "):
                found.append((command.rpartition("fi-tunecache ")[2], output))
    return found


def normalised(text: str) -> str:
    """Without what differs from run to run: durations, the cache's place, whether it was cached."""
    text = re.sub(r"in \d+ ms( \(cached\))?", "in N ms", text)
    return re.sub(r"^Selection: .*/", "Selection: CACHE/", text, flags=re.MULTILINE).strip()


@pytest.mark.parametrize(("arguments", "output"), [pytest.param(*case, id=case[0]) for case in shown()])
def test_commands_print_what_is_shown(
    arguments: str,
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FI_TUNECACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FI_TUNECACHE_REGISTRY", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(arguments)) == 0
    assert normalised(capsys.readouterr().out) == normalised(output)


def test_something_is_shown() -> None:
    assert len(shown()) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_readme_names_the_command_that_ci_runs() -> None:
    (command,) = re.findall(r"\$ (\./scripts/check)\n", (ROOT / "README.md").read_text())
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith(f"exec {command}")
