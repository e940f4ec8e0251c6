"""The coverage image: what it shows, that it is safe to embed, and that nothing in it overlaps or sticks out."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_manifests import registry, row, yanked

from fi_tunecache.folder import Folder
from fi_tunecache.manifest import Manifest
from fi_tunecache.publish.coverage_image import coverage_svg, newest_first
from fi_tunecache.registry import open_registry

SVG = "{http://www.w3.org/2000/svg}"
DEVICES = [
    "NVIDIA H200",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "W" * 128,
    "GPU " + "画像" * 40,
    *(f"NVIDIA B{number}" for number in range(100, 133)),
]
VERSIONS = ["0.7.4", "0.7.2.post1", "0.7.2", "0.8.0rc1", "0.8.0", "0.10.1", "0.7.1", "0.7.3", "0.9.0" + ".dev1" * 11]


def grid(versions: int, devices: int) -> dict[Folder, Manifest]:
    """A registry with cells of every kind: few and many entries, yanked only, none."""
    sizes = (1, 50, 500, 5_000, 50_000, 9_999_999, 10_000_000, 1_000_000_000)
    rows = []
    for number, (version, gpu) in enumerate((v, g) for v in VERSIONS[:versions] for g in DEVICES[:devices]):
        if number % 7 == 5:
            rows.append(yanked(version=version, gpu=gpu))
        elif number % 7 != 6:
            rows.append(row(version=version, gpu=gpu, entries=sizes[number % len(sizes)]))
    return registry(*rows)


def drawn(manifests: Mapping[Folder, Manifest]) -> ET.Element:
    return ET.fromstring(coverage_svg(manifests))


def words(element: ET.Element) -> list[str]:
    return [text.text or "" for text in element.iter(f"{SVG}text")]


def cells(svg: ET.Element) -> dict[str, list[str]]:
    """What each cell says, by the place that its title names."""
    return {(group.findtext(f"{SVG}title") or "").partition(":")[0]: words(group) for group in svg.iter(f"{SVG}g")}


# --- what it shows


def test_the_embedded_registry() -> None:
    embedded = open_registry("embedded")
    svg = drawn({folder: embedded.manifest(folder) for folder in embedded.folders()})

    assert cells(svg) == {"0.7.4, NVIDIA H200": ["444", "5 bundles"], "0.7.2.post1, NVIDIA H200": ["27", "1 bundle"]}
    assert svg.findtext(f"{SVG}desc") == "6 bundles with 471 entries for 2 FlashInfer versions and 1 device"
    assert svg.get("role") == "img"
    assert {svg[0].get("id"), svg[1].get("id")} == set((svg.get("aria-labelledby") or "").split())


def test_cells_that_hold_nothing_to_use() -> None:
    manifests = registry(
        row(0, version="0.7.4", entries=1_234),
        yanked(1, version="0.7.4", entries=5_000),
        yanked(2, version="0.7.4", gpu="NVIDIA B200"),
        yanked(3, version="0.7.4", gpu="NVIDIA B200"),
        row(4, version="0.7.2", gpu="NVIDIA B200"),
    )

    assert cells(drawn(manifests)) == {
        "0.7.4, NVIDIA B200": ["yanked only", "2 bundles"],
        "0.7.4, NVIDIA H200": ["1,234", "1 bundle"],
        "0.7.2, NVIDIA B200": ["1", "1 bundle"],
        "0.7.2, NVIDIA H200": ["none"],
    }


@pytest.mark.parametrize(
    ("entries", "fill"),
    [
        pytest.param(0, "#e0f2e9", id="none"),
        pytest.param(9, "#e0f2e9", id="9"),
        pytest.param(10, "#b4e0cb", id="10"),
        pytest.param(999, "#74c3a0", id="999"),
        pytest.param(1_000, "#1b7a5a", id="1,000"),
        pytest.param(10_000, "#0d4a38", id="10,000"),
    ],
)
def test_the_shade_tells_the_order_of_magnitude(entries: int, fill: str) -> None:
    (group,) = drawn(registry(row(entries=entries))).iter(f"{SVG}g")
    assert group[1].get("fill") == fill


@pytest.mark.parametrize("manifests", [{}, {Folder("0.7.4", "nvidia-h200"): Manifest()}], ids=["no folder", "no row"])
def test_a_registry_without_bundles(manifests: Mapping[Folder, Manifest]) -> None:
    svg = drawn(manifests)
    assert "no bundles yet" in words(svg)
    assert cells(svg) == {}


def test_two_names_in_one_folder_are_shown_as_its_slug() -> None:
    assert list(cells(drawn(registry(row(0, gpu="NVIDIA H200"), row(1, gpu="Nvidia-H200"))))) == ["0.7.4, nvidia-h200"]


def test_versions_are_in_order_of_release() -> None:
    shuffled = ["0.7.4", "0.10.0", "0.7.4.post1", "0.7.4rc1", "0.7.4.dev1", "0.7", "0.7.3"]
    assert newest_first(shuffled) == ["0.10.0", "0.7.4.post1", "0.7.4", "0.7.4rc1", "0.7.4.dev1", "0.7.3", "0.7"]


def test_the_order_of_the_manifests_does_not_matter() -> None:
    manifests = grid(3, 5)
    assert coverage_svg(dict(reversed(manifests.items()))) == coverage_svg(manifests)


# --- where things are


class Box:
    """Where an element is; a text's width by its characters, an East Asian wide one taken for two."""

    def __init__(self, element: ET.Element) -> None:
        x, y = float(element.get("x", "")), float(element.get("y", ""))
        if element.tag == f"{SVG}text":
            size = float(element.get("font-size", ""))
            columns = sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in element.text or "")
            width = columns * size * 0.61
            self.left = x - {"start": 0.0, "middle": width / 2, "end": width}[element.get("text-anchor", "")]
            self.top, self.bottom = y - 0.8 * size, y + 0.25 * size
        else:
            width = float(element.get("width", ""))
            self.left, self.top, self.bottom = x, y, y + float(element.get("height", ""))
        self.right = self.left + width

    def holds(self, other: Box) -> bool:
        inside = self.left <= other.left and other.right <= self.right
        return inside and self.top <= other.top and other.bottom <= self.bottom

    def meets(self, other: Box) -> bool:
        apart = other.right <= self.left or self.right <= other.left
        return not (apart or other.bottom <= self.top or self.bottom <= other.top)


