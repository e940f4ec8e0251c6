"""The coverage image of a registry: FlashInfer versions by devices, as one self-contained SVG."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping
from xml.etree import ElementTree as ET

from msgspec import Struct

from fi_tunecache.folder import Folder
from fi_tunecache.manifest import Manifest
from fi_tunecache.wording import count_entries, plural

__all__ = ["COVERAGE_IMAGE", "coverage_svg", "device_name", "newest_first", "one_line"]

COVERAGE_IMAGE = "coverage.svg"
"""Where the image lies in a registry's tree; the dataset card shows it from there."""

# A monospaced font, so that the width of a text is known wherever it is drawn: every common one has
# characters of at most 0.61 times its size, East Asian wide ones twice that.
_FONT = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_ADVANCE = 0.61
_SIZE = 11
_MARGIN = 20
_LINE = 14
_GRID_TOP = 56
_CELL_WIDTH, _CELL_HEIGHT = 128, 52
_GAP = 4
_LABEL_COLUMNS, _LABEL_LINES = 17, 3
_VERSION_COLUMNS = 24
_MIN_WIDTH = 580

_INK, _MUTED, _PAPER, _FRAME = "#1e293b", "#52606d", "#ffffff", "#cbd5e1"
# Decades, so that a cell's shade does not change because another cell grew. (most entries, words, fill, ink)
_SHADES = (
    (9, "1 to 9", "#e0f2e9", _INK),
    (99, "10 to 99", "#b4e0cb", _INK),
    (999, "100 to 999", "#74c3a0", "#0b2a1e"),
    (9_999, "1,000 to 9,999", "#1b7a5a", _PAPER),
    (float("inf"), "10,000 or more", "#0d4a38", _PAPER),
)
_YANKED = {"fill": "#fdf3e7", "stroke": "#b45309", "stroke-dasharray": "4 3"}
_EMPTY = {"fill": "#f8fafc", "stroke": "#e2e8f0"}


class _Cell(Struct, frozen=True):
    """What a folder holds: entries and bundles that may be used, and bundles that were yanked."""

    entries: int = 0
    bundles: int = 0
    yanked: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> _Cell:
        usable = [row for row in manifest.bundles if row.yanked is None]
        return cls(sum(row.entry_count for row in usable), len(usable), len(manifest.bundles) - len(usable))


def coverage_svg(manifests: Mapping[Folder, Manifest]) -> bytes:
    """Draw what a registry covers: a cell's shade and number tell the entries, below are the bundles.

    Deterministic; holds no script, no link and nothing from outside. Yanked bundles count only where a
    cell has no others. The image grows with the number of devices and versions.
    """
    cells = {folder: _Cell.of(manifest) for folder, manifest in manifests.items() if manifest.bundles}
    versions = newest_first({folder.version for folder in cells})
    names = {folder.slug: one_line(device_name(folder.slug, manifests), 128) for folder in cells}
    slugs = sorted(names, key=lambda slug: (names[slug].casefold(), slug))
    labels = {slug: _wrapped(names[slug]) for slug in slugs}
    version_labels = {version: one_line(version, _VERSION_COLUMNS) for version in versions}

    left = _MARGIN + max([_width(text, 12) for text in version_labels.values()], default=0) + 12
    top = _GRID_TOP + max([len(lines) for lines in labels.values()], default=1) * _LINE + 8
    bottom = top + max(len(versions), 1) * (_CELL_HEIGHT + _GAP)
    width = max(_MIN_WIDTH, left + len(slugs) * (_CELL_WIDTH + _GAP) + _MARGIN)
    height = bottom + 66

    bundles, entries = (sum(getattr(cell, what) for cell in cells.values()) for what in ("bundles", "entries"))
    holds = f"{plural(bundles, 'bundle')} with {count_entries(entries)}"
    places = f"{plural(len(versions), 'FlashInfer version')} and {plural(len(slugs), 'device')}"
    svg = _root(width, height, f"{holds} for {places}")
    _text(svg, _MARGIN, 32, "Entries by FlashInfer version and device", 14, anchor="start", weight="bold")
    if not cells:
        _text(svg, width / 2, top + _CELL_HEIGHT / 2, "no bundles yet", 13, ink=_MUTED)
    for column, slug in enumerate(slugs):
        middle = left + column * (_CELL_WIDTH + _GAP) + _CELL_WIDTH / 2
        for index, line in enumerate(reversed(labels[slug])):
            _text(svg, middle, top - 10 - index * _LINE, line, _SIZE)
    for row, version in enumerate(versions):
        y = top + row * (_CELL_HEIGHT + _GAP)
        _text(svg, left - 12, y + _CELL_HEIGHT / 2 + 4, version_labels[version], 12, anchor="end")
        for column, slug in enumerate(slugs):
            cell = cells.get(Folder(version, slug), _Cell())
            _draw_cell(svg, left + column * (_CELL_WIDTH + _GAP), y, cell, f"{version}, {names[slug]}")
    _draw_legend(svg, bottom + 14)
    ET.indent(svg)
    return (ET.tostring(svg, encoding="unicode") + "\n").encode()


