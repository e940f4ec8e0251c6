"""Options that several commands share, and what they mean."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import click

from ..deadline import Deadline
from ..errors import UsageError
from ..match_level import MatchLevel
from ..measurement_policy import EXECUTION_MODES, MeasurementPolicy
from ..registry_tree import COMMAND_DEADLINE, RegistryTree, open_tree, registry_names
from ..selection import Request
from ..target import Target, TargetOptions, find_target
from ..user_cache import UserCache
from .output import progress

__all__ = [
    "as_json",
    "environment_options",
    "match_options",
    "note",
    "opening",
    "registry_options",
    "request_from",
    "target_from",
    "timeout_option",
    "user_cache",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON with stable keys (docs/json.md).")

timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=COMMAND_DEADLINE,
    show_default=True,
    metavar="SECONDS",
    help="How long a Hub may take, in all.",
)


def registry_options(command: _Command) -> _Command:
    """Which registries, and how a Hub among them may be used."""
    options = [
        click.option(
            "--registry",
            "registries",
            multiple=True,
            metavar="NAME",
            help="hf://datasets/ORGANISATION/NAME[@REVISION], a path (/…, ./…), or 'embedded'; repeat for several, the "
            "first has precedence. Default: FI_TUNECACHE_REGISTRY, else the embedded one.",
        ),
        timeout_option,
        click.option(
            "--offline", is_flag=True, help="Ask no Hub; take what is cached of it. So does HF_HUB_OFFLINE=1."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@contextlib.contextmanager
def opening(
    cache: UserCache | None, *, timeout: float = COMMAND_DEADLINE, offline: bool = False
) -> Iterator[Callable[[str], RegistryTree]]:
    """How registries are opened while a command runs; on a terminal it is shown what is being fetched.

    Without a cache the user's is found once a Hub needs it: other registries do without."""
    with progress() as say:
        opener = partial(open_tree, cache=cache, deadline=Deadline(timeout), offline=offline, progress=say)
        yield lru_cache(maxsize=None)(opener)  # a registry is asked for its commit once


def note(line: str) -> None:
    """Say something beside the output proper, on standard error."""
    click.echo(f"fi-tunecache: {line}", err=True)


@contextlib.contextmanager
def user_cache() -> Iterator[UserCache]:
    """The user cache; what went wrong with it and was dealt with is said at the end."""
    cache = UserCache.locate()
    try:
        yield cache
    finally:
        for notice in cache.notices:
            note(notice)


def environment_options(command: _Command) -> _Command:
    """Which environment the command is about."""
    options = [
        click.option("--gpu", "gpu_index", type=click.IntRange(0), metavar="INDEX", help="GPU by nvidia-smi's index."),
        click.option("--device", metavar="NAME", help="GPU by name, where there is none: 'NVIDIA H200'."),
        click.option(
            "--fact", "facts", multiple=True, metavar="NAME=VALUE", help="One fact, e.g. cudnn_version=91900; repeat."
        ),
        click.option(
            "--environment",
            "environment_file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="All facts, from `fi-tunecache env --json > FILE`.",
        ),
        click.option(
            "--like", metavar="VERSION/DEVICE[/BUNDLE]", help="All facts of a published bundle, e.g. 0.7.4/nvidia-h200."
        ),
        click.option(
            "--probe",
            type=click.Choice(["auto", "light", "full"]),
            default="auto",
            help="light: import neither torch nor FlashInfer; full: ask FlashInfer itself. Default: auto.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def match_options(command: _Command) -> _Command:
    """How closely, and under which measurement policy."""
    options = [
        click.option(
            "--match",
            "level",
            type=click.Choice([level.value for level in MatchLevel]),
            default=None,
            help="exact: all facts equal; compatible: those that a tactic depends on. "
            "Default: FI_TUNECACHE_MATCH, else exact.",
        ),
        click.option(
            "--execution-mode",
            type=click.Choice(EXECUTION_MODES),
            default="auto",
            help="The measurement policy to serve. Default: auto, FlashInfer's own.",
        ),
        click.option("--skip-op", "skip_ops", multiple=True, metavar="OP", help="Leave out a custom op; repeat."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _facts(given: tuple[str, ...]) -> Mapping[str, str]:
    facts: dict[str, str] = {}
    for item in given:
        name, separator, value = item.partition("=")
        if not separator or not value:
            raise UsageError(f"--fact {item[:80]!r} is not NAME=VALUE", "write it like --fact cudnn_version=91900")
        name, value = name.strip(), value.strip()
        if facts.setdefault(name, value) != value:
            raise UsageError(f"--fact gives two values for {name[:80]}", "give one")
    return facts


def target_from(arguments: Mapping[str, Any], opener: Callable[[str], RegistryTree]) -> Target:
    """The environment that the options of :func:`environment_options` and :func:`registry_options` describe."""
    options = TargetOptions(
        device=arguments["device"],
        environment_file=arguments["environment_file"],
        like=arguments["like"],
        facts=_facts(arguments["facts"]),
        gpu_index=arguments["gpu_index"],
        probe=arguments["probe"],
    )
    return find_target(options, registry_names(arguments["registries"], os.environ), note, opener)


def request_from(target: Target, arguments: Mapping[str, Any], lock: str | None = None) -> Request:
    """The request that the options of :func:`match_options` and :func:`registry_options` describe.

    Raises HardwareError where the GPU or FlashInfer's version is undetermined.
    """
    target.require_folder()
    return Request(
        environment=target.environment,
        registries=registry_names(arguments["registries"], os.environ),
        level=MatchLevel.in_use(arguments["level"], os.environ),
        policy=MeasurementPolicy.from_execution_mode(arguments["execution_mode"]),
        skip_ops=frozenset(arguments["skip_ops"]),
        lock=lock,
    )