SIZES = [
    pytest.param(0, 0, (580, 300), id="nothing"),
    pytest.param(1, 1, (580, 300), id="1 x 1"),
    pytest.param(9, 12, (2_000, 700), id="9 x 12"),
    pytest.param(2, 40, (5_700, 300), id="2 x 40"),
]


@pytest.mark.parametrize(("versions", "devices", "most"), SIZES)
def test_texts_are_inside_the_image_and_apart(versions: int, devices: int, most: tuple[int, int]) -> None:
    svg = drawn(grid(versions, devices))
    texts = [(text.text, Box(text)) for text in svg.iter(f"{SVG}text")]
    rects = [Box(rect) for rect in svg.iter(f"{SVG}rect")]
    frame = rects[0]

    assert [float(part) for part in (svg.get("viewBox") or "").split()[2:]] == [
        float(svg.get("width") or 0),
        float(svg.get("height") or 0),
    ]
    assert 580 <= float(svg.get("width") or 0) <= most[0]
    assert 150 <= float(svg.get("height") or 0) <= most[1]
    assert [text for text, box in texts if not frame.holds(box)] == []
    assert [rect for rect in rects if not frame.holds(rect)] == []
    assert [(one, two) for i, (one, a) in enumerate(texts) for two, b in texts[:i] if a.meets(b)] == []
    for group in svg.iter(f"{SVG}g"):
        assert [text.text for text in group.iter(f"{SVG}text") if not Box(group[1]).holds(Box(text))] == []
    assert len(list(svg.iter(f"{SVG}g"))) == versions * devices


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_texts_can_be_read_on_what_is_behind_them() -> None:
    svg = drawn(grid(9, 12))
    rects = [(Box(rect), rect.get("fill", "")) for rect in svg.iter(f"{SVG}rect")]
    for text in svg.iter(f"{SVG}text"):
        behind = next(fill for box, fill in reversed(rects) if box.holds(Box(text)))
        dark, light = sorted((luminance(behind), luminance(text.get("fill", ""))))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text.text, behind)


# --- hostile names

ALLOWED = {
    "svg": {"width", "height", "viewBox", "role", "aria-labelledby", "font-family"},
    "title": {"id"},
    "desc": {"id"},
    "g": set(),
    "rect": {"x", "y", "width", "height", "rx", "fill", "stroke", "stroke-dasharray"},
    "text": {"x", "y", "text-anchor", "font-size", "font-weight", "fill"},
}
hostile = st.one_of(
    st.sampled_from(
        ["</text><script>alert(1)</script>", "]]>", "&lol;", '" onload="x', "<!--", "\0\x1b[31m", "\ud800"]
    ),
    st.text(max_size=200),
)


@given(st.lists(hostile, min_size=1, max_size=4, unique=True))
def test_a_name_is_text_whatever_it_holds(names: list[str]) -> None:
    manifests: dict[Folder, Manifest] = {}
    for number, name in enumerate(names):
        manifests.update(registry(row(number, gpu=name), slug=f"gpu-{number}"))
    data = coverage_svg(manifests)
    svg = ET.fromstring(data)

    assert len(cells(svg)) == len(names)
    for element in svg.iter():
        tag = element.tag.removeprefix(SVG)
        assert set(element.keys()) <= ALLOWED[tag]
        assert not any("url(" in value or ":" in value for value in element.attrib.values())
    assert b"<script" not in data
    frame = Box(svg[2])
    assert all(frame.holds(Box(text)) for text in svg.iter(f"{SVG}text"))
