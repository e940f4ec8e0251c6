"""What makes two entries, two shapes and two environments the same to a publisher."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fi_tunecache.entry import Entry, Lookup, tactic_json
from fi_tunecache.environment import Environment
from fi_tunecache.key import Profile

__all__ = ["Identity", "Shape", "compared_facts", "entry_identity", "lookup_texts", "shape_of"]

Identity: TypeAlias = tuple[str, bytes]
Shape: TypeAlias = tuple[str, Profile]


def entry_identity(entry: Entry) -> Identity:
    """Key, and runner, tactic and policy as they are written: in Python ``1 == True == 1.0``, in a file not."""
    return entry.key.text, msgspec.json.encode((entry.runner, tactic_json(entry.tactic), entry.policy))


def shape_of(item: Entry | Lookup) -> Shape:
    """The op and the profile: where runners are rivals."""
    return (item.key if isinstance(item, Entry) else item.winning_key).shape


def lookup_texts(lookup: Lookup) -> tuple[str, ...]:
    """The keys of a lookup, in the caller's order: two lookups with equal ones are the same question."""
    return tuple(key.text for key in lookup.keys)


def compared_facts(environment: Environment) -> tuple[tuple[str, str | None], ...]:
    """The facts as they are compared, so that two images with the same libraries are one environment.

    A fact that is undetermined when compared stands here as FlashInfer prints it: a publisher who
    publishes again from the same image must find what is there.
    """
    facts = environment.identity().items()
    return tuple(sorted((name, environment.raw(name) if fact is None else fact) for name, fact in facts))
