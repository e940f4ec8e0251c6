"""The dataset card of a registry: its ``README.md``, made from the manifests, around what others wrote in it."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from fi_tunecache.folder import Folder
from fi_tunecache.manifest import Manifest, RegistryDescriptor

from .card_body import card_body
from .coverage_image import one_line

__all__ = ["dataset_card"]

_BEGIN, _END = "<!-- fi-tunecache:begin -->", "<!-- fi-tunecache:end -->"
_HINT = "<!-- Made by `fi-tunecache publish`, which replaces what stands between these lines; write above or below. -->"
_PART = re.compile(rf"^{_BEGIN}[ \t]*(\r?\n)(?:(?!{_BEGIN}|{_END}).*\n)*{_END}[ \t]*(?=\r?$)", re.MULTILINE)
"""The made part of a card: whole lines, which data can't make, and no other marker in between."""

# What the Hub takes for front matter (the pattern of huggingface_hub 0.34 to 2.4, repocard.py).
_FRONT_MATTER = re.compile(r"\A\s*---(?:\r\n?|\n).*?(?:\r\n?|\n)---[ \t]*(?:\r?\n|\Z)", re.DOTALL)

_TAGS = ("flashinfer", "autotuning", "inference", "cuda")
_MAX_TAG, _MAX_DEVICE_TAGS = 64, 30


def dataset_card(
    registry: str,
    descriptor: RegistryDescriptor,
    manifests: Mapping[Folder, Manifest],
    existing: str | None = None,
) -> str:
    """Make a registry's ``README.md``; equal manifests give equal text.

    Parameters
    ----------
    registry
        The name by which its users name it, for the commands that are shown.
    descriptor
        Its name and notices.
    manifests
        All of them.
    existing
        The card that is there. If it has a part that was made before, only that is replaced. Otherwise ours is
        appended, and a front matter put before it if there is none. Line ends are kept.

    Returns
    -------
    str
        A card with front matter that the Hub accepts, unless ``existing`` has another one.
    """
    part = "\n".join((_BEGIN, _HINT, "", card_body(registry, descriptor, manifests), "", _END))
    text = (existing or "").lstrip("\ufeff")
    if made := _PART.search(text):
        return text[: made.start()] + part.replace("\n", made[1]) + text[made.end() :]
    end = "\r\n" if re.match(r"[^\n]*\r\n", text) else "\n"
    front = "" if _FRONT_MATTER.match(text) else (_front_matter(descriptor, manifests) + "\n").replace("\n", end)
    above = "" if not text.strip() else text + (end if text.endswith("\n") else 2 * end)
    return front + above + part.replace("\n", end) + end


def _front_matter(descriptor: RegistryDescriptor, manifests: Mapping[Folder, Manifest]) -> str:
    usable = (folder for folder, manifest in manifests.items() if any(row.yanked is None for row in manifest.bundles))
    devices = sorted({folder.slug for folder in usable})
    tags = dict.fromkeys((*_TAGS, *[slug for slug in devices if len(slug) <= _MAX_TAG][:_MAX_DEVICE_TAGS]))
    name = one_line(descriptor.name, 100) or "fi-tunecache registry"
    # A JSON text is a YAML text, as long as it holds no surrogates or control characters: one_line sees to that.
    quoted = [msgspec.json.encode(text).decode() for text in (name, *tags)]
    lines = ["---", "license: apache-2.0", f"pretty_name: {quoted[0]}", "tags:", *(f"- {tag}" for tag in quoted[1:])]
    return "\n".join((*lines, "viewer: false", "---", ""))
