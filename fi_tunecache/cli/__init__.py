"""The command line. Each command lives in its own module and is imported only when it runs."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence

import click

from .. import __version__
from ..errors import CacheError, FiTuneCacheError, UsageError
from .output import help_without_command

__all__ = ["cli", "main", "run"]

_COMMANDS = {
    "env": "what this machine is: the facts that decide which entries are valid here",
    "list": "what a registry holds: versions, devices, bundles",
    "resolve": "what would be chosen for an environment, and why; stores nothing",
    "pull": "get the tuned entries for an environment, into the cache, a file or FlashInfer's managed store",
    "inspect": "what is in a file, store or bundle; given two: what differs",
    "verify": "check hashes, schema and rules of a registry, a bundle or the cache",
    "publish": "put tuned entries into a registry: gather, compare, check, upload",
    "yank": "mark a published bundle as unusable",
    "needed": "whether a recorded workload needs autotuning",
    "cache": "where the user cache is, what it holds, and how to empty it",
}


class _LazyGroup(click.Group):
    """Knows its commands by name and help; imports one's module when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f".{cmd_name}_command", __name__).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


_EPILOG = (
    "Exit codes: 0 done; 1 needed (command needed); 2 wrong usage, conflict or missing hardware; 3 nothing matches, or "
    "not known; 4 registry unreachable or refused; 5 integrity; 130 interrupted."
)


@click.group(
    cls=_LazyGroup,
    epilog=_EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="fi-tunecache", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Tuned FlashInfer tactics from a registry, resolved for your GPU and software, with reasons."""
    help_without_command(context)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; every foreseeable fault is one line on standard error."""
    try:
        result = cli.main(args=arguments, prog_name="fi-tunecache", standalone_mode=False)
    except FiTuneCacheError as error:
        return _fail(error)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "fi-tunecache"
        return _fail(UsageError(error.format_message().rstrip("."), f"see `{where} --help`"))
    except OSError as error:
        problem = "the output can't be written" if error.filename is None else f"{error.filename} can't be used"
        return _fail(CacheError(f"{problem} ({error.strerror})", "free space, or name another file"))
    except (KeyboardInterrupt, click.Abort):
        return _fail(UsageError("interrupted", "nothing was half-written"), 130)
    except SystemExit as stop:
        if stop.code != 1:
            raise
        return 0  # so does click leave when the reader of a pipe has gone: `fi-tunecache list | head -1`
    return result if isinstance(result, int) else 0


def _fail(error: FiTuneCacheError, code: int | None = None) -> int:
    with contextlib.suppress(OSError):  # where even that can't be written, the exit code still says it
        click.echo(f"fi-tunecache: {error}", err=True)
    return error.exit_code if code is None else code


def run() -> None:
    """The console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # it is None where it was closed
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what the terminal's encoding can't show
    code = main()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # main has reported it: keep Python from doing so once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
