"""What a dataset card says of a registry: sections in Markdown, made from the manifests alone.

Most of what is shown was written by others. It stands in code spans and code blocks only, from which
:func:`_code` and :func:`_usage` let nothing out: no link, image, HTML or table cell comes from data.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from fi_tunecache.environment import FACTS, reduce_fingerprint
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import BundleRow, Manifest, RegistryDescriptor
from fi_tunecache.wording import count_entries, plural

from .coverage_image import COVERAGE_IMAGE, device_name, newest_first, one_line

__all__ = ["card_body"]

_MAX_NAME, _MAX_REMARK = 60, 240
_FEW, _MANY, _MAX_YANKED = 3, 12, 50
_NOT_IN_CODE = str.maketrans("`|", "'¦")

_USAGE = """\
## How to use it

On the machine that serves, with fi-tunecache in the same Python as FlashInfer:

```console
$ fi-tunecache pull --registry {name} --to tuned.json
```

Load the file with `flashinfer.autotune(False, cache="tuned.json")`. To use this registry in every command:

```console
$ export FI_TUNECACHE_REGISTRY={name}
```

{image}What there is, and for a published environment what would be chosen and why:

```console
$ fi-tunecache list --registry {name}
{resolve}```

To add results of FlashInfer's autotuner (v1 files, managed stores, per-rank files of vLLM and SGLang):

```console
$ fi-tunecache publish SOURCE --to {name}
```"""
_IMAGE = """\
Where an image is made without the GPU, name the one that it is for:

```console
{commands}
```

"""
_TRUST = """\
## Trust and licence

Whoever can write to this registry chooses which tactics run on the machines that pull from it.
`fi-tunecache pull --lock FILE` writes down its commit and the hashes of what was pulled; `--locked FILE` keeps to them.

