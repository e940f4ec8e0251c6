"""The dataset card: what it says, that data from others can't change its shape, and what it leaves of a README.md."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from command_line import CommandLine
from huggingface_hub import DatasetCard
from huggingface_hub.repocard import metadata_load
from hypothesis import example, given
from hypothesis import strategies as st
from made_manifests import registry, row, yanked
from markdown_it import MarkdownIt
from markdown_it.token import Token

from fi_tunecache.bundle import Workload
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import Manifest, RegistryDescriptor
from fi_tunecache.publish.card import dataset_card
from fi_tunecache.registry import open_registry

HUB = "hf://datasets/org/name"
TEAM = RegistryDescriptor("team tactics")
BEGIN, END = "<!-- fi-tunecache:begin -->", "<!-- fi-tunecache:end -->"
TAGS = ["flashinfer", "autotuning", "inference", "cuda"]


def card(manifests: Mapping[Folder, Manifest], existing: str | None = None, name: str = HUB) -> str:
    return dataset_card(name, TEAM, manifests, existing)


def embedded() -> dict[Folder, Manifest]:
    found = open_registry("embedded")
    return {folder: found.manifest(folder) for folder in found.folders()}


def tokens(text: str) -> list[Token]:
    """The Markdown below the front matter, as a renderer sees it: blocks, and what is in their lines."""
    body = DatasetCard(text).text
    found: list[Token] = []
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(body):
        found += [token, *(token.children or [])]
    return found


def table(text: str) -> list[list[str]]:
    """The cells of the card's table, row by row, with code as plain text."""
    rows: list[list[str]] = []
    for token in tokens(text):
        if token.type == "tr_open":
            rows.append([])
        elif token.type in ("td_open", "th_open"):
            rows[-1].append("")
        elif token.type in ("text", "code_inline") and rows and token.level == 0 and rows[-1]:
            rows[-1][-1] += token.content
        elif token.type == "table_close":
            break
    return rows


