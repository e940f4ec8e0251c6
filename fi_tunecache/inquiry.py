"""The inquiry: does a workload need autotuning here and now? Reads the user cache and this machine's facts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .environment import Environment
from .match_level import MatchLevel
from .measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from .need import Need, judge
from .probe import probe_environment
from .recorded_lookup import RecordedLookup, Served
from .registry_tree import registry_names
from .retrieval import cached
from .selection import Request, Selection
from .serving_mode import ServingMode
from .user_cache import UserCache
from .workload import Workload
from .workload_record import RecordedSelection, WorkloadRecord, find_record

__all__ = ["autotune_needed", "need_of", "selection_now"]


def autotune_needed(
    workload: Workload | Mapping[str, str | int] | str,
    *,
    cache: UserCache | None = None,
    environment: Environment | None = None,
    registry: str | Sequence[str] | None = None,
    match: str | None = None,
    policy: MeasurementPolicy | None = None,
) -> Need:
    """Tell from the recorded lookups of a workload whether a new process would have to tune.

    Asks no registry, takes no lock and writes nothing (but that damaged files in the cache are set aside). It does
    not look into files and managed stores of FlashInfer, which may have gone since.

    Parameters
    ----------
    workload
        As it was recorded: its parts, ``"model=llama,tp=2"``, a word, or the beginning of its id.
    cache
        By default the user's; what was wrong with it stands in its ``notices``.
    environment
        The facts of the machine; by default they are probed, see :func:`~fi_tunecache.probe.probe_environment`.
    registry, match, policy
        By default, registries and match level by ``FI_TUNECACHE_REGISTRY`` and ``FI_TUNECACHE_MATCH``, as a start here
        would have them; where these are not set, those of the selection that was there when the workload was recorded.

    Raises
    ------
    UsageError
        What can't name a workload, or an argument or variable that makes no sense.
    HardwareError
        There are several GPUs of different names.
    """
    cache = cache or UserCache.locate()
    record = find_record(cache, workload)
    if environment is None:
        environment = probe_environment("auto").environment
    named = (registry,) if isinstance(registry, str) else tuple(registry or ())
    return need_of(record, environment, cache, registries=named, match=match, policy=policy)


def need_of(
    record: WorkloadRecord | None,
    environment: Environment,
    cache: UserCache,
    *,
    registries: tuple[str, ...] = (),
    match: str | None = None,
    policy: MeasurementPolicy | None = None,
) -> Need:
    """The same for a record that was found, or not; parameters as in :func:`autotune_needed`."""
    mode = ServingMode.of(os.environ)
    if record is not None and mode is not ServingMode.ON and any(map(_is_ours, record.lookups)):
        why = f"FI_TUNECACHE={mode.value}: entries of a registry answered when it was recorded, and are not served now"
        return Need(needed=None, why=why)
    recorded = None if record is None else record.selection
    now = selection_now(recorded, environment, cache, registries=registries, match=match, policy=policy)
    return judge(record, environment, now)


def selection_now(
    recorded: RecordedSelection | None,
    environment: Environment,
    cache: UserCache,
    *,
    registries: tuple[str, ...] = (),
    match: str | None = None,
    policy: MeasurementPolicy | None = None,
) -> Selection | None:
    """The selection that the cache has now; what is neither given nor named by a variable is as in the recorded one."""
    if recorded is not None:
        registries = registries or (() if os.environ.get("FI_TUNECACHE_REGISTRY") else recorded.registries)
        match = match or os.environ.get("FI_TUNECACHE_MATCH") or recorded.level.value
        policy = policy or MeasurementPolicy.from_fields(recorded.policy)
    request = Request(
        environment=environment,
        registries=registry_names(registries, os.environ),
        level=MatchLevel.in_use(match, os.environ),
        policy=policy or DEFAULT_POLICY,
    )
    held = cached(request, cache)
    return None if held is None else held.selection


def _is_ours(lookup: RecordedLookup) -> bool:
    return lookup.served is Served.REGISTRY
