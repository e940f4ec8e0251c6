"""``fi-tunecache resolve``."""

from __future__ import annotations

from typing import Any

import click

from ..errors import NoMatchError
from ..materialisation import resolution_builtins
from ..retrieval import no_match, resolve
from ..verdict import Resolution
from ..wording import count_entries, plural
from .options import (
    as_json,
    environment_options,
    match_options,
    opening,
    registry_options,
    request_from,
    target_from,
    user_cache,
)
from .output import environment_builtins, other_level_line, print_json, print_line

__all__ = ["command"]


@click.command("resolve")
@environment_options
@match_options
@registry_options
@as_json
def command(timeout: float, offline: bool, as_json: bool, **arguments: Any) -> int:
    """Show what would be chosen for an environment and why; every bundle with its reason. Stores nothing.

    Exit code 3 if nothing fits.
    """
    with user_cache() as cache, opening(cache, timeout=timeout, offline=offline) as opener:
        target = target_from(arguments, opener)
        request = request_from(target, arguments)
        trees = [opener(name) for name in request.registries]
        asked, other = resolve(
            request, cache=cache, opener=dict(zip(request.registries, trees, strict=True)).__getitem__
        )
    if as_json:
        print_json(
            {
                **resolution_builtins(asked),
                "environment": environment_builtins(asked.environment),
                "origin": target.origin,
                "registries": list(request.registries),
                "selection": request.selection_id,
                "nearest": asked.nearest.bundle_id if asked.nearest else None,
                "other_match": {"match": other.level.value, "entries": len(other.chosen), "bundles": len(other.used)},
            }
        )
        return 0 if asked.chosen else NoMatchError.exit_code
    print_line(f"{target.environment.gpu}, flashinfer {target.environment.flashinfer_version} ({target.origin})")
    _print_resolution(asked, other)
    if not asked.chosen:
        raise no_match(asked, other, [opener(name) for name in request.registries], explained=True)
    return 0


def _print_resolution(asked: Resolution, other: Resolution) -> None:
    """Every candidate and every dropped group of entries, a line each, and the other level in one."""
    bundles = plural(len(asked.used), "bundle")
    print_line(f"{count_entries(len(asked.chosen))} of {bundles} at match level {asked.level}, policy {asked.policy}")
    for verdict in asked.verdicts:
        print_line(f"  {verdict}")
        for dropped in asked.dropped:
            if dropped.bundle_id == verdict.bundle_id:
                print_line(f"    {dropped}")
    if not asked.chosen and asked.nearest is not None:
        differing = "; ".join(map(str, asked.nearest.rejected or asked.nearest.differing))
        print_line(f"Nearest bundle not used: {asked.nearest.bundle_id} ({differing})")
    print_line(other_level_line(len(asked.chosen), other.level.value, len(other.chosen), len(other.used)))
