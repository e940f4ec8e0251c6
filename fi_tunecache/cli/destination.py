"""Where ``pull --to`` puts the entries besides the user cache."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ..errors import CacheError, HardwareError, UsageError
from ..measurement_policy import DEFAULT_POLICY, MeasurementPolicy
from ..store_root import find_store_root
from ..target import Target

__all__ = ["ANOTHER_FILE", "find_destination"]

ANOTHER_FILE = "choose another file with --to"


class _StampedMetadata(Struct, frozen=True):
    fi_tunecache: dict[str, Any]


class _Stamped(Struct, frozen=True):
    metadata: _StampedMetadata = msgspec.field(name="_metadata")
    generation: str | None = msgspec.field(name="_generation", default=None)


def find_destination(
    destination: str, target: Target, policy: MeasurementPolicy, *, force: bool
) -> tuple[Path | None, Path | None]:
    """The root of a managed store, or a v1 file, or neither, for the user cache alone.

    Nothing is written; ``force`` allows a file that pull did not make.

    Raises
    ------
    UsageError
        A name that makes no sense, or a file that must not be replaced.
    HardwareError
        FlashInfer would not look at what is put there, since a fact is not known.
    CacheError
        The file can't be reached.
    """
    if destination == "cache":
        return None, None
    root = find_store_root(destination)
    if root is None:
        return None, _output_file(destination, target, force=force)
    if force:
        raise UsageError("--force replaces a FILE; in a managed store nothing is replaced", "leave it out")
    if destination == "vllm" and policy != DEFAULT_POLICY:
        raise UsageError("vLLM looks for entries of FlashInfer's default policy", "leave --execution-mode out")
    _require_all_facts(target, "not look into a folder of its store")
    return root, None


def _output_file(destination: str, target: Target, *, force: bool) -> Path:
    if not destination:
        raise UsageError("--to '' names no file", "use --to FILE, such as --to tuned.json")
    _require_all_facts(target, "ignore a file")
    file = Path(destination)
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        return file
    except OSError as error:
        raise CacheError(f"{destination} can't be written ({error.strerror})", ANOTHER_FILE) from error
    if not stat.S_ISREG(mode):  # such as a directory, /dev/null or a pipe: it would be replaced
        raise UsageError(f"{destination} is there and not a file", "name a new file, such as tuned.json")
    if not force and not _is_stamped(file):
        raise UsageError(
            f"{destination} is there and holds something else than an unchanged file of ours",
            "name another file, or replace it with --force",
        )
    return file


def _is_stamped(file: Path) -> bool:
    """Whether a file is one that pull made and nobody has added to (FlashInfer adds ``_generation``)."""
    try:
        header = msgspec.json.decode(file.read_bytes(), type=_Stamped)
    except (OSError, msgspec.DecodeError, RecursionError):
        return False
    return "selection" in header.metadata.fi_tunecache and header.generation is None


def _require_all_facts(target: Target, consequence: str) -> None:
    """Raises HardwareError for a fact that is not known, and UsageError for a fingerprint in the short form
    that is compared, where FlashInfer stamps a longer one."""
    from ..wheel_facts import is_whole_fingerprint

    environment = target.environment
    if missing := environment.undetermined():
        reasons = "; ".join(f"{fact}: {target.reason(fact).partition('; ')[0]}" for fact in missing)
        raise HardwareError(
            f"FlashInfer would {consequence} that lacks a fact ({reasons})",
            f"give it with --fact {missing[0]}=VALUE, or all with --environment FILE or --like",
        )
    if not is_whole_fingerprint(environment.raw("flashinfer_version"), environment.raw("cutlass_dsl_version") or ""):
        raise UsageError(
            f"cutlass_dsl_version is not what FlashInfer {environment.flashinfer_version} stamps, which has hashes",
            "take it from `fi-tunecache env --json` on the machine that serves",
        )
