"""The environment that a command is about: this machine's, a described one, or a mix of both."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from .device import Device
from .environment import FACTS, Environment
from .errors import FormatError, HardwareError, UsageError
from .folder import Folder
from .json_document import decode_json
from .registry_tree import RegistryTree, open_tree

if TYPE_CHECKING:  # each is imported where it is needed: facts may come from elsewhere
    from .manifest import BundleRow
    from .probe import Probe

__all__ = ["Target", "TargetOptions", "find_target"]

_MAX_FILE = 64 * 1024
_MAX_NESTING = 8
_MAKE_FILE = "make it with `fi-tunecache env --json`"
_GIVE = {
    "gpu": "name the GPU with --device 'NVIDIA H200'",
    "flashinfer_version": "give the version with --fact flashinfer_version=0.7.4",
}


class TargetOptions(Struct, frozen=True, kw_only=True):
    """What was said about the environment; everything unsaid is found on this machine.

    ``environment_file`` and ``like`` bring all facts; ``device`` and ``facts`` replace single ones.
    """

    device: str | None = None
    environment_file: Path | None = None
    like: str | None = None
    facts: Mapping[str, str] = {}
    gpu_index: int | None = None
    probe: Literal["auto", "light", "full"] = "auto"


class Target(Struct, frozen=True):
    """The facts, where they come from, and why some are undetermined (fact, reason).

    ``described`` tells that facts were given rather than found: a file made for it loads only
    where FlashInfer computes the same facts.
    """

    environment: Environment
    origin: str
    described: bool
    undetermined: tuple[tuple[str, str], ...] = ()

    def reason(self, fact: str, default: str = "not given") -> str:
        """Why a fact is undetermined: a problem, and perhaps a next step after a semicolon."""
        return dict(self.undetermined).get(fact, default)

    def require_folder(self) -> None:
        """Raises HardwareError unless the facts are known that name a registry's folder."""
        missing = [fact for fact in _GIVE if self.environment.raw(fact) is None]
        if missing:
            raise HardwareError(
                ", and ".join(self.reason(fact, f"{fact} is not given").partition("; ")[0] for fact in missing),
                f"{' and '.join(_GIVE[fact] for fact in missing)}, "
                "or bring all facts with --environment FILE or --like 0.7.4/nvidia-h200",
            )


def find_target(
    options: TargetOptions,
    registries: Sequence[str],
    say: Callable[[str], None],
    opener: Callable[[str], RegistryTree] = open_tree,
) -> Target:
    """Put the environment together.

    Parameters
    ----------
    options
        What was said.
    registries
        Names of those in which ``like`` is looked up, in order; opened only for that.
    say
        Told, in one line, when the light probe does not suffice and FlashInfer itself is asked.
    opener
        How a registry's name becomes its tree.

    Raises
    ------
    UsageError
        Options that contradict each other, or a ``like`` that no registry has.
    HardwareError
        Several GPUs of different names, or one that is not there.
    FormatError
        A file of facts that can't be read.
    """
    given = dict(options.facts)
    if options.device is not None:
        given["gpu"] = Device(options.device).name
    if options.device is not None and "gpu" in options.facts:
        raise UsageError("--device and --fact gpu= both name the GPU", "leave one of them out")
    if "gpu" in given and options.gpu_index is not None:
        raise UsageError("--gpu contradicts the GPU that is named", "leave --gpu out, or the name")
    if options.gpu_index is not None and (options.environment_file is not None or options.like is not None):
        raise UsageError("--gpu picks a GPU of this machine", "leave it out with --environment and --like")
    if options.environment_file is not None and options.like is not None:
        raise UsageError("--environment and --like contradict each other", "bring the facts by one of them")
    if options.environment_file is not None:
        environment = _read_environment(options.environment_file)
        target = Target(environment, f"from {options.environment_file}", described=True)
    elif options.like is not None:
        folder, row, name = _find_like(options.like, registries, opener)
        target = Target(row.tuned_in, f"like {folder}/{row.bundle_id} of {name}", described=True)
    else:
        probe = _probe(options, frozenset(given), say)
        target = Target(probe.environment, "of this machine", described=False, undetermined=probe.undetermined)
    if not given:
        return target
    return Target(
        target.environment.with_facts(given),
        f"{target.origin}, with {', '.join(given)} as given",
        described=True,
        undetermined=tuple((fact, why) for fact, why in target.undetermined if fact not in given),
    )


def _probe(options: TargetOptions, given: frozenset[str], say: Callable[[str], None]) -> Probe:
    from .probe import probe_environment

    if options.probe == "full":
        return _full_probe(options, given)
    probe = probe_environment(options.probe, options.gpu_index, need_gpu="gpu" not in given)
    missing = [fact for fact, _ in probe.undetermined if fact not in given]
    # Only a machine that has its GPU can tell more than the light probe already did.
    if options.probe != "auto" or probe.source == "flashinfer" or not missing or probe.environment.gpu is None:
        return probe
    say(f"the light probe does not know {', '.join(missing)}; asking FlashInfer itself (--probe light prevents it)")
    try:
        return _full_probe(options, given)
    except (HardwareError, FormatError) as error:
        say(f"{error.problem}; going on with what the light probe knows")
        return probe


def _full_probe(options: TargetOptions, given: frozenset[str]) -> Probe:
    from .probe import probe_environment

    with contextlib.redirect_stdout(sys.stderr):  # what FlashInfer and torch print is not our output
        return probe_environment("full", options.gpu_index, need_gpu="gpu" not in given)


def _read_environment(path: Path) -> Environment:
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_FILE + 1)
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror})", _MAKE_FILE) from error
    content = decode_json(data, max_bytes=_MAX_FILE, max_nesting=_MAX_NESTING, source=str(path))
    if isinstance(content, dict) and isinstance(content.get("environment"), dict):
        content = content["environment"]
    if isinstance(content, dict) and content.keys().isdisjoint(FACTS):
        raise FormatError("names none of the facts", _MAKE_FILE, source=str(path))
    return Environment.from_metadata(content, source=str(path))


def _find_like(
    reference: str, registries: Sequence[str], opener: Callable[[str], RegistryTree]
) -> tuple[Folder, BundleRow, str]:
    version, _, rest = reference.partition("/")
    device, _, bundle = rest.partition("/")
    folder = Folder.parse(f"{version}/{device}")
    from .registry import Registry

    for name in registries:
        registry = Registry(opener(name))
        rows = [
            row
            for row in registry.manifest(folder).bundles
            if row.yanked is None and row.sha256.startswith(bundle.removesuffix(".json"))
        ]
        if bundle and len(rows) > 1:
            raise UsageError(f"{bundle} is the start of {len(rows)} bundles of {folder}", "give more of its digits")
        if rows:
            newest = max(reversed(rows), key=lambda row: row.created)  # of one day the last published
            return folder, newest, name
    raise UsageError(
        f"no bundle {reference[:120]} that is not yanked in {', '.join(registries)}",
        "see what there is with `fi-tunecache list`",
    )
