"""``enable()``: FlashInfer's autotuner in this program reads our entries, from its first lookup on."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from .deadline import Deadline
from .errors import UsageError
from .hook import Hook, Options
from .import_hook import after_import
from .match_level import MatchLevel
from .registry_tree import registry_names
from .serving_mode import ServingMode

if TYPE_CHECKING:
    from .lookups import Lookups

__all__ = ["FIRST_LOOKUP_DEADLINE", "current", "disable", "enable"]

FIRST_LOOKUP_DEADLINE = 10.0
"""Seconds that a program's first lookup may take longer on our account."""

Registries: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None"

logger = logging.getLogger("fi_tunecache")


def enable(
    registry: Registries = None,
    match: str | None = None,
    deadline: float = FIRST_LOOKUP_DEADLINE,
    offline: bool | None = None,
    *,
    group: Any = None,
) -> None:
    """Let FlashInfer's autotuner in this process read tuned entries of a registry.

    Imports neither FlashInfer nor torch, touches no CUDA, asks nobody: it may be called at import and before a fork.
    The first lookup (``AutoTuner.choose_one``) does the work, once, and takes ``deadline`` seconds longer at the
    most; a lookup while a CUDA graph is recorded is let through, and the next one does it. Calling it again does
    nothing, with other arguments it starts anew.

    The program's own results come first: in memory, in files that it has loaded, and in a managed store. It does
    not tune what is covered, tunes the rest, and what it saves holds both. It does not pull again where a
    selection is cached: ``fi-tunecache pull`` does.

    Parameters
    ----------
    registry
        A registry's name, or several in order of precedence. Default: ``FI_TUNECACHE_REGISTRY``, else the embedded one.
    match
        ``exact`` or ``compatible``. Default: ``FI_TUNECACHE_MATCH``, else ``exact``.
    deadline
        Seconds that the first lookup may take longer, in all.
    offline
        Ask no Hub. Default: as ``HF_HUB_OFFLINE`` says.
    group
        Under torch.distributed: the group whose ranks must have the same entries, or True for all. Rank 0 of it
        finds them; they are installed on all of its ranks or on none. A program with several ranks that names no
        group gets none.

    Raises
    ------
    UsageError
        An argument that makes no sense. Nothing else is ever raised; a variable that makes no sense is a warning.
    """
    try:
        options = _options(registry, match, deadline, offline, group)
        if options is not None:
            _start(options)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
        logger.warning("fi-tunecache: %s: %s; FlashInfer goes on without it", type(error).__name__, error)


def _options(
    registry: Registries, match: str | None, deadline: float, offline: bool | None, group: Any
) -> Options | None:
    Deadline(deadline)
    if isinstance(registry, (str, os.PathLike)):
        registry = (os.fspath(registry),)
    named = tuple(os.fspath(name) for name in registry or ())
    level = None if match is None else MatchLevel.parse(match)
    try:
        mode = ServingMode.of(os.environ)
        level = level or MatchLevel.in_use(None, os.environ)
    except UsageError as error:
        logger.warning("fi-tunecache: %s; FlashInfer goes on without it", error)
        return None
    if mode is ServingMode.OFF:
        return None
    return Options(
        registries=registry_names(named, os.environ),
        level=level,
        deadline=deadline,
        offline=bool(offline),
        observe=mode is ServingMode.OBSERVE,
        group=group,
    )


def disable() -> None:
    """Serve nothing more from a registry. What was served stays, as from a file that the program has loaded."""
    global _hook
    with _lock:
        hook, _hook = _hook, None
        if hook is not None:
            hook.stop()
        _end_observation()


def current() -> Hook | None:
    """What :func:`enable` has started in this process."""
    return _hook


_lock = threading.RLock()  # an import that is waited for here may run in this thread
_hook: Hook | None = None
_observed: Lookups | None = None


def _start(options: Options) -> None:
    global _hook
    with _lock:
        if _hook is not None:
            if _hook.options == options:
                return
            _hook.stop()
        _hook = Hook(options)
        after_import("flashinfer.autotuner", _hook.attach)
        if options.observe:
            _observe()


def _observe() -> None:
    """Record what is looked up, and say at the end what would have been served."""
    global _observed
    from .lookups import Lookups

    if _observed is None:
        _observed = Lookups()
        _observed.start()
        atexit.register(_end_observation)


def _end_observation() -> None:
    global _observed
    observed, _observed = _observed, None
    if observed is None:
        return
    atexit.unregister(_end_observation)
    try:
        observed.stop()
        logger.info(
            "fi-tunecache: observed %s", "; ".join(line.strip() for line in str(observed.report()).splitlines())
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
        logger.warning("fi-tunecache: %s: %s", type(error).__name__, error)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    if _hook is not None:
        _hook.after_fork()


os.register_at_fork(after_in_child=_after_fork)
