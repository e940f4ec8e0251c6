"""A publication from its sources to the checked plan: all that happens before anything is written."""

from __future__ import annotations

import getpass
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from fi_tunecache.bundle import Provenance
from fi_tunecache.deadline import Deadline
from fi_tunecache.environment import FACTS
from fi_tunecache.errors import IntegrityError, UsageError
from fi_tunecache.hub import HubAccess, hub_is_offline
from fi_tunecache.registry import Registry
from fi_tunecache.registry_tree import EMBEDDED, HUB_SCHEME, absolute_path, is_path
from fi_tunecache.source import read_source
from fi_tunecache.user_cache import UserCache

from .conflicts import OnConflict
from .directory import DirectoryTarget
from .gather import gather
from .hub import HubTarget
from .leaks import find_leaks, find_secrets, stored_token
from .plan import Plan, PlannedBundle, make_plan
from .published import read_published
from .recorded_lookups import questions_at
from .round_trip import round_trip
from .source_paths import cached_bundle_paths, find_sources
from .target import Target
from .workload import check_line

__all__ = ["Publication", "check_words", "names_here", "open_target", "prepare", "secrets_of"]

_MAX_FACT = 4096


class Publication(Struct, frozen=True, kw_only=True):
    """What was asked for. ``sources`` and ``lookups`` are paths; ``from_cache`` adds the bundles of the user cache."""

    sources: tuple[Path, ...]
    provenance: Provenance
    from_cache: bool = False
    lookups: tuple[Path, ...] = ()
    on_conflict: OnConflict = OnConflict.ERROR
    skip_pulled: bool = False
    default_raced: bool | None = None


def secrets_of(environ: Mapping[str, str]) -> dict[str, str]:
    """What must never stand in anything that is published: this user's tokens and home, by a name that may be shown."""
    try:
        home: Path | None = Path.home()
    except RuntimeError:
        home = None
    return find_secrets(environ, home=home, stored_token=stored_token(environ))


def names_here() -> tuple[str, ...]:
    """What this host and this user are called."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user without a name, as in a container
        user = ""
    host = platform.node()
    return user, host, host.partition(".")[0]


def check_words(option: str, text: str, environ: Mapping[str, str]) -> None:
    """Refuse words of this user, given as ``option``, that hold more than everybody may know.

    Raises UsageError; see :func:`~fi_tunecache.publish.workload.check_line`.
    """
    check_line(option, text, names_here())
    if leaks := find_leaks(text.encode(), secrets_of(environ)):
        raise UsageError(f"{option} holds {', '.join(leaks)}", "leave it out")


def open_target(
    name: str,
    *,
    cache: UserCache,
    deadline: Deadline,
    private: bool = False,
    create_pr: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Target:
    """The registry that is to be written: a dataset repository on a Hub, or a directory, which need not exist yet.

    Raises UsageError for any other name, and where a directory is to be ``private`` or to have a pull request.
    """
    if name.startswith(HUB_SCHEME):
        return HubTarget(name, HubAccess(cache, deadline, hub_is_offline(), progress), private=private)
    if name == EMBEDDED or not is_path(name):
        raise UsageError(
            f"{name[:80]!r} can't be written",
            f"name {HUB_SCHEME}datasets/organisation/name, or a directory as ./registry",
        )
    path = Path(absolute_path(name))
    if path.exists() and not path.is_dir():
        raise UsageError(f"{name} is there and not a directory", "name another one")
    if private or create_pr:
        option = "--private" if private else "--create-pr"
        raise UsageError(f"{option} is for repositories on a Hub", "leave it out for a directory")
    return DirectoryTarget(path, name)


def _check_texts(item: PlannedBundle) -> None:
    """What a source says of itself is published too: facts, those that we do not know above all, and names of ops."""
    for name, value in item.environment.metadata().items():
        names = () if name in FACTS else names_here()
        check_line(f"{item.sources[0]}: the fact {name}", value, names, limit=_MAX_FACT)
    for op in item.ops:
        check_line(f"{item.sources[0]}: the name of an op", op.custom_op, (), limit=_MAX_FACT)


def prepare(
    publication: Publication,
    target: Target,
    cache: UserCache,
    *,
    secrets: Mapping[str, str],
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Plan, tuple[str, ...]]:
    """Read the sources, compare them with what is published, and check by a round trip what will be.

    Writes nothing. ``secrets`` are what must not stand in any bundle, by a name that may be shown.

    Returns
    -------
    tuple
        The plan, and a line for whatever is to be said beside it.

    Raises
    ------
    UsageError
        A source must not be published, or sources contradict each other.
    FormatError, IntegrityError
        A source is malformed, or does not survive the round trip.
    RegistryError
        The target can't be read.
    """
    paths = [path for source in publication.sources for path in find_sources(source)]
    if publication.from_cache:
        paths += cached_bundle_paths(cache)
    if not paths:
        raise UsageError("there is nothing to publish", "name a source, or pull something first")
    progress("reading the sources")
    sources = [read_source(path) for path in dict.fromkeys(paths)]
    snapshot = target.snapshot()
    registry = None if snapshot.revision is None else Registry(target.tree(snapshot))
    published = read_published(registry, sources, cache)
    gathered = gather(
        sources,
        publication.provenance,
        published=published,
        on_conflict=publication.on_conflict,
        skip_pulled=publication.skip_pulled,
        questions=[question for path in publication.lookups for question in questions_at(path)],
        trust_winners=False,  # one file may serve sources of several environments, which answer in their own way
        default_raced=publication.default_raced,
    )
    plan = make_plan(gathered, published)
    notices: dict[str, None] = {}
    checked: dict[str, str] = {}
    for item in plan.new:
        _check_texts(item)
    for path, data in plan.files.items():
        if leaks := find_leaks(data, secrets):
            raise IntegrityError(f"{path} would hold {', '.join(leaks)}", "find out how it came into the source")
        progress(f"loading {path} in a fresh process")
        result = round_trip(data)
        checked[path] = result.checked_with
        if result.notice:
            notices[result.notice] = None
    return plan.checked(checked), tuple(notices)
