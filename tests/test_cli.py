"""The command line as a whole: help, versions, wrong usage, and what it does to standard output."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
from command_line import LIKE, CommandLine, only_line, snapshot
from made_machine import add_flashinfer

import fi_tunecache
from fi_tunecache.__main__ import run
from fi_tunecache.cli import main

COMMANDS = ("env", "list", "resolve", "pull", "inspect", "verify", "publish", "yank", "needed", "cache")
REGISTRY_COMMANDS = ("env", "list", "resolve", "pull")


def test_version(command_line: CommandLine) -> None:
    assert command_line.output("--version") == f"fi-tunecache {fi_tunecache.__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_command_and_exit_code(command_line: CommandLine, flag: str) -> None:
    text = command_line.output(flag)
    for command in COMMANDS:
        assert f"\n  {command} " in text
    for code in ("0 done", "1 needed", "2 wrong usage", "3 nothing", "4 registry", "5 integrity", "130 interrupted"):
        assert code in " ".join(text.split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", ["80", "40"])
def test_every_command_has_help_that_fits(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, command: str, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = command_line.output(command, "--help")
    assert text.startswith("Usage: fi-tunecache " + command)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", REGISTRY_COMMANDS)
def test_help_tells_which_registry_is_used(command_line: CommandLine, command: str) -> None:
    text = " ".join(command_line.output(command, "--help").split())
    assert "Default: FI_TUNECACHE_REGISTRY, else the embedded one." in text


def test_the_help_of_pull_says_where_entries_come_from(command_line: CommandLine) -> None:
    text = " ".join(command_line.output("pull", "--help").split())
    assert "from the embedded registry unless --registry or FI_TUNECACHE_REGISTRY names others" in text
    assert "FI_TUNECACHE_MATCH, else exact" in text


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        pytest.param([], "Usage: fi-tunecache [OPTIONS]", id="no command"),
        pytest.param(["cache"], "Usage: fi-tunecache cache [OPTIONS]", id="cache"),
    ],
)
def test_without_a_command_there_is_help(command_line: CommandLine, arguments: list[str], first: str) -> None:
    done = command_line(*arguments)
    assert (done.code, done.err) == (2, "")
    assert done.out.startswith(first)
    assert done.out == command_line.output(*arguments, "--help")


@pytest.mark.parametrize(
    ("arguments", "about", "command"),
    [
        pytest.param(["frob"], "No such command 'frob'", "fi-tunecache", id="no such command"),
        pytest.param(["--frob"], "No such option", "fi-tunecache", id="no such option"),
        pytest.param(["cache", "frob"], "No such command 'frob'", "fi-tunecache cache", id="no such command of cache"),
        pytest.param(["inspect"], "Missing argument 'SOURCE'", "fi-tunecache inspect", id="a missing argument"),
        pytest.param(["verify", "a", "b"], "unexpected extra argument", "fi-tunecache verify", id="one too many"),
        pytest.param(["pull", "--to"], "'--to' requires an argument", "fi-tunecache", id="--to alone"),
        pytest.param(["pull", "--match", "fuzzy"], "'fuzzy' is not one of", "fi-tunecache pull", id="--match"),
        pytest.param(
            ["resolve", "--execution-mode", "x"], "'x' is not one of", "fi-tunecache resolve", id="--execution-mode"
        ),
        pytest.param(["env", "--gpu", "-1"], "-1 is not in the range", "fi-tunecache env", id="--gpu"),
        pytest.param(
            ["cache", "prune", "--older-than", "x"], "'x' is not a valid", "fi-tunecache cache prune", id="--older-than"
        ),
        pytest.param(
            ["cache", "prune", "--older-than", "nan"],
            "nan is not a number of days",
            "fi-tunecache cache prune",
            id="--older-than nan",
        ),
    ],
)
def test_wrong_usage_is_one_line(command_line: CommandLine, arguments: list[str], about: str, command: str) -> None:
    line = command_line.fault(2, *arguments)
    assert about in line
    assert line.endswith(f"; see `{command} --help`")


def test_a_line_drives_no_terminal(command_line: CommandLine) -> None:
    assert "\x1b" not in command_line.fault(2, "\x1b[31mred\nline")
    assert command_line.fault(2, "inspect", "\x1b[31m\nred") == (
        "\N{REPLACEMENT CHARACTER}[31m red does not exist; name a v1 file, a store, a bundle or a bundled module"
    )


def test_a_path_that_no_file_can_have(command_line: CommandLine) -> None:
    assert "(File name too long); " in command_line.fault(2, "verify", "x" * 300)


def test_the_console_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--version"], 0), (["frob"], 2)):
        monkeypatch.setattr(sys, "argv", ["fi-tunecache", *arguments])
        with pytest.raises(SystemExit) as stop:
            run()
        assert stop.value.code == code
    captured = capsys.readouterr()
    assert captured.out == f"fi-tunecache {fi_tunecache.__version__}\n"
    assert only_line(captured.err) == "No such command 'frob'; see `fi-tunecache --help`"


def test_an_interrupt(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: signal.raise_signal(signal.SIGINT))
    done = command_line("pull", *LIKE)
    assert (done.code, done.out) == (130, "")
    assert only_line(done.err.lstrip()) == "interrupted; nothing was half-written"
    assert snapshot(command_line.folder) == {}


def test_an_interrupt_while_the_commands_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupt(MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name == "fi_tunecache.cli":
                signal.raise_signal(signal.SIGINT)

    monkeypatch.delitem(sys.modules, "fi_tunecache.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 130
    assert only_line(capsys.readouterr().err) == "interrupted; nothing was half-written"


def test_a_reader_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    pipe = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # click puts a wrapper around both
    assert main(["list"]) == 0
    with contextlib.suppress(BrokenPipeError):
        pipe.close()


def test_output_that_can_not_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "argv", ["fi-tunecache", "list"])
        with pytest.raises(SystemExit) as stop:
            run()
    assert stop.value.code == 2
    assert only_line(capsys.readouterr().err) == (
        "the output can't be written (No space left on device); free space, or name another file"
    )


def test_a_flashinfer_that_ends_the_process(machine_that_exits: None, command_line: CommandLine) -> None:
    assert command_line.fault(2, "env", "--probe", "full") == (
        "FlashInfer can't be imported: SystemExit: flashinfer was imported; use --probe light"
    )


@pytest.fixture
def machine_that_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FlashInfer whose import ends the process."""
    add_flashinfer(tmp_path / "site", "0.7.4")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def test_a_shell_completes_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_FI_TUNECACHE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "fi-tunecache ")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 0
    assert capsys.readouterr().out.split() == [f"plain,{command}" for command in COMMANDS]


def test_the_package_can_be_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["-m", "cache", "dir"])
    monkeypatch.delitem(sys.modules, "fi_tunecache.__main__")
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("fi_tunecache", run_name="__main__")
    assert stop.value.code == 0
    assert Path(capsys.readouterr().out.strip()).is_absolute()
