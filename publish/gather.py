"""Turn what FlashInfer has saved into bundles: one for each environment and measurement policy."""

from __future__ import annotations

from collections.abc import Sequence

from fi_tunecache.bundle import MARK, Bundle, Provenance
from fi_tunecache.errors import FormatError
from fi_tunecache.source import Section, Source, SourceKind
from fi_tunecache.wording import count_entries

from .recorded_lookups import Question, answer

__all__ = ["gather"]


def gather(
    source: Source,
    provenance: Provenance,
    *,
    default_raced: bool | None,
    questions: Sequence[Question] = (),
    trust_winners: bool = True,
) -> list[Bundle]:
    """Make a bundle of each section of a source.

    Parameters
    ----------
    source
        A v1 file or a managed store.
    provenance
        What is known of the tuning run; the same for all sections.
    default_raced
        Whether FlashInfer's default took part in the race (it does under ``autotune_v2``).
    questions
        Recorded lookups, answered by each section's entries.
    trust_winners
        See :func:`~fi_tunecache.publish.recorded_lookups.answer`.

    Raises
    ------
    FormatError
        The source can't be published: it names no environment or not all of it, holds nothing,
        something that FlashInfer would not serve, or something that was pulled rather than tuned.
    """
    if source.kind not in (SourceKind.CACHE_FILE, SourceKind.STORE):
        raise FormatError(
            f"a {source.kind.value} can't be published", "name what FlashInfer saved", source=str(source.path)
        )
    bundles = [
        _bundle(source, section, provenance, default_raced, questions, trust_winners) for section in source.sections
    ]
    if not bundles or source.problems:
        raise FormatError("; ".join(source.problems) or "holds no environment", source=str(source.path))
    return bundles


def _bundle(
    source: Source,
    section: Section,
    provenance: Provenance,
    default_raced: bool | None,
    questions: Sequence[Question],
    trust_winners: bool,
) -> Bundle:
    if section.problems or section.environment is None or not section.entries:
        problem = section.problems[0] if section.problems else "no entries"
        raise FormatError(f"can't be published: {problem}", "tune again", source=f"{source.path} ({section.name})")
    # FlashInfer 0.7.4 keeps our mark on an entry when it saves a pulled file again, but not the file's own.
    pulled = [entry for entry in section.entries if MARK in (entry.selection or {})]
    if pulled:
        raise FormatError(
            f"can't be published: {count_entries(len(pulled))} pulled, not tuned, e.g. {pulled[0].key.text[:120]}",
            "remove them, or tune without fi-tunecache",
            source=f"{source.path} ({section.name})",
        )
    return Bundle(
        environment=section.environment,
        entries={entry.key.text: entry for entry in section.entries},
        provenance=provenance,
        policy=section.policy,
        lookups=answer(questions, section.entries, trust_winners=trust_winners),
        default_raced=default_raced,
    )