def section(text: str, title: str) -> str:
    """What stands below a heading, up to the next one."""
    return re.split(r"^#+ ", text.partition(f"\n{title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0].strip()


def commands(text: str) -> list[list[str]]:
    """The command lines shown, as a shell takes them apart."""
    lines = [line for token in tokens(text) if token.type == "fence" for line in token.content.splitlines()]
    return [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]


# --- what it says


def test_the_embedded_registry() -> None:
    text = dataset_card(HUB, RegistryDescriptor("fi-tunecache embedded"), embedded())

    assert table(text) == [
        ["FlashInfer", "device", "bundles", "entries", "entries by op", "time over the default's", "latest"],
        ["0.7.4", "NVIDIA H200", "5", "444", "bf16_gemm 288, fp8_gemm 156", "not measured", "2026-12-01"],
        ["0.7.2.post1", "NVIDIA H200", "1", "27", "bf16_gemm 18, fp8_gemm 9", "not measured", "2026-12-01"],
    ]
    assert "It holds 6 bundles with 471 entries for 2 FlashInfer versions and 1 device." in text
    assert section(text, "### `0.7.2.post1`, `NVIDIA H200`").splitlines() == [
        "- In all: `cuda_version=13.0`, `cublas_version=13.1.0`, `cudnn_version=91900`, "
        "`cudnn_frontend_version=1.32.0`, `cutlass_dsl_version=nvidia-cutlass-dsl-libs-base==4.8.1;"
        "nvidia-cutlass-dsl-libs-core==4.8.1;nvidia-cutlass-dsl==4.8.1`",
        "- Measurement policy: `default` (1)",
        "- FlashInfer's default raced: yes (1)",
        "- Recorded lookups: 27, in 1 of 1 bundle",
        "- Loaded and served whole before publishing, by: not recorded (1)",
        "- Workloads: `mm_bf16 with cublaslt and cudnn, bmm_fp8 auto; K = N = 4096; M <= 256` (1)",
    ]


def test_the_front_matter_is_what_the_hub_reads(tmp_path: Path) -> None:
    text = dataset_card(HUB, RegistryDescriptor("fi-tunecache embedded"), embedded())
    (tmp_path / "README.md").write_text(text)
    meant = {
        "license": "apache-2.0",
        "pretty_name": "fi-tunecache embedded",
        "tags": [*TAGS, "nvidia-h200"],
        "viewer": False,
    }

    assert metadata_load(tmp_path / "README.md") == meant
    assert DatasetCard(text).data.to_dict() == meant
    assert list(yaml.safe_load(text.split("---\n")[1])) == list(meant)


def test_commands_are_for_what_is_there() -> None:
    manifests = registry(row(version="0.7.4"), row(version="0.7.2"), row(version="0.7.2", gpu="NVIDIA B200 'x'"))
    assert commands(card(manifests, name="./my registry")) == [
        ["fi-tunecache", "pull", "--registry", "./my registry", "--to", "tuned.json"],
        ["export", "FI_TUNECACHE_REGISTRY=./my registry"],
        ["fi-tunecache", "pull", "--registry", "./my registry", "--device", "NVIDIA B200 'x'", "--to", "tuned.json"],
        ["fi-tunecache", "pull", "--registry", "./my registry", "--device", "NVIDIA H200", "--to", "tuned.json"],
        ["fi-tunecache", "list", "--registry", "./my registry"],
        ["fi-tunecache", "resolve", "--registry", "./my registry", "--like", "0.7.4/nvidia-h200"],
        ["fi-tunecache", "publish", "SOURCE", "--to", "./my registry"],
    ]


def test_commands_that_need_no_machine_run(command_line: CommandLine) -> None:
    shown = [words[1:] for words in commands(card(embedded(), name="embedded")) if words[1] in ("list", "resolve")]
    assert len(shown) == 2
    for arguments in shown:
        assert command_line(*arguments).code == 0


def test_a_registry_without_bundles() -> None:
    text = card({Folder("0.7.4", "nvidia-h200"): Manifest()})

    assert DatasetCard(text).data.to_dict()["tags"] == TAGS
    assert section(text, "## Coverage") == "There are no bundles yet."
    assert [words[1] for words in commands(text)] == ["pull", f"FI_TUNECACHE_REGISTRY={HUB}", "list", "publish"]
    assert "## Details" not in text
    assert text == card({})


def test_the_benefit_is_a_range_over_the_bundles() -> None:
    manifests = registry(
        row(1, benefit={"bf16_gemm": 0.9749, "fp8_gemm": 1.004}),
        row(2, benefit={"bf16_gemm": 1.02, "fp8_gemm": 1.0}),
        row(3, benefit={"tiny": 1e-300, "zoo": 0.5, "zz": 2e9}),
        row(4),
        yanked(5, benefit={"bf16_gemm": 0.1}),
    )
    assert table(card(manifests))[1][5] == "bf16_gemm 0.97 to 1.02, fp8_gemm 1.00, tiny 1e-300, 2 more"


def test_yanked_bundles_are_told_apart() -> None:
    manifests = registry(row(1, entries=5), yanked(2, "slower than the default"), yanked(3, gpu="NVIDIA B200"))
    older, newer = yanked(2), yanked(3, gpu="NVIDIA B200", date="2026-12-03")
    manifests.update(registry(newer))
    text = card(manifests)

    assert [cells[:4] for cells in table(text)[1:]] == [["0.7.4", "NVIDIA H200", "1", "5"]]
    assert section(text, "## Yanked").splitlines()[2:] == [
        f"- `{newer.bundle_id}` (`0.7.4`, `NVIDIA B200`) on 2026-12-03: `slow`",
        f"- `{older.bundle_id}` (`0.7.4`, `NVIDIA H200`) on 2026-12-02: `slower than the default`",
    ]
    assert section(text, "### `0.7.4`, `NVIDIA B200`") == "- Every bundle was yanked."
    assert DatasetCard(text).data.to_dict()["tags"] == [*TAGS, "nvidia-h200"]


def test_nothing_but_yanked_bundles() -> None:
    assert section(card(registry(yanked())), "## Coverage") == "Every bundle was yanked."


def test_details_tell_how_the_bundles_differ() -> None:
    def changed(number: int, facts: dict[str, str], **fields: Any) -> Any:
        made = row(number, **fields)
        return msgspec.structs.replace(made, environment={**made.environment, **facts})

    manifests = registry(
        changed(1, {}, lookups=9, default_raced=True, round_trip="flashinfer 0.7.4"),
        changed(
            2, {"cutlass_dsl_version": "nvidia-cutlass-dsl==4.8.1:zz"}, workload=Workload(model="m", engine="vllm")
        ),
        changed(3, {"cudnn_version": "92400"}, default_raced=False, policy={"measure_execution_mode": "eager"}),
        changed(4, {"new_fact": "1"}, workload=Workload(tensor_parallel=8, note="decode")),
    )
    ((folder, manifest),) = manifests.items()
    text = card({folder: msgspec.structs.replace(manifest, notices=("Use 0.7.5.",))})

    assert section(text, "### `0.7.4`, `NVIDIA H200`").splitlines() == [
        "- In all: `cuda_version=13.0`, `cublas_version=13.1.0`, `cudnn_frontend_version=1.32.0`, "
        "`cutlass_dsl_version=nvidia-cutlass-dsl==4.8.1`",
        "- `cudnn_version` differs: `91900` (3), `92400` (1)",
        "- `new_fact` differs: `1` (1)",
        "- Measurement policy: `default` (3), `eager` (1)",
        "- FlashInfer's default raced: not known (2), no (1), yes (1)",
        "- Recorded lookups: 9, in 1 of 4 bundles",
        "- Loaded and served whole before publishing, by: not recorded (3), `flashinfer 0.7.4` (1)",
        "- Workloads: `m, engine vllm` (1), `tensor_parallel 8, decode` (1)",
        "- `Use 0.7.5.`",
    ]


def test_a_large_registry_gives_a_short_card() -> None:
    ops = {f"op{number}": {"Runner": number + 1} for number in range(100)}
    rows = [row(number, entries=ops, gpu=f"GPU {number % 40}") for number in range(400)]
    rows += [yanked(number, gpu="GPU 0") for number in range(1_000, 1_100)]
    notes = [
        row(number, gpu="GPU 1", workload=Workload(note=f"{number} {'x' * 4_000}")) for number in range(2_000, 2_200)
    ]
    text = card(registry(*rows, *notes))

    assert table(text)[1][4] == "op99 1,000, op98 990, op97 980, 97 more"
    assert section(text, "## Yanked").splitlines()[-1] == "- 50 more, yanked earlier"
    assert len([words for words in commands(text) if "--device" in words]) == 12
    assert DatasetCard(text).data.to_dict()["tags"] == [*TAGS, *sorted(f"gpu-{number}" for number in range(40))[:30]]
    assert len(text) < 40_000


def test_notices_stand_above_the_image() -> None:
    text = dataset_card(HUB, RegistryDescriptor("team", notices=("Moved to other/name.", "Bye.")), {})
    assert "\n- `Moved to other/name.`\n- `Bye.`\n\n![" in text


def test_the_order_of_what_is_equal_does_not_matter() -> None:
    ops = {"a": {"x": 1, "y": 1}, "b": {"x": 2}}
    benefit = {"a": 0.9, "b": 0.8}
    one = registry(row(entries=ops, benefit=benefit), row(version="0.7.2"), row(gpu="NVIDIA B200"))
    backwards = dict(reversed(ops.items()))
    other = registry(row(entries=backwards, benefit=dict(reversed(benefit.items()))), row(version="0.7.2"))
    other = {**registry(row(gpu="NVIDIA B200")), **dict(reversed(other.items()))}

    assert one == other
    assert card(one) == card(other)


# --- data from others

NASTY = [
    "|",
    "`",
    "```",
    "\n",
    "\r\n---\r\n",
    "\n\n",
    "\\",
    "<script>alert(1)</script>",
    "<!--",
    f"\n{BEGIN}\n",
    f"\n{END}\n",
    "-->",
    "![x](https://evil.example/x.png)",
    "[x](javascript:alert(1))",
    "https://evil.example",
    "&lt;&#x7c;",
    "$$",
    "{name}",
    "\n# ",
    '"',
    "'",
    ": [",
    "\u202e",
    "\u2028",
    "\ud800",
    "\0",
    "😀",
    "é",
    "x" * 5_000,
]
hostile = st.lists(st.sampled_from(NASTY) | st.text(max_size=10), min_size=1, max_size=5).map("".join).filter(bool)
names = hostile.map(lambda text: " ".join("".join(filter(str.isprintable, text)).split())[:128].strip()).filter(bool)
"""GPU names are printable wherever they come from."""


def registry_of(text: str, gpu: str, version: str) -> tuple[RegistryDescriptor, dict[Folder, Manifest]]:
    """A registry that holds the text wherever others may write one."""
    facts = {"flashinfer_version": version, "gpu": gpu, "cudnn_version": text, text: text}
    fields: dict[str, Any] = {
        "version": version,
        "gpu": gpu,
        "environment": facts,
        "entries": {text: {text: 3}},
        "benefit": {text: 0.9},
        "workload": Workload(text, text, 1, 1, text),
        "round_trip": text,
    }
    manifests = registry(row(1, **fields), yanked(2, text, **fields), slug="nvidia-h200")
    manifests = {folder: msgspec.structs.replace(manifest, notices=(text,)) for folder, manifest in manifests.items()}
    return RegistryDescriptor(text, notices=(text,)), manifests


def shape(text: str) -> list[object]:
    """All that a renderer makes of a card, but for what is inside code."""
    in_code = ("code_inline", "fence")
    return [
        (token.type, token.tag, token.attrs, token.level, "" if token.type in in_code else token.content)
        for token in tokens(text)
        if token.type != "inline"
    ]


versions = st.sampled_from(["0.7.4", "www.evil.example", "0.7__x__y", "1.0+a!b"])


@given(hostile, names, versions, hostile)
@example("a|b\n---\n", "`", "0.7.4", HUB)
def test_data_changes_nothing_but_what_stands_in_code(text: str, gpu: str, version: str, name: str) -> None:
    hostile_card = dataset_card(name, *registry_of(text, gpu, version))
    plain_card = dataset_card(HUB, *registry_of("plain", "NVIDIA B200", "0.7.3"))

    assert shape(hostile_card) == shape(plain_card)
    assert [len(cells) for cells in table(hostile_card)] == [7, 7]
    assert [token.attrs for token in tokens(hostile_card) if token.type in ("image", "link_open")] == [
        {"src": "coverage.svg", "alt": ""}
    ]
    assert hostile_card.encode().decode() == hostile_card
    assert len(hostile_card) < 20_000


@given(hostile)
@example("null")
@example("2026-12-01")
def test_the_name_is_text_in_the_front_matter(text: str) -> None:
    found = DatasetCard(dataset_card(HUB, RegistryDescriptor(text), registry(row()))).data.to_dict()
    name = found.pop("pretty_name")

    assert found == {"license": "apache-2.0", "tags": [*TAGS, "nvidia-h200"], "viewer": False}
    printable = "".join(char if char.isprintable() else " " for char in text).split()
    assert name == " ".join(printable) or (name.endswith("…") and len(name) <= 100) or not printable


@pytest.mark.parametrize(
    ("gpu", "slug"),
    [
        pytest.param("NVIDIA\nH200", "nvidia-h200", id="a line break"),
        pytest.param("NVIDIA  H200", "nvidia-h200", id="two spaces"),
        pytest.param("x" * 129, "x", id="longer than a name can be"),
    ],
)
def test_a_name_that_can_not_be_shown_is_in_no_command(gpu: str, slug: str) -> None:
    assert not [words for words in commands(card(registry(row(gpu=gpu), slug=slug))) if "--device" in words]


def test_a_slug_that_is_no_name_is_in_no_command() -> None:
    manifests = registry(row(1, gpu="NVIDIA H200"), row(2, gpu="Nvidia-H200"))
    assert table(card(manifests))[1][1] == "nvidia-h200"
    assert not [words for words in commands(card(manifests)) if "--device" in words]


# --- a README.md that is there

OLD, NEW = registry(row(1)), registry(row(1), row(2, version="0.7.2"))
PART = card(NEW).partition("---\n\n")[2]
FRONT = card(NEW).removesuffix(PART)


@pytest.mark.parametrize(
    ("existing", "expected"),
    [
        pytest.param("", card(NEW), id="empty"),
        pytest.param(" \n\n", card(NEW), id="blank"),
        pytest.param("# Ours\n", f"{FRONT}# Ours\n\n{PART}", id="no front matter"),
        pytest.param("# Ours", f"{FRONT}# Ours\n\n{PART}", id="no final newline"),
        pytest.param("\ufeff# Ours\n", f"{FRONT}# Ours\n\n{PART}", id="byte order mark"),
        pytest.param(
            "---\nlicense: mit\n---\n# Ours\n", f"---\nlicense: mit\n---\n# Ours\n\n{PART}", id="front matter"
        ),
        pytest.param("---\nlicense: mit\n---", f"---\nlicense: mit\n---\n\n{PART}", id="nothing but front matter"),
        pytest.param("---\n# Ours\n", f"{FRONT}---\n# Ours\n\n{PART}", id="a line that opens no front matter"),
        pytest.param(card(OLD), card(OLD).partition(BEGIN)[0] + PART, id="a card of ours, older"),
        pytest.param(
            f"---\na: b\n---\n# Ours\n{BEGIN}\nold\n{END}\nbelow\n",
            f"---\na: b\n---\n# Ours\n{PART}below\n",
            id="around our part",
        ),
        pytest.param(
            f"# Ours\n{BEGIN}\n{END}", f"# Ours\n{PART.removesuffix(chr(10))}", id="our part, no front matter"
        ),
        pytest.param(f"{BEGIN}  \nold\n{END}\t\n", PART, id="blanks after the markers"),
        pytest.param(f"{BEGIN}\nlost\n", f"{FRONT}{BEGIN}\nlost\n\n{PART}", id="begin without end"),
        pytest.param(f"{END}\nx\n{BEGIN}\n", f"{FRONT}{END}\nx\n{BEGIN}\n\n{PART}", id="end before begin"),
        pytest.param(f"{BEGIN}\nmine\n{BEGIN}\nold\n{END}\n", f"{BEGIN}\nmine\n{PART}", id="begin twice"),
        pytest.param(f"see {BEGIN}\nx\n{END}\n", f"{FRONT}see {BEGIN}\nx\n{END}\n\n{PART}", id="marker inside a line"),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_what_others_wrote_is_kept(existing: str, expected: str, newline: str) -> None:
    if "\n" not in existing:  # nothing tells which line ends are wanted
        newline = "\n"
    existing, expected = existing.replace("\n", newline), expected.replace("\n", newline)
    assert card(NEW, existing) == expected
    assert card(NEW, expected) == expected


PIECES = ["\n", "\r\n", "\r", "---", "---\n", "text", "license: mit\n", " ", "```\n", f" {BEGIN}", f"{END} x\n"]
MARKERS = [BEGIN, END, f"{BEGIN}\n", f"{END}\n", f"{BEGIN}\r\n", f"{END}\r\n", "\ufeff", card(OLD)]
by_hand = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@given(st.lists(st.sampled_from(PIECES + MARKERS) | st.text(max_size=5), max_size=12).map("".join))
def test_a_second_time_changes_nothing(existing: str) -> None:
    once = card(NEW, existing)
    assert PART.strip() in once.replace("\r\n", "\n")
    assert card(NEW, once) == once


@given(by_hand.filter(str.strip))
def test_all_that_was_there_is_kept(existing: str) -> None:
    assert existing in card(NEW, existing)


@given(by_hand, by_hand, st.sampled_from(["\n", "\r\n"]))
def test_only_our_part_is_replaced(above: str, below: str, newline: str) -> None:
    old, new = (card(each).partition("---\n\n")[2].replace("\n", newline) for each in (OLD, NEW))
    assert card(NEW, f"{above}\n{old}{below}") == f"{above}\n{new}{below}"
