"""Turn what FlashInfer has saved into bundles: one for each environment and measurement policy. Pure: no I/O, no clock.

1. Each section of a source is checked: what must not be published refuses it (:mod:`.admission`).
2. Sections of one environment, as facts are compared, and one policy belong together, whatever file they are in.
3. Of several answers to a key one counts, or the conflict stays open (:mod:`.conflicts`).
4. The recorded lookups are answered, and of each shape what can be served is kept (:mod:`.shapes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from fi_tunecache.bundle import Bundle, Provenance
from fi_tunecache.environment import Environment
from fi_tunecache.errors import FormatError, UsageError
from fi_tunecache.managed_store import environment_hash
from fi_tunecache.measurement_policy import MeasurementPolicy
from fi_tunecache.source import Section, Source, SourceKind

from .admission import Admitted, admit_bundle, admit_section
from .conflicts import Conflict, Found, OnConflict, settle
from .identity import compared_facts
from .left_out import LeftOut, Reason, summarise
from .published import Published
from .recorded_lookups import Question
from .recorded_lookups import default_raced as recorded_race
from .shapes import shape_entries

__all__ = ["Gathered", "gather"]

_SAVED_BY = {
    SourceKind.CACHE_FILE: "v1 file saved by flashinfer.autotune",
    SourceKind.PULLED: "v1 file saved by flashinfer.autotune",
    SourceKind.STORE: "managed store written by flashinfer.autotune_v2",
}


class Gathered(Struct, frozen=True, kw_only=True):
    """What the sources have for one environment and policy.

    ``bundle`` is None where everything is left out or one of the ``conflicts`` is open. ``sources`` are paths.
    ``read`` counts the entries in them, ``same`` those that another source has just so; unless a conflict is open,
    each of the rest is in the bundle or in ``left_out``. ``data`` are the bytes of a bundle that was itself the
    source, and None for one that was gathered.
    """

    environment: Environment
    policy: MeasurementPolicy
    bundle: Bundle | None
    sources: tuple[str, ...]
    read: int
    same: int = 0
    left_out: tuple[LeftOut, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    data: bytes | None = None


class _Member(Struct, frozen=True):
    """An admitted section and the source that it is of."""

    source: Source
    section: Section
    admitted: Admitted


def gather(
    sources: Iterable[Source],
    provenance: Provenance,
    *,
    published: Published = Published(),  # noqa: B008 - frozen
    on_conflict: OnConflict = OnConflict.ERROR,
    skip_pulled: bool = False,
    questions: Sequence[Question] = (),
    trust_winners: bool = True,
    default_raced: bool | None = None,
) -> tuple[Gathered, ...]:
    """Make a bundle for each environment and measurement policy; bundles stay what they are.

    The order of the sources does not matter, and naming one twice changes nothing.

    Parameters
    ----------
    sources
        v1 files, managed stores and bundles.
    provenance
        What is known of the tuning run. ``source`` and ``digests`` are filled in here.
    published
        What entries may have been pulled from; see :func:`~fi_tunecache.publish.admission.admit_section`.
    on_conflict
        See :func:`~fi_tunecache.publish.conflicts.settle`. Open conflicts raise nothing here: they are to be shown,
        and :func:`~fi_tunecache.publish.plan.make_plan` refuses them.
    skip_pulled
        Leave out what came from a registry, where otherwise its source is refused.
    questions
        Recorded lookups, answered by the entries of each environment and policy.
    trust_winners
        See :func:`~fi_tunecache.publish.recorded_lookups.answer`.
    default_raced
        Whether FlashInfer's default took part in the race. None: it did for what stands in a managed store (only
        ``autotune_v2`` writes one); for a v1 file it is known only where the recorded lookups tell it of every entry.

    Raises
    ------
    UsageError
        A source holds what must not be published.
    FormatError
        A source is damaged, or recorded winners are not what the entries give.
    """
    given: dict[str, Gathered] = {}
    groups: dict[tuple[object, MeasurementPolicy], list[_Member]] = {}
    for _, source in sorted({str(source.path): source for source in sources}.items()):
        if source.kind is SourceKind.BUNDLE:
            bundle, data = admit_bundle(source)
            given[source.sections[0].digest] = Gathered(
                environment=bundle.environment,
                policy=bundle.policy,
                bundle=bundle,
                sources=(str(source.path),),
                read=len(bundle.entries),
                data=data,
            )
            continue
        if source.problems:
            raise FormatError(f"can't be published: {source.problems[0]}", "", source=str(source.path))
        if not source.sections:
            raise UsageError(f"{source.path} can't be published: it holds no environment", "tune into it first")
        for section in source.sections:
            admitted = admit_section(source, section, published, skip_pulled=skip_pulled)
            group = groups.setdefault((compared_facts(admitted.environment), section.policy), [])
            group.append(_Member(source, section, admitted))
    gathered = [
        _gather(members, provenance, on_conflict, questions, trust_winners, default_raced)
        for members in groups.values()
    ]
    return tuple(sorted((*gathered, *given.values()), key=_order))


def _order(gathered: Gathered) -> tuple[object, ...]:
    """By FlashInfer's version and the GPU, then as a managed store names the environment and the policy."""
    facts = gathered.environment.metadata()
    name = environment_hash({**facts, **gathered.policy.manifest_fields()})
    return facts["flashinfer_version"], facts["gpu"], name, gathered.sources


def _gather(
    members: Sequence[_Member],
    provenance: Provenance,
    on_conflict: OnConflict,
    questions: Sequence[Question],
    trust_winners: bool,
    default_raced: bool | None,
) -> Gathered:
    settled = settle(
        (
            Found(entry, str(member.source.path), member.section.modified)
            for member in members
            for entry in member.admitted.entries
        ),
        on_conflict,
    )
    is_open = any(conflict.chosen is None for conflict in settled.conflicts)
    never = [item for member in members for item in member.admitted.left_out]
    pulled = [item.entry for item in never if item.cause is Reason.PULLED]
    shaped = shape_entries(
        () if is_open else settled.entries, pulled, () if is_open else questions, trust_winners=trust_winners
    )
    entries = {entry.key.text: entry for entry in shaped.entries}
    recorded = recorded_race(questions, shaped.lookups, entries)
    raced = {
        (True if member.source.kind is SourceKind.STORE else recorded) if default_raced is None else default_raced
        for member in members
    }
    # Environments that are compared as one may differ in what does not count; which of them is written must not
    # depend on the order of the sources.
    environment = min((item.admitted.environment for item in members), key=lambda item: sorted(item.metadata().items()))
    policy = members[0].section.policy
    bundle = Bundle(
        environment=environment,
        entries=entries,
        provenance=msgspec.structs.replace(
            provenance,
            source=" and ".join(sorted({_SAVED_BY[member.source.kind] for member in members})),
            digests=tuple(sorted({member.section.digest for member in members})),
        ),
        policy=policy,
        lookups=shaped.lookups,
        default_raced=raced.pop() if len(raced) == 1 else None,
    )
    return Gathered(
        environment=environment,
        policy=policy,
        bundle=bundle if bundle.entries else None,
        sources=tuple(sorted({str(member.source.path) for member in members})),
        read=sum(len(member.section.entries) for member in members),
        same=settled.same,
        left_out=summarise(
            (*never, *settled.left_out, *shaped.left_out),
            records=sum(member.section.records for member in members),
        ),
        conflicts=settled.conflicts,
    )
