"""``--json``: every document of every command has the keys that docs/json.md names, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import made
import pytest
from command_line import CommandLine
from made_lookups import lookup
from made_sources import v1_file
from msgspec import structs

from fi_tunecache.bundle import Provenance, Workload
from fi_tunecache.folder import Folder
from fi_tunecache.manifest import Manifest, Yank, read_manifest, write_manifest
from fi_tunecache.measurement_policy import MeasurementPolicy
from fi_tunecache.publish.directory import add_bundles
from fi_tunecache.recorded_lookup import Served
from fi_tunecache.selection import Selection, read_selection
from fi_tunecache.workload_record import keep_workload

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data" / "h200-flashinfer-0.7.4"
FOLDER = "0.7.4/nvidia-h200"
EAGER = MeasurementPolicy.from_execution_mode("eager")


def documented() -> dict[str, set[str]]:
    """The keys that the page names, by the heading they stand under."""
    found: dict[str, set[str]] = {}
    for heading, text in re.findall(
        r"^## (.*?)\n(.*?)(?=^## |\Z)", (ROOT / "docs" / "json.md").read_text("utf-8"), re.M | re.S
    ):
        for command in re.findall(r"`(.*?)`", heading):
            found[command] = set(re.findall(r"^\| `(.*?)` \|", text, re.M))
    return found


def keys(document: Any, names: Set[str], at: str = "") -> Iterator[str]:
    """The keys of a document as the page writes them; ``names`` tells where keys are data."""
    if isinstance(document, dict):
        for key, value in document.items():
            inner = f"{at}.*" if f"{at}.*" in names else f"{at}.{key}".removeprefix(".")
            yield inner
            yield from keys(value, names, inner)
    elif isinstance(document, list):
        for value in document:
            yield from keys(value, names, f"{at}[]")


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """Bundles that, between them, have everything that a row can have."""
    root = tmp_path / "registry"
    entries = [
        made.entry(made.key(made.CUTLASS, 1), 3, 0.5),
        made.entry(made.key(made.CUDNN, 2), (0, ()), 0.5),
        made.entry(made.key(made.TINY, 2), 0, 0.75),
    ]
    workload = Workload("llama", "vllm", 8, 1, "a note")
    full = Provenance("2026-12-01", "tool", "source", 1.5, "580.1", "130100", 700.0, "2.11.0", "3.12", workload)
    bundles = [
        made.bundle(entries[:1], environment=made.H200.with_facts({"cuda_version": "12.9"})),
        structs.replace(made.bundle(entries, [made.lookup([made.CUTLASS], made.CUTLASS)]), provenance=full),
        made.bundle(entries[:1], policy=EAGER),
        made.bundle(entries[:1], created="2026-12-02"),
    ]
    other, best, eager, newest = add_bundles(root, "made", bundles)
    best = structs.replace(best, benefit={"bf16_gemm": 0.98})
    newest = structs.replace(newest, yanked=Yank("wrong clocks", "2026-12-04"))
    changed = (other, best, eager, newest)
    manifest = root / FOLDER / "manifest.json"
    manifest.write_bytes(write_manifest(Manifest(changed)))
    assert read_manifest(manifest.read_bytes(), Folder.parse(FOLDER)).bundles == changed
    return root


LIKE = ["--like", FOLDER, "--registry", "./registry"]
DRIFT = [*LIKE, "--fact", "cudnn_version=92400", "--match", "compatible"]
V1, DEFAULT, CUDA_GRAPH = (
    str(DATA / name)
    for name in ("gemm-a.v1.json", "managed-store/v2/429deefd17fea974", "managed-store/v2/a27045c5dbc185b2")
)

RUNS: dict[str, list[tuple[int, list[str]]]] = {
    "env": [(0, ["env", *LIKE]), (0, ["env", "--probe", "light", "--device", "NVIDIA H200"])],
    "list": [
        (0, ["list", "--registry", "./registry"]),
        (3, ["list", "9.9/none", "--registry", "./registry"]),
        (0, ["list", "--registry", "embedded"]),
    ],
    "resolve": [
        (0, ["resolve", *LIKE]),
        (0, ["resolve", *DRIFT]),
        (0, ["resolve", *LIKE, "--execution-mode", "eager"]),
        (3, ["resolve", *LIKE, "--fact", "cuda_version=1"]),
    ],
    "pull": [
        (0, ["pull", *LIKE, "--to", "tuned.json"]),
        (0, ["pull", *DRIFT]),
        (0, ["pull", *DRIFT]),
        (0, ["pull", *LIKE, "--execution-mode", "eager"]),
        (0, ["pull", *LIKE, "--to", "flashinfer:store"]),
    ],
    "inspect SOURCE": [
        (0, ["inspect", V1, "--all"]),
        (0, ["inspect", CUDA_GRAPH]),
        (0, ["inspect", "BUNDLE"]),
        (0, ["inspect", "tuned.json"]),
        (0, ["inspect", "bare.json"]),
    ],
    "inspect SOURCE SECOND": [
        (0, ["inspect", V1, DEFAULT]),
        (0, ["inspect", DEFAULT, CUDA_GRAPH]),
        (0, ["inspect", V1, "bare.json"]),
    ],
    "verify": [
        (0, ["verify", "registry"]),
        (0, ["verify", V1]),
        (5, ["verify", "bare.json"]),
        (0, ["verify", "cache"]),
    ],
    "publish": [
        (0, ["publish", "a.json", "b.json", CUDA_GRAPH, "--on-conflict", "fastest", "--to", "./target", "--yes"]),
        (0, ["publish", "a.json", "b.json", "--on-conflict", "fastest", "--to", "./target", "--dry-run"]),
    ],
    "yank": [(0, ["yank", f"{FOLDER}/BUNDLE", "--from", "./registry", "--reason", "slow"])],
    "needed": [
        (1, ["needed", "llama", *LIKE]),
        (3, ["needed", "other", *LIKE]),
    ],
    "cache list": [(0, ["cache", "list"])],
    "cache prune": [(0, ["cache", "prune", "--older-than", "0"])],
    "cache clear": [(0, ["cache", "clear"])],
    "cache clear --to": [(0, ["cache", "clear", "--to", "flashinfer:seeded"])],
}


def test_the_page_names_every_command_that_prints_json() -> None:
    assert list(documented()) == list(RUNS)


def selection() -> Selection:
    """The one that `pull` has put into the cache."""
    (path,) = (path for path in Path("cache", "selections").iterdir() if path.suffixes == [".json"])
    return read_selection(path.read_bytes())


@pytest.mark.parametrize("command", RUNS)
def test_the_keys_are_those_of_the_page(command_line: CommandLine, registry: Path, command: str) -> None:
    Path("bare.json").write_text("{}", "utf-8")
    command_line.output("pull", *LIKE, "--to", "tuned.json")
    command_line.output("pull", *LIKE, "--to", "flashinfer:seeded")
    bundle = max((registry / FOLDER).glob("????????????????.json"), key=lambda path: path.stat().st_size)
    for name, tactic in ("a.json", 3), ("b.json", 4):
        v1_file(Path(name), [made.entry(made.key(made.CUTLASS), tactic, float(tactic))])
    runner = (made.CUTLASS,)
    answered = [lookup(Served.REGISTRY, runner, (*runner, -1)), lookup(Served.SKIPPED, runner, m=2)]
    keep_workload("llama", [*answered, lookup(Served.TUNED, m=3)], environment=made.H200, selection=selection())
    names = documented()[command]
    found: set[str] = set()
    for code, arguments in RUNS[command]:
        named = [str(bundle) if word == "BUNDLE" else word.replace("BUNDLE", bundle.stem) for word in arguments]
        done = command_line(*named, "--json")
        assert done.code == code
        assert not done.err or command == "publish", "which tells where FlashInfer is missing"
        found |= set(keys(json.loads(done.out), names))
    assert found == names


@pytest.mark.parametrize(
    ("command", "keys_of_the_page", "struct"),
    [
        pytest.param("inspect SOURCE", "sections[].provenance.*", Provenance, id="provenance"),
        pytest.param("list", "bundles[].workload.*", Workload, id="workload"),
    ],
)
def test_the_page_names_the_keys_that_are_optional(command: str, keys_of_the_page: str, struct: type) -> None:
    (row,) = re.findall(
        rf"^\| `{re.escape(keys_of_the_page)}` \|.*?\| (.*) \|$", (ROOT / "docs" / "json.md").read_text("utf-8"), re.M
    )
    assert re.findall(r"`(\w+)`", row) == list(struct.__struct_fields__)  # type: ignore[attr-defined]


def test_a_path_that_is_not_utf_8_is_no_obstacle(command_line: CommandLine, registry: Path) -> None:
    name = b"tuned-\xff.json".decode("utf-8", "surrogateescape")
    assert command_line.json("pull", *LIKE, "--to", name)["file"] == "tuned-?.json"
    assert command_line.json("inspect", name)["source"] == "tuned-?.json"
    assert command_line.json("verify", name)["checked"][0]["target"] == "tuned-?.json"
    first = command_line.output("inspect", name).splitlines()[0]
    assert first == "tuned-\N{REPLACEMENT CHARACTER}.json: v1 file made by fi-tunecache"
