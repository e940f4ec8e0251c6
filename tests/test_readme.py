"""The README and the docs show real output, name files that exist, and say nothing of one machine."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
from command_line import CommandLine
from hub_server import HubServer

from fi_tunecache.cli import cli, main
from fi_tunecache.source import SourceKind, read_source

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


# --- commands that are shown without their output


def named() -> list[str]:
    """Every command line of ours that a page names, in a block or in running text."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^(?:\$ )?(?:.*/)?fi-tunecache (.+)$", "\n".join(blocks(text)), re.M):
            found[line] = None
        for line in re.findall(r"`fi-tunecache ([^`]+)`", text):
            found[line] = None
    return list(found)


def blocks(text: str) -> list[str]:
    return re.findall(r"```(?:console|sh)\n(.*?)```", text, re.DOTALL)


def words(line: str) -> list[str]:
    """As a shell takes a line apart, up to a redirection."""
    found = shlex.split(line, comments=True)
    return found[: found.index(">")] if ">" in found else found


@pytest.mark.parametrize("line", [pytest.param(line, id=line[:80].strip()) for line in named()])
def test_commands_have_the_options_that_are_named(line: str) -> None:
    """Taken apart as when it is run, and not run; of one that is only mentioned, whether it exists."""
    arguments = words(line)
    mentioned = len(arguments) == 1
    command: click.Command | None = cli
    with click.Context(cli) as context:
        while isinstance(command, click.Group) and arguments:
            command = command.get_command(context, arguments.pop(0))
        assert command is not None
        if not mentioned:
            command.make_context("command", arguments, parent=context).close()


@pytest.mark.parametrize("line", ["publish SOURCE --into ./registry", "yank --reason x", "pull --match close", "sync"])
def test_a_command_that_is_none_would_be_noticed(line: str) -> None:
    with pytest.raises((click.UsageError, AssertionError)):
        test_commands_have_the_options_that_are_named(line)


def options(command: click.Command) -> set[str]:
    """Those of a command and of all below it."""
    found = {option for parameter in command.params for option in parameter.opts}
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            below = [command.get_command(context, name) for name in command.list_commands(context)]
        found |= {option for inner in below if inner is not None for option in options(inner)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert set(re.findall(r"`(--[a-z-]+)[^`]*`", text)) <= {*options(cli), "--help"}


def test_a_team_shares_results_in_five_lines(
    hub: HubServer, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of the README, line by line, against the loopback Hub."""
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(block.splitlines()) == 5
    shutil.copytree(ROOT / "tests" / "data", Path("tests", "data"))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    requests: list[int] = []
    for line in block.replace("\\\n", " ").splitlines():
        program, *arguments = words(line)
        hub.clear_log()
        if program == "export":
            monkeypatch.setenv(*arguments[0].split("=", 1))
            continue
        assert program == "fi-tunecache"
        done = command_line(*arguments)
        assert done.code == 0, done.err
        requests.append(len(hub.log))
    assert requests[-1] == 0, "the locked pull asks nobody"
    assert all(requests[:-1])
    tuned = read_source(Path("tuned.json"))
    assert tuned.kind is SourceKind.PULLED
    assert [len(section.entries) for section in tuned.sections] == [90]
    repository = hub.repository("my-team/tuned")
    assert repository is not None
    assert repository.private
