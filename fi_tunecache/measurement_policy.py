"""The measurement policy: under which conditions a whole tuning run was timed.

A separate axis beside the environment. The field names are those of FlashInfer's
``MeasurementPolicy.manifest_fields()`` (0.7.0 to 0.7.4, ``flashinfer/autotune_cache.py``), which
make it part of a managed store's identity. The policy of a single entry is another thing:
:data:`fi_tunecache.entry.ProfilingPolicy`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from .errors import FormatError, UsageError

__all__ = ["DEFAULT_POLICY", "EXECUTION_MODES", "MeasurementPolicy"]

EXECUTION_MODES = ("auto", "eager", "cuda_graph")
_FIELDS = {
    "measure_execution_mode": EXECUTION_MODES[1:],
    "measure_cold_l2": ("True", "False"),
    "measure_timer": ("cupti", "events", "events_no_delay"),
    "measure_graph_timing": ("amortized", "individual"),
}


class MeasurementPolicy(Struct, frozen=True):
    """What FlashInfer records when a policy is set; the default is that none is.

    ``fields`` are (name, value) in sorted order, exactly those of the store's manifest.
    """

    fields: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> MeasurementPolicy:
        """Check and freeze manifest fields. Raises FormatError for a field or value FlashInfer has not."""
        for name, value in fields.items():
            if value not in _FIELDS.get(name, ()):
                raise FormatError(
                    f"measurement policy: {name[:80]} = {str(value)[:80]!r} is not known", "upgrade fi-tunecache"
                )
        return cls(tuple(sorted((name, str(value)) for name, value in fields.items())))

    @classmethod
    def from_execution_mode(cls, mode: str) -> MeasurementPolicy:
        """``auto`` is the default policy. Raises UsageError for another word than :data:`EXECUTION_MODES`."""
        if mode not in EXECUTION_MODES:
            raise UsageError(f"execution mode {mode!r} is not known", f"use one of {', '.join(EXECUTION_MODES)}")
        return cls() if mode == "auto" else cls((("measure_execution_mode", mode),))

    def manifest_fields(self) -> dict[str, str]:
        return dict(self.fields)

    def __str__(self) -> str:
        if not self.fields:
            return "default"
        if len(self.fields) == 1 and self.fields[0][0] == "measure_execution_mode":
            return self.fields[0][1]
        return ", ".join(f"{name.removeprefix('measure_')}={value}" for name, value in self.fields)


DEFAULT_POLICY = MeasurementPolicy()
