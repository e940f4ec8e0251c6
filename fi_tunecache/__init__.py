"""Tuned FlashInfer tactics from a registry, resolved for this GPU and software, with reasons.

>>> from fi_tunecache import Request, open_registry, pull
>>> from fi_tunecache.folder import Folder
>>> row = open_registry("embedded").manifest(Folder.parse("0.7.4/nvidia-h200")).bundles[0]
>>> pull(Request(environment=row.tuned_in, registries=("embedded",))).selection.entries
165

Importing this package imports none of its modules, torch, flashinfer or huggingface_hub: a name is
imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .environment import Environment
    from .errors import (
        CacheError,
        FiTuneCacheError,
        FormatError,
        HardwareError,
        IntegrityError,
        NoMatchError,
        RegistryError,
        UsageError,
    )
    from .inquiry import autotune_needed
    from .lookups import record_lookups, report
    from .match_level import MatchLevel
    from .measurement_policy import MeasurementPolicy
    from .need import Need
    from .probe import probe_environment
    from .registry import Registry, open_registry
    from .retrieval import Pulled, pull, resolve
    from .selection import Request, Selection
    from .serving import disable, enable

__version__ = "0.1.0"

__all__ = [
    "CacheError",
    "Environment",
    "FiTuneCacheError",
    "FormatError",
    "HardwareError",
    "IntegrityError",
    "MatchLevel",
    "MeasurementPolicy",
    "Need",
    "NoMatchError",
    "Pulled",
    "Registry",
    "RegistryError",
    "Request",
    "Selection",
    "UsageError",
    "autotune_needed",
    "disable",
    "enable",
    "open_registry",
    "probe_environment",
    "pull",
    "record_lookups",
    "report",
    "resolve",
]

_MODULES = {
    "Environment": "environment",
    "MatchLevel": "match_level",
    "MeasurementPolicy": "measurement_policy",
    "Need": "need",
    "Pulled": "retrieval",
    "Registry": "registry",
    "Request": "selection",
    "Selection": "selection",
    "autotune_needed": "inquiry",
    "disable": "serving",
    "enable": "serving",
    "open_registry": "registry",
    "probe_environment": "probe",
    "pull": "retrieval",
    "record_lookups": "lookups",
    "report": "lookups",
    "resolve": "retrieval",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