def device_name(slug: str, manifests: Mapping[Folder, Manifest]) -> str:
    """The name of the GPU whose folders have that slug; the slug where the rows do not agree on one.

    Not checked: it may hold anything.
    """
    rows = [row for folder, manifest in manifests.items() if folder.slug == slug for row in manifest.bundles]
    names = {row.environment.get("gpu", "") for row in rows}
    name = names.pop() if len(names) == 1 else ""
    return name if one_line(name, 128) else slug


def newest_first(versions: Iterable[str]) -> list[str]:
    """FlashInfer versions in order: 0.10.0, 0.7.4.post1, 0.7.4, 0.7.4rc1, 0.7.3."""

    def rank(part: str) -> tuple[int, int | str]:
        # A word makes a version older than the plain one, unless it is "post".
        return (2, int(part)) if part.isdigit() else (3 if part == "post" else 0, part)

    def order(version: str) -> tuple[list[tuple[int, int | str]], str]:
        return [*map(rank, re.findall(r"[0-9]+|[a-z]+", version.lower())), (1, "")], version

    return sorted(versions, key=order, reverse=True)


def one_line(text: str, limit: int) -> str:
    """Text from others as one printable line of at most ``limit`` characters."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _width(text: str, size: float) -> float:
    return _columns(text) * size * _ADVANCE


def _wrapped(name: str) -> list[str]:
    wide = _columns(name) > len(name)
    columns = _LABEL_COLUMNS // 2 if wide else _LABEL_COLUMNS
    return textwrap.wrap(name, columns, max_lines=_LABEL_LINES, placeholder="…")


def _number(value: int) -> str:
    return f"{value:,}" if value < 10_000_000 else f"{value // 1_000_000:,}M"


def _root(width: float, height: float, description: str) -> ET.Element:
    svg = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "width": _coordinate(width),
            "height": _coordinate(height),
            "viewBox": f"0 0 {_coordinate(width)} {_coordinate(height)}",
            "role": "img",
            "aria-labelledby": "title description",
            "font-family": _FONT,
        },
    )
    ET.SubElement(svg, "title", {"id": "title"}).text = "Coverage of the registry"
    ET.SubElement(svg, "desc", {"id": "description"}).text = description
    _rect(svg, 0.5, 0.5, width - 1, height - 1, {"fill": _PAPER, "stroke": _FRAME})
    return svg


def _draw_cell(svg: ET.Element, x: float, y: float, cell: _Cell, place: str) -> None:
    group = ET.SubElement(svg, "g")
    title = ET.SubElement(group, "title")
    middle = x + _CELL_WIDTH / 2
    if cell.bundles:
        fill, ink = next((fill, ink) for most, _, fill, ink in _SHADES if cell.entries <= most)
        title.text = f"{place}: {count_entries(cell.entries)} in {plural(cell.bundles, 'bundle')}"
        _rect(group, x, y, _CELL_WIDTH, _CELL_HEIGHT, {"fill": fill})
        _text(group, middle, y + 25, _number(cell.entries), 17, ink=ink, weight="bold")
        _text(group, middle, y + 42, plural(cell.bundles, "bundle"), _SIZE, ink=ink)
    elif cell.yanked:
        title.text = f"{place}: {plural(cell.yanked, 'bundle')}, yanked"
        _rect(group, x + 0.5, y + 0.5, _CELL_WIDTH - 1, _CELL_HEIGHT - 1, _YANKED)
        _text(group, middle, y + 23, "yanked only", _SIZE)
        _text(group, middle, y + 39, plural(cell.yanked, "bundle"), _SIZE)
    else:
        title.text = f"{place}: no bundles"
        _rect(group, x + 0.5, y + 0.5, _CELL_WIDTH - 1, _CELL_HEIGHT - 1, _EMPTY)
        _text(group, middle, y + 30, "none", _SIZE, ink=_MUTED)


def _draw_legend(svg: ET.Element, y: float) -> None:
    x: float = _MARGIN
    for _, words, fill, _ in _SHADES:
        x = _key(svg, x, y, words, {"fill": fill})
    x = _key(svg, _MARGIN, y + 22, "yanked only", _YANKED)
    _key(svg, x, y + 22, "no bundles", _EMPTY)


def _key(svg: ET.Element, x: float, y: float, words: str, look: Mapping[str, str]) -> float:
    """One sample and its words; returns where the next one goes."""
    _rect(svg, x + 0.5, y + 0.5, 15, 12, look, radius=2)
    _text(svg, x + 22, y + 11, words, _SIZE, anchor="start")
    return x + 22 + _width(words, _SIZE) + 16


def _coordinate(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _rect(
    parent: ET.Element, x: float, y: float, width: float, height: float, look: Mapping[str, str], radius: int = 5
) -> None:
    box = {"x": x, "y": y, "width": width, "height": height, "rx": radius}
    ET.SubElement(parent, "rect", {**{name: _coordinate(value) for name, value in box.items()}, **look})


def _text(
    parent: ET.Element,
    x: float,
    y: float,
    words: str,
    size: int,
    *,
    anchor: str = "middle",
    ink: str = _INK,
    weight: str = "normal",
) -> None:
    place = {"x": _coordinate(x), "y": _coordinate(y), "text-anchor": anchor}
    look = {"font-size": str(size), "font-weight": weight, "fill": ink}
    ET.SubElement(parent, "text", {**place, **look}).text = words
