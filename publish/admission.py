"""What may be published: each thing that is read is admitted, left out with a reason, or refused."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct
from packaging.version import Version

from fi_tunecache.bundle import MARK, Bundle, write_bundle
from fi_tunecache.entry import Entry, LegacyEntry
from fi_tunecache.environment import Environment
from fi_tunecache.errors import FormatError, IntegrityError, UsageError
from fi_tunecache.runner_families import is_never_taken
from fi_tunecache.source import Section, Source, SourceKind
from fi_tunecache.verdict import Rule
from fi_tunecache.wording import count_entries, plural

from .identity import Identity, entry_identity
from .left_out import LeftOutEntry, Reason
from .published import Published, drops_marks, release_of

__all__ = ["Admitted", "admit_bundle", "admit_section", "scrubbed"]

_FIRST_RELEASE = Version("0.7.1")
_TUNE_AGAIN = f"tune again with FlashInfer {_FIRST_RELEASE} or newer"
_HASHED_NAME = re.compile(r"([0-9a-f]{64}|[0-9a-f]{16})\.json")
_MOST_BUNDLES = 4


class Admitted(Struct, frozen=True):
    """The entries of a section that may be published, scrubbed, and those that are left out."""

    environment: Environment
    entries: tuple[Entry, ...]
    left_out: tuple[LeftOutEntry, ...]


def admit_section(source: Source, section: Section, published: Published, *, skip_pulled: bool) -> Admitted:
    """Check one environment of what FlashInfer saved.

    Entries that came from a registry bear our mark. FlashInfer before 0.7.4 saves a v1 file without it: there an
    entry that equals a published one is taken for pulled, unless that bundle was gathered from this very file. What
    stands in a managed store without a mark was tuned: FlashInfer writes there only what it has timed.

    Parameters
    ----------
    published
        Where pulled entries may have come from.
    skip_pulled
        Leave them out instead of refusing the source.

    Raises
    ------
    UsageError
        Something that must not be published, by the file and, where it is about one, the key.
    FormatError
        A managed store holds a file that is none of its own.
    """
    where = f"{source.path} ({section.name})" if source.kind is SourceKind.STORE else str(source.path)
    environment = _known_environment(section, where)
    _refuse_what_is_never_served(section, where)
    if section.problems:  # the rest of them: a store's damaged files, or a name that stands twice
        if source.kind is SourceKind.STORE:
            raise FormatError(f"{where} can't be published: {section.problems[0]}", "tune again")
        raise _refusal(where, section.problems[0], "remove one of them, or tune again")
    pulled = _pulled(source.kind, section, environment, published)
    if (pulled or source.kind is SourceKind.PULLED) and not skip_pulled:
        raise _pulled_refusal(section, environment, pulled, where, is_marked=source.kind is SourceKind.PULLED)
    entries: list[Entry] = []
    left_out: list[LeftOutEntry] = []
    for entry in section.entries:
        if is_never_taken(entry.key.custom_op):
            left_out.append(LeftOutEntry(entry, Rule.COLLECTIVE_OP))
        elif entry.key.text in pulled:
            left_out.append(LeftOutEntry(entry, Reason.PULLED, bundles=pulled[entry.key.text]))
        else:
            entries.append(scrubbed(entry))
    return Admitted(environment, tuple(entries), tuple(left_out))


def _refusal(where: str, problem: str, next_step: str) -> UsageError:
    return UsageError(f"{where} can't be published: {problem}", next_step)


def _known_environment(section: Section, where: str) -> Environment:
    if section.legacy:
        problem = f"{plural(len(section.legacy), 'key')} without extras, the first {section.legacy[0].text[:200]}"
        raise _refusal(where, problem, f"{_TUNE_AGAIN}: {LegacyEntry.STATEMENT}")
    environment = section.environment
    if environment is None:
        problem = section.problems[0].partition(";")[0]
        raise _refusal(where, problem, "tune again where FlashInfer finds every fact")
    if undetermined := environment.undetermined():
        raise _refusal(where, f"{', '.join(undetermined)} not known", "tune again where FlashInfer finds every fact")
    if release_of(environment) < _FIRST_RELEASE:
        raise _refusal(where, f"it was tuned with FlashInfer {environment.flashinfer_version}", _TUNE_AGAIN)
    return environment


def _refuse_what_is_never_served(section: Section, where: str) -> None:
    if not section.entries:
        raise _refusal(where, "it holds no entries", "leave it out, or tune again")
    for what, entries in (
        ("of another runner than their key's", [item for item in section.entries if item.runner != item.key.runner]),
        ("of cuDNN whose tactic is a plan's position", [item for item in section.entries if item.is_cudnn_ordinal]),
    ):
        if entries:
            shown = f"{entries[0].runner[:80]} at {entries[0].key.text[:200]}"
            raise _refusal(where, f"{count_entries(len(entries))} {what}, the first {shown}", "tune again without them")


def _pulled(
    kind: SourceKind, section: Section, environment: Environment, published: Published
) -> Mapping[str, tuple[str, ...]]:
    """The keys of the entries that came from a registry, with the ids of the bundles as far as they are known."""
    pulled: dict[str, tuple[str, ...]] = {}
    unmarked_is_tuned = kind is SourceKind.STORE or not drops_marks(environment)
    origins: Mapping[Identity, frozenset[str]] = {} if unmarked_is_tuned else published.origins(environment)
    own = published.gathered_from(section.digest)
    for entry in section.entries:
        if MARK in (entry.selection or {}):
            pulled[entry.key.text] = (_bundle_id((entry.selection or {})[MARK]),)
            continue
        bundles = origins.get(entry_identity(entry), frozenset())
        if bundles and not bundles & own:
            pulled[entry.key.text] = tuple(sorted(bundles))
        elif kind is SourceKind.PULLED and (not unmarked_is_tuned or entry.policy is None):
            # FlashInfer keeps the metadata of a file that it adds to, so some of it may have been tuned.
            pulled[entry.key.text] = section.bundles
    return pulled


def _bundle_id(mark: object) -> str:
    return mark if isinstance(mark, str) and re.fullmatch(r"[0-9a-f]{16}", mark) else f"{mark!r:.40}"


def _pulled_refusal(
    section: Section, environment: Environment, pulled: Mapping[str, tuple[str, ...]], where: str, *, is_marked: bool
) -> UsageError:
    counts = Counter(sorted(name for names in pulled.values() for name in names)) or dict.fromkeys(section.bundles, 0)
    ids = sorted(counts, key=lambda name: -counts[name])
    named = ", ".join(ids[:_MOST_BUNDLES]) + (f" and {len(ids) - _MOST_BUNDLES} more" if ids[_MOST_BUNDLES:] else "")
    origin = f"bundle{'s' if len(ids) > 1 else ''} {named}" if ids else "a registry"
    if not pulled:
        problem = f"its metadata says that it was pulled from {origin}"
    else:
        problem = f"{len(pulled)} of {count_entries(len(section.entries))} "
        if is_marked or any(MARK in (entry.selection or {}) for entry in section.entries):
            problem += f"came from {origin}"
        else:
            problem += f"equal those of {origin}, and FlashInfer {environment.flashinfer_version} saves no marks"
        problem += f", the first {next(iter(pulled))[:200]}"
    return _refusal(where, problem, "leave them out with --skip-pulled, or tune without fi-tunecache")


def scrubbed(entry: Entry) -> Entry:
    """The entry with nothing in its selection but FlashInfer's four figures."""
    kept = {name: value for name, value in (entry.selection or {}).items() if _is_figure(name, value)}
    return msgspec.structs.replace(entry, selection=kept or None)


