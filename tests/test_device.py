"""The GPU: which names are one, what folder each has, and that nothing but the whole name decides."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_tunecache.device import Device
from fi_tunecache.errors import UsageError

REAL_NAMES = {
    "NVIDIA H200": "nvidia-h200",
    "NVIDIA H200 NVL": "nvidia-h200-nvl",
    "NVIDIA H100": "nvidia-h100",
    "NVIDIA H100 80GB HBM3": "nvidia-h100-80gb-hbm3",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": "nvidia-h100-80gb-hbm3-mig-1g-10gb",
    "NVIDIA H100 80GB HBM3 MIG 1g.20gb": "nvidia-h100-80gb-hbm3-mig-1g-20gb",
    "NVIDIA H200 MIG 1g.18gb+me": "nvidia-h200-mig-1g-18gb-me",
    "NVIDIA A40": "nvidia-a40",
    "NVIDIA A40-48Q": "nvidia-a40-48q",
    "NVIDIA RTX A4000": "nvidia-rtx-a4000",
    "NVIDIA GeForce RTX 4090": "nvidia-geforce-rtx-4090",
    "NVIDIA GeForce RTX 4090 D": "nvidia-geforce-rtx-4090-d",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "nvidia-rtx-pro-6000-blackwell-server-edition",
    "Tesla V100-SXM2-32GB": "tesla-v100-sxm2-32gb",
    "NVIDIA Graphics Device": "nvidia-graphics-device",
}

LOOK_ALIKES = [
    pytest.param("NVIDIA H200", "NVIDIA-H200", id="hyphen"),
    pytest.param("NVIDIA H200", "Nvidia h200", id="case"),
    pytest.param("NVIDIA H200", "NVIDIA  H200", id="two spaces"),
    pytest.param("NVIDIA H200", " NVIDIA H200", id="space in front"),
    pytest.param("NVIDIA H200", "NVIDIA H200 ", id="space at the end"),
    pytest.param("NVIDIA H200", "NVIDIA_H200", id="underscore"),
    pytest.param("NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 MIG 1g.18gb+", id="MIG suffix"),
    pytest.param("NVIDIA K80", "NVIDIA \N{KELVIN SIGN}80", id="Kelvin for K"),
]


@pytest.mark.parametrize(("name", "slug"), REAL_NAMES.items(), ids=list(REAL_NAMES))
def test_the_folder_of_a_device(name: str, slug: str) -> None:
    device = Device(name)

    assert device.slug == slug
    assert str(device) == device.name == name


def test_no_real_device_equals_another() -> None:
    assert not [(one, other) for one, other in combinations(map(Device, REAL_NAMES), 2) if one == other]


@pytest.mark.parametrize(("one", "other"), LOOK_ALIKES)
def test_slugs_may_collide_devices_are_never_equal(one: str, other: str) -> None:
    assert Device(one).slug == Device(other).slug
    assert Device(one) != Device(other)
    assert len({Device(one), Device(other)}) == 2


def test_equal_names_are_one_device() -> None:
    assert Device("NVIDIA H200") == Device("NVIDIA H200")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("", id="empty"),
        pytest.param("  ", id="blank"),
        pytest.param("NVIDIA\nH200", id="two lines"),
        pytest.param("\x1b[31mNVIDIA H200", id="terminal escape"),
        pytest.param("NVIDIA\u202eH200", id="text direction"),
        pytest.param("N" * 129, id="129 characters"),
        pytest.param("NVIDIA H200\x00", id="NUL"),
    ],
)
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(UsageError, match=r"is not a GPU name; give the name as torch\.cuda\.get_device_name") as caught:
        Device(name)

    assert len(str(caught.value)) < 300


def test_a_name_without_any_letter_of_a_slug() -> None:
    assert Device("量子卡").slug == "-"
    assert Device("N" * 128).slug == "n" * 128


@given(st.text(min_size=1, max_size=128).filter(lambda text: text.isprintable() and text.strip()))
def test_a_slug_is_a_plain_folder_name(name: str) -> None:
    slug = Device(name).slug

    assert set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert slug == "-" or (not slug.startswith("-") and not slug.endswith("-") and "--" not in slug)
    assert Device(slug).slug == slug
