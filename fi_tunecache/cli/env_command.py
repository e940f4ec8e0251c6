"""``fi-tunecache env``."""

from __future__ import annotations

from typing import Any

import click

from ..environment import Environment
from .options import as_json, environment_options, opening, registry_options, target_from
from .output import environment_builtins, print_json, print_line, print_table

__all__ = ["command"]


@click.command("env")
@environment_options
@registry_options
@as_json
def command(timeout: float, offline: bool, as_json: bool, **arguments: Any) -> None:
    """Show the facts that decide which entries are valid here.

    A fact that can't be told is undetermined: it matches nothing and is never guessed. Save them
    with `env --json > FILE` and use them elsewhere with `--environment FILE`.
    """
    with opening(None, timeout=timeout, offline=offline) as opener:
        target = target_from(arguments, opener)
    environment = target.environment
    reasons = {fact: target.reason(fact) for fact in environment.undetermined()}
    if as_json:
        print_json(
            {
                "environment": environment_builtins(environment),
                "compared": environment.identity(),
                "origin": target.origin,
                "undetermined": reasons,
            }
        )
        return
    print_line(f"Facts {target.origin}")
    print_table(
        ("fact", "value"),
        [(name, _value(environment, name, reasons.get(name))) for name in environment.names()],
        wrap=("value",),
    )
    if None in environment.identity().values():
        print_line("What is undetermined matches nothing: give it with --fact, or all with --environment or --like.")
    else:
        print_line("All facts are known: `fi-tunecache resolve` shows what fits.")


def _value(environment: Environment, fact: str, reason: str | None) -> str:
    """A fact as it is compared."""
    if reason is not None:
        return f"undetermined: {reason}"
    return environment.fact(fact) or f"undetermined: {environment.raw(fact)} is what FlashInfer guesses"