def _is_figure(name: str, value: object) -> bool:
    if value is None:  # as FlashInfer writes where a tactic had no rival
        return name in ("runner_up_ms", "margin")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return name in ("time_ms", "runner_up_ms", "margin") or (name == "candidates" and isinstance(value, int))


def admit_bundle(source: Source) -> tuple[Bundle, bytes]:
    """Check a bundle that is published as it is; gives it with its bytes.

    Raises
    ------
    FormatError, IntegrityError
        It is not named after its sha256 although its name looks so, or not in the form in which bundles are written.
    UsageError
        It holds what must not be published.
    """
    (section,) = source.sections
    where = str(source.path)
    name = _HASHED_NAME.fullmatch(source.path.name)
    if name and not section.digest.startswith(name[1]):
        raise IntegrityError(
            f"its sha256 is {section.digest[:16]}…",
            "the file was changed; fetch it again",
            source=where,
            expected=name[1],
            actual=section.digest,
        )
    environment, provenance = section.environment, section.provenance
    assert environment is not None
    assert provenance is not None
    bundle = Bundle(
        environment=environment,
        entries={entry.key.text: entry for entry in section.entries},
        provenance=provenance,
        policy=section.policy,
        lookups=section.lookups,
        default_raced=section.default_raced,
    )
    data, sha256 = write_bundle(bundle)
    if sha256 != section.digest:
        raise FormatError(
            "a bundle that was changed since it was written", "publish what FlashInfer saved", source=where
        )
    _known_environment(section, where)
    _refuse_what_is_never_served(section, where)
    _refuse_what_a_bundle_never_holds(section.entries, where)
    return bundle, data


def _refuse_what_a_bundle_never_holds(entries: Iterable[Entry], where: str) -> None:
    for entry in entries:
        if is_never_taken(entry.key.custom_op) or scrubbed(entry) != entry:
            raise _refusal(
                where, f"no bundle of ours holds an entry like {entry.key.text[:200]}", "publish what FlashInfer saved"
            )