The tuning results are published under the Apache License 2.0."""


class _Place(Struct, frozen=True):
    """A folder that has bundles, and which of them may be used."""

    folder: Folder
    device: str
    manifest: Manifest

    @property
    def usable(self) -> list[BundleRow]:
        return [row for row in self.manifest.bundles if row.yanked is None]

    @property
    def title(self) -> str:
        return f"{_code(self.folder.version)}, {_code(self.device, 128)}"


def card_body(registry: str, descriptor: RegistryDescriptor, manifests: Mapping[Folder, Manifest]) -> str:
    """The sections of a dataset card; the parameters are those of :func:`~fi_tunecache.publish.card.dataset_card`."""
    places = _places(manifests)
    usable = [place for place in places if place.usable]
    rows = [row for place in usable for row in place.usable]
    blocks = [
        "# Tuned FlashInfer tactics",
        f"{_code(descriptor.name)} is a registry of fi-tunecache: results of FlashInfer's autotuner, of which each "
        "machine gets those that are valid for its GPU and software. "
        f"It holds {plural(len(rows), 'bundle')} with {count_entries(sum(row.entry_count for row in rows))} for "
        f"{plural(len({place.folder.version for place in usable}), 'FlashInfer version')} and "
        f"{plural(len({place.folder.slug for place in usable}), 'device')}.",
        *_bullets(_code(notice, _MAX_REMARK) for notice in descriptor.notices),
        f"![Entries and bundles by FlashInfer version and device]({COVERAGE_IMAGE})",
        "## Coverage",
        *_coverage(places),
        *_yanked(places),
        _usage(registry, places),
        *(["## Details"] if places else []),
        *(block for place in places for block in _details(place)),
        _TRUST,
    ]
    return "\n\n".join(blocks)


def _places(manifests: Mapping[Folder, Manifest]) -> list[_Place]:
    order = newest_first({folder.version for folder in manifests})
    places = [
        _Place(folder, device_name(folder.slug, manifests), manifest)
        for folder, manifest in manifests.items()
        if manifest.bundles
    ]
    return sorted(places, key=lambda place: (order.index(place.folder.version), place.folder.slug))


def _coverage(places: Sequence[_Place]) -> list[str]:
    lines = [
        "| FlashInfer | device | bundles | entries | entries by op | time over the default's | latest |",
        "|---|---|--:|--:|---|---|---|",
        *(_table_row(place) for place in places if place.usable),
    ]
    if len(lines) == 2:
        return ["There are no bundles yet." if not places else "Every bundle was yanked."]
    return [
        "\n".join(lines),
        "An entry is one tuned result: the tactic of one runner for one op and shape. The time is that of the tuned "
        "tactics over that of FlashInfer's default, from bundle to bundle: below 1 is faster.",
    ]


def _table_row(place: _Place) -> str:
    rows = place.usable
    ops: Counter[str] = Counter()
    measured: dict[str, list[float]] = {}
    for row in rows:
        ops.update({op: sum(runners.values()) for op, runners in row.entries.items()})
        for op, ratio in row.benefit.items():
            measured.setdefault(op, []).append(ratio)
    cells = (
        _code(place.folder.version),
        _code(place.device, 128),
        f"{len(rows):,}",
        f"{sum(row.entry_count for row in rows):,}",
        _few(f"{_code(op)} {count:,}" for op, count in _most_first(ops)) or "none",
        _few(f"{_code(op)} {_range(ratios)}" for op, ratios in sorted(measured.items())) or "not measured",
        max(row.created for row in rows),
    )
    return f"| {' | '.join(cells)} |"


def _yanked(places: Sequence[_Place]) -> list[str]:
    found = [(row.yanked, row, place) for place in places for row in place.manifest.bundles if row.yanked is not None]
    found.sort(key=lambda item: item[0].date, reverse=True)
    lines = [
        f"{_code(row.bundle_id)} ({place.title}) on {yank.date}: {_code(yank.reason, _MAX_REMARK)}"
        for yank, row, place in found[:_MAX_YANKED]
    ]
    if len(found) > len(lines):
        lines.append(f"{len(found) - len(lines):,} more, yanked earlier")
    return ["## Yanked", "These bundles are not used any more.", *_bullets(lines)] if lines else []


def _usage(registry: str, places: Sequence[_Place]) -> str:
    name = shlex.quote(one_line(registry, 500))
    versions: dict[str, list[str]] = {}
    for place in places:
        # A name that can't be shown as it is would be another GPU's.
        if place.usable and place.device == one_line(place.device, 128) != place.folder.slug:
            versions.setdefault(place.device, []).append(place.folder.version)
    images = [
        f"$ fi-tunecache pull --registry {name} --device {shlex.quote(device)} --to tuned.json"
        f"  # flashinfer {_few(there)}"
        for device, there in sorted(versions.items())[:_MANY]
    ]
    newest = [shlex.quote(str(place.folder)) for place in places if place.usable][:1]
    resolve = "".join(f"$ fi-tunecache resolve --registry {name} --like {folder}\n" for folder in newest)
    image = _IMAGE.format(commands="\n".join(images)) if images else ""
    return _USAGE.format(name=name, image=image, resolve=resolve)


def _details(place: _Place) -> list[str]:
    rows = place.usable
    notices = [_code(notice, _MAX_REMARK) for notice in place.manifest.notices]
    if not rows:
        return [f"### {place.title}", *_bullets(("Every bundle was yanked.", *notices))]
    facts: dict[str, list[str]] = {}
    for row in rows:
        for fact, value in row.environment.items():
            shown = reduce_fingerprint(value) if fact == "cutlass_dsl_version" else value
            facts.setdefault(fact, []).append(shown)
    facts.pop("flashinfer_version", None)
    names = sorted(facts, key=lambda fact: (FACTS.index(fact) if fact in FACTS else len(FACTS), fact))
    same = [fact for fact in names if len(facts[fact]) == len(rows) and len(set(facts[fact])) == 1]
    shown_once = [_code(f"{fact}={facts[fact][0]}", _MAX_REMARK) for fact in same if fact != "gpu"]
    raced = ({True: "yes", False: "no", None: "not known"}[row.default_raced] for row in rows)
    looked_up = sum(row.lookups > 0 for row in rows)
    workloads = _counted(_code(_workload(row), _MAX_REMARK) for row in rows if row.workload is not None)
    lines = [
        f"In all: {_few(shown_once, _MANY) or 'nothing'}",
        *(f"{_code(fact)} differs: {_counted(map(_code, facts[fact]))}" for fact in names if fact not in same),
        f"Measurement policy: {_counted(_code(str(row.measured_under)) for row in rows)}",
        f"FlashInfer's default raced: {_counted(raced)}",
        f"Recorded lookups: {sum(row.lookups for row in rows):,}, in {looked_up:,} of {plural(len(rows), 'bundle')}",
        "Loaded and served whole before publishing, by: "
        + _counted(_code(row.round_trip) if row.round_trip else "not recorded" for row in rows),
        *([f"Workloads: {workloads}"] if workloads else []),
        *notices,
    ]
    return [f"### {place.title}", *_bullets(lines)]


def _workload(row: BundleRow) -> str:
    stated = msgspec.to_builtins(row.workload)
    return ", ".join(str(value) if name in ("model", "note") else f"{name} {value}" for name, value in stated.items())


def _range(ratios: Iterable[float]) -> str:
    shown = [f"{ratio:.2f}" if 0.005 <= ratio < 1000 else f"{ratio:.0e}" for ratio in sorted(ratios)]
    return shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}"


def _most_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _counted(texts: Iterable[str]) -> str:
    return _few(f"{text} ({count:,})" for text, count in _most_first(Counter(texts)))


def _few(items: Iterable[str], most: int = _FEW) -> str:
    found = list(items)
    more = [f"{len(found) - most:,} more"] if len(found) > most else []
    return ", ".join([*found[:most], *more])


def _bullets(lines: Iterable[str]) -> list[str]:
    text = "\n".join(f"- {line}" for line in lines)
    return [text] if text else []


def _code(text: str, limit: int = _MAX_NAME) -> str:
    return f"`{one_line(text, limit).translate(_NOT_IN_CODE) or '?'}`"
