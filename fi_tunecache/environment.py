"""The environment: the facts that FlashInfer stamps into a cache.

A fact that is missing, null, ``unknown``, ``None`` or ``0.0.0+unknown`` is *undetermined*: it is
``None`` here and equals nothing, not even another undetermined one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from .device import Device
from .errors import FormatError, HardwareError, UsageError

__all__ = ["FACTS", "Environment", "reduce_fingerprint"]

FACTS = (
    "flashinfer_version",
    "cuda_version",
    "cublas_version",
    "cudnn_version",
    "cudnn_frontend_version",
    "cutlass_dsl_version",
    "gpu",
)
"""Names and order as in ``flashinfer.autotuner.autotuner._collect_metadata`` (0.7.0 to 0.7.4)."""

_UNDETERMINED = (None, "unknown", "None", "0.0.0+unknown")
"""FlashInfer's ``_INDETERMINATE_META_VALUES``, and what its version is in a bare source tree."""

_FACT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_MAX_FACT = 4096
_MAX_EXTRA_FACTS = 32


class Environment(Struct, frozen=True, kw_only=True):
    """Seven facts, each a string as FlashInfer prints it, or None where it is undetermined.

    ``other`` holds facts that a newer FlashInfer may add: (name, value) in sorted order. We
    don't know what depends on them, so everything does.
    """

    flashinfer_version: str | None = None
    cuda_version: str | None = None
    cublas_version: str | None = None
    cudnn_version: str | None = None
    cudnn_frontend_version: str | None = None
    cutlass_dsl_version: str | None = None
    gpu: str | None = None
    other: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_metadata(cls, metadata: object, source: str = "") -> Environment:
        """Read what FlashInfer writes as ``_metadata``, or ``env --json``.

        Objects and lists under other names than a fact's (such as our own) are passed over.

        Raises
        ------
        FormatError
            Not an object, a fact that is not a line of text, a name that can't be a fact's, or the
            wildcard ``*`` (which FlashInfer accepts everywhere, so nobody can say where it was tuned).
        """
        if not isinstance(metadata, Mapping):
            raise FormatError(f"metadata is a {type(metadata).__name__}, not an object", "tune again", source=source)
        facts: dict[str, str | None] = {}
        other: list[tuple[str, str]] = []
        for name, value in metadata.items():
            if name not in FACTS and isinstance(value, (Mapping, list)):
                continue
            if not _FACT_NAME.fullmatch(name):
                raise FormatError(f"{name[:80]!r} can't be the name of a fact", "remove it", source=source)
            if value is not None and not isinstance(value, str):
                raise FormatError(f"{name} is a {type(value).__name__}, not a string", "tune again", source=source)
            if value == "*":
                raise FormatError(f"{name} is the wildcard '*'", "tune again; a wildcard says nothing", source=source)
            if value is not None and (len(value) > _MAX_FACT or not value.isprintable()):
                raise FormatError(f"{name} is not a fact: {value[:80]!r}", "tune again", source=source)
            known = None if value in _UNDETERMINED or not value.strip() else value
            if name in FACTS:
                facts[name] = known
            elif known is not None:
                other.append((name, known))
        if len(other) > _MAX_EXTRA_FACTS:
            raise FormatError(
                f"metadata has {len(other)} facts that are not known", "upgrade fi-tunecache", source=source
            )
        return cls(**facts, other=tuple(sorted(other)))

    def names(self) -> tuple[str, ...]:
        """The names of all facts, known ones first."""
        return (*FACTS, *(name for name, _ in self.other))

    def raw(self, name: str) -> str | None:
        """A fact as FlashInfer prints it; None where it is undetermined."""
        if name in FACTS:
            value = getattr(self, name)
            assert value is None or isinstance(value, str)
            return value
        return dict(self.other).get(name)

    def fact(self, name: str) -> str | None:
        """A fact as it is compared: the CuTe-DSL fingerprint reduced, a cuBLAS version that is
        only FlashInfer's guess from the toolkit (``cuda-toolkit-13.0``) undetermined."""
        value = self.raw(name)
        if value is not None and name == "cutlass_dsl_version":
            return reduce_fingerprint(value)
        if value is not None and name == "cublas_version" and value.startswith("cuda-toolkit-"):
            return None
        return value

    def undetermined(self) -> tuple[str, ...]:
        """Names of the facts that are not known as FlashInfer prints them."""
        return tuple(name for name in FACTS if self.raw(name) is None)

    def metadata(self) -> dict[str, str]:
        """What FlashInfer would stamp: the known facts in its order."""
        return {name: value for name in self.names() if (value := self.raw(name)) is not None}

    def identity(self) -> dict[str, str | None]:
        """The facts as they are compared, undetermined ones as None."""
        return {name: self.fact(name) for name in self.names()}

    @property
    def device(self) -> Device:
        """Raises HardwareError where the GPU is undetermined."""
        if self.gpu is None:
            raise HardwareError(
                "no GPU was found",
                "name one with --device 'NVIDIA H200', or bring all facts with --environment FILE or --like",
            )
        return Device(self.gpu)

    def with_facts(self, facts: Mapping[str, str]) -> Environment:
        """A copy with single facts replaced. Raises UsageError for a name or a value that is not a fact's."""
        for name in facts:
            if name not in FACTS:
                raise UsageError(f"{name[:80]!r} is not a fact", f"the facts are {', '.join(FACTS)}")
        try:
            return Environment.from_metadata({**self.metadata(), **facts})
        except FormatError as error:
            raise UsageError(error.problem, "give the fact as FlashInfer prints it") from None


def reduce_fingerprint(fingerprint: str) -> str:
    """The ``nvidia-cutlass-dsl*`` packages of FlashInfer's fingerprint as sorted ``name==version``.

    Up to 0.7.2.post1 the fingerprint is such a list; 0.7.4 adds Python's ABI, torch, TVM-FFI and
    a hash of each package's installed-file record, which holds the virtual environment's path
    (``flashinfer/jit/cute_dsl_core.py``, ``_get_cute_dsl_version``). None of that says which
    kernels the stack compiles. ``none`` where other packages are listed and none of these; what is
    no list of packages stays as it is, so that a form that we do not know equals only itself.
    """
    packages = set()
    for part in fingerprint.split(";"):
        name, _, release = part.partition("==")
        name = name.lower().replace("_", "-")
        if name.startswith("nvidia-cutlass-dsl"):
            packages.add(f"{name}=={release.partition(':')[0]}")
    return ";".join(sorted(packages)) or ("none" if "==" in fingerprint else fingerprint)
