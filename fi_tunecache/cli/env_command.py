"""``fi-tunecache env``."""

from __future__ import annotations

from typing import Any

import click

from ..environment import FACTS
from .options import as_json, environment_options, registry_option, target_from
from .output import print_json, print_table

__all__ = ["command"]


@click.command("env")
@environment_options
@registry_option
@as_json
def command(as_json: bool, **arguments: Any) -> None:
    """Show the facts that decide which entries are valid here.

    A fact that can't be told is undetermined: it matches nothing and is never guessed. Save them
    with `env --json > FILE` and use them elsewhere with `--environment FILE`.
    """
    target = target_from(arguments)
    reasons = dict(target.undetermined)
    environment = target.environment
    if as_json:
        print_json(
            {
                "environment": {name: environment.raw(name) for name in environment.names()},
                "compared": environment.identity(),
                "origin": target.origin,
                "undetermined": {
                    name: reasons.get(name, "not given")
                    for name in environment.names()
                    if environment.raw(name) is None
                },
            }
        )
        return
    rows = []
    for name in environment.names():
        value = environment.fact(name) or environment.raw(name)
        rows.append((name, value if value is not None else f"undetermined: {reasons.get(name, 'not given')}"))
    print_table(f"Facts {target.origin}", ("fact", "value"), rows)
    if all(environment.raw(name) for name in FACTS):
        click.echo("All facts are known: `fi-tunecache resolve` shows what fits.")
