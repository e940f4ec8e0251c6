"""``fi-tunecache publish``: the plan, what is written and where, each option, and what is refused."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import made
import pytest
from command_line import TOKENS, CommandLine, Done, only_line, snapshot
from hub_registry import NAME, REGISTRY
from hub_server import Account, Fault, HubServer
from made_sources import OF_0_7_2, v1_file

from fi_tunecache.bundle import MARK
from fi_tunecache.entry import Entry
from fi_tunecache.environment import Environment
from fi_tunecache.flashinfer_json import read_cache_file
from fi_tunecache.source import read_source

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
FOLDER = "0.7.4/nvidia-h200"

CHECK = re.compile(r"^fi-tunecache: FlashInfer \S+ did not check the bundle, our own rules did: .*\n", re.M)
"""What is said where the tests run without that FlashInfer."""


def timed(m: int, tactic: int = 3, time_ms: float = 0.5, runner: str = made.CUTLASS, op: str = "bf16_gemm") -> Entry:
    return made.entry(made.key(runner, m, op), tactic, time_ms)


def write(name: str, *entries: Entry, environment: Environment = made.H200) -> str:
    """A file as FlashInfer saves it, below the working directory."""
    return str(v1_file(Path(name), entries, environment))


class Publisher:
    """``fi-tunecache publish`` into one registry; ``files`` are all that lie there."""

    def __init__(self, command_line: CommandLine, target: str, files: Callable[[], dict[str, bytes]]) -> None:
        self.target = target
        self.files = files
        self.command_line = command_line

    def run(self, *arguments: str) -> Done:
        done = self.command_line("publish", "--to", self.target, *arguments)
        return Done(done.code, done.out, CHECK.sub("", done.err))

    def __call__(self, *arguments: str) -> str:
        """What is printed where all goes well."""
        done = self.run(*arguments)
        assert (done.code, done.err) == (0, "")
        return done.out

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))

    def refused(self, code: int, *arguments: str) -> str:
        """The one line of what is refused before there is a plan; nothing is written to the registry."""
        before = self.files()
        done = self.run(*arguments)
        assert (done.code, done.out) == (code, ""), done
        assert self.files() == before
        return only_line(done.err)

    def rows(self) -> list[Any]:
        return list(self.command_line.json("list", "--registry", self.target)["bundles"])


def files_below(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def directory(command_line: CommandLine) -> Publisher:
    return Publisher(command_line, "./registry", lambda: files_below(Path("registry")))


@pytest.fixture
def team(command_line: CommandLine, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    """A repository that is not there yet."""
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    return Publisher(command_line, REGISTRY, lambda: hub.files(NAME) if hub.repository(NAME) else {})


@pytest.fixture(params=["directory", "team"])
def publisher(request: pytest.FixtureRequest) -> Publisher:
    """Each kind of registry."""
    found: Publisher = request.getfixturevalue(request.param)
    return found


# --- the plan


def normalised(out: str) -> list[str]:
    """Without the names of bundles and revisions, sizes, and who has checked the bundle."""
    out = re.sub(r"\b[0-9a-f]{16}\b", "ID", out)
    out = re.sub(r"at [0-9a-f]{12}\b", "at REVISION", out)
    out = re.sub(r"served by \S+ [\w.]+", "served by CHECKER", out)
    return re.sub(r"[\d,]+ bytes", "N bytes", out).splitlines()


BEFORE = [timed(1), timed(2)]
HEAD = f"{FOLDER} (NVIDIA H200), policy default"
COLUMNS = "  op         new  changed  unchanged  left out"
LOADED = "  no recorded lookups; every entry was loaded and served by CHECKER"


@pytest.mark.parametrize(
    ("before", "source", "lines"),
    [
        pytest.param(
            [],
            [timed(1), timed(2), timed(1, op="fp8_gemm")],
            [
                f"{HEAD}: new bundle ID, N bytes",
                "  from tuned.json",
                COLUMNS,
                "  bf16_gemm    2        0          0         0",
                "  fp8_gemm     1        0          0         0",
                "  in that environment a client takes: bundle ID: 3 of 3 entries",
                LOADED,
                "1 bundle with 3 entries, N bytes, to be added to ./registry",
            ],
            id="the first",
        ),
        pytest.param(
            BEFORE,
            [timed(1), timed(2, 9, 0.25), timed(4)],
            [
                f"{HEAD}: new bundle ID, N bytes",
                "  from tuned.json",
                COLUMNS,
                "  bf16_gemm    1        1          1         0",
                "  unchanged ones are in bundle ID",
                "  in that environment a client takes: bundle ID: 3 of 3 entries",
                LOADED,
                "1 bundle with 3 entries, N bytes, to be added to ./registry",
            ],
            id="new, changed and unchanged",
        ),
        pytest.param(
            BEFORE,
            [timed(4), timed(8), timed(8, time_ms=0.75, runner=made.TINY), timed(1, 5, 0.495)],
            [
                f"{HEAD}: new bundle ID, N bytes",
                "  from tuned.json",
                COLUMNS,
                "  bf16_gemm    2        0          0         2",
                "  no recorded lookup tells the caller's order, so only the fastest runner of a shape is kept: "
                "1 entry of TinyGemmBf16GemmRunner left out (rivals: CutlassBf16GemmRunner)",
                "  what is published is as fast, within 2%, or faster: 1 entry of CutlassBf16GemmRunner left out "
                "(bundle ID)",
                "  in that environment a client takes: bundle ID: 2 of 2 entries",
                LOADED,
                "1 bundle with 2 entries, N bytes, to be added to ./registry",
            ],
            id="left out",
        ),
        pytest.param(
            BEFORE,
            [timed(2), timed(1, 5, 0.495)],
            [
                f"{HEAD}: nothing new",
                "  from tuned.json",
                COLUMNS,
                "  bf16_gemm    0        0          1         1",
                "  unchanged ones are in bundle ID",
                "  what is published is as fast, within 2%, or faster: 1 entry of CutlassBf16GemmRunner left out "
                "(bundle ID)",
                "Nothing to add to ./registry.",
            ],
            id="nothing new",
        ),
    ],
)
def test_the_plan(directory: Publisher, before: list[Entry], source: list[Entry], lines: list[str]) -> None:
    if before:
        directory(write("before.json", *before), "--yes")
    assert normalised(directory(write("tuned.json", *source), "--dry-run")) == lines


def test_sources_of_several_environments(directory: Publisher) -> None:
    first, same = write("first.json", timed(1)), write("same.json", timed(1), timed(2))
    other = write("other.json", timed(4), environment=OF_0_7_2)
    lines = directory(first, same, other, "--dry-run").splitlines()

    heads = [line for line in lines if not line.startswith(" ")]
    assert normalised("\n".join(heads)) == [
        "0.7.2.post1/nvidia-h200 (NVIDIA H200), policy default: new bundle ID, N bytes",
        f"{HEAD}: new bundle ID, N bytes",
        "2 bundles with 3 entries, N bytes, to be added to ./registry",
    ]
    sizes = [int(size.replace(",", "")) for size in re.findall(r"([\d,]+) bytes", "\n".join(heads))]
    assert sizes[0] + sizes[1] == sizes[2]
    assert [line for line in lines if line.startswith("  from ")] == [
        "  from other.json",
        "  from first.json",
        "  from same.json",
    ]
    assert "  1 entry more than one source has" in lines


def test_the_plan_holds(directory: Publisher) -> None:
    """What is said of a bundle is what the registry says of it afterwards."""
    source = write("tuned.json", *BEFORE)
    plan = directory(source, "--dry-run")
    directory(source, "--yes")
    (row,) = directory.rows()
    assert f"{HEAD}: new bundle {row['bundle']}, {row['size']:,} bytes\n" in plan
    assert f"served by {row['round_trip']}\n" in plan
    assert len(directory.files()[f"{FOLDER}/{row['file']}"]) == row["size"]


# --- writing


def test_published_and_pulled(publisher: Publisher) -> None:
    lines = publisher(write("tuned.json", *BEFORE), "--yes").splitlines()
    assert normalised("\n".join(lines[-2:])) == [
        f"Published to {publisher.target} at REVISION",
        f"Get it where it serves: fi-tunecache pull --registry {publisher.target}",
    ]
    assert {Path(path).name for path in publisher.files()} - {".gitattributes", ".fi-tunecache.lock"} == {
        "registry.json",
        "README.md",
        "coverage.svg",
        "manifest.json",
        publisher.rows()[0]["file"],
    }
    assert publisher.command_line.json("verify", publisher.target)["ok"]
    Path("facts.json").write_text(json.dumps(made.H200.metadata()), "utf-8")
    pull = ["pull", "--registry", publisher.target, "--environment", "facts.json", "--to", "pulled.json"]
    assert publisher.command_line.output(*pull).startswith("2 entries for NVIDIA H200, flashinfer 0.7.4 (exact)")
    pulled = read_cache_file(Path("pulled.json").read_bytes())
    assert {entry.key: entry.tactic for entry in pulled.entries} == {entry.key: entry.tactic for entry in BEFORE}


def test_publishing_again_does_nothing(publisher: Publisher) -> None:
    source = write("tuned.json", *BEFORE)
    publisher(source, "--yes")
    before = publisher.files()
    again = publisher(source)  # there is nothing to be confirmed
    assert normalised(again)[0] == f"{HEAD}: nothing new"
    assert again.splitlines()[-1] == f"Nothing to add to {publisher.target}."
    assert publisher.json(source, "--yes")["written"] is False
    assert publisher.files() == before


def test_a_dry_run_writes_nothing(publisher: Publisher, tmp_path: Path) -> None:
    source = write("tuned.json", *BEFORE)
    before = snapshot(tmp_path)
    out = publisher(source, "--dry-run")
    assert out.splitlines()[-1].endswith(f"to be added to {publisher.target}")
    assert publisher(source, "--dry-run", "--yes") == out
    assert publisher.json(source, "--dry-run")["written"] is False
    assert snapshot(tmp_path) == before
    assert publisher.files() == {}


def test_the_requests_of_a_publication(team: Publisher, hub: HubServer) -> None:
    source = write("tuned.json", *BEFORE)
    asked: list[set[str]] = []
    for arguments in (["--dry-run"], ["--yes"], ["--yes"]):
        team(source, *arguments)
        asked.append({request.method for request in hub.log})
        hub.clear_log()
    assert asked == [{"GET"}, {"GET", "HEAD", "POST"}, {"GET", "HEAD"}]
    assert len(hub.commits(NAME)) == 2, "its first, and one with all of ours"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        pytest.param([], "there is no terminal to ask at", id="no terminal"),
        pytest.param(["--json"], "--json shows the plan when all is done", id="--json"),
    ],
)
def test_without_yes_somebody_must_be_asked(publisher: Publisher, arguments: list[str], problem: str) -> None:
    done = publisher.run(write("tuned.json", *BEFORE), *arguments)
    assert done.code == 2
    assert only_line(done.err) == f"{problem}; give --yes, or look first with --dry-run"
    assert bool(done.out) == (not arguments), "the plan was shown"
    assert publisher.files() == {}


@pytest.mark.parametrize("arguments", [[], ["--json"]], ids=["printed", "JSON"])
def test_what_was_odd_about_writing_is_told(team: Publisher, hub: HubServer, arguments: list[str]) -> None:
    hub.fault(Fault("/commit/", status=500, performed=True, times=1))
    done = team.run(write("tuned.json", *BEFORE), "--yes", *arguments)
    notice = f"{REGISTRY} reported a failure, but had written"
    assert (done.code, only_line(done.err)) == (0, notice)
    assert len(hub.commits(NAME)) == 2
    if arguments:
        document = json.loads(done.out)
        assert (document["written"], document["notices"]) == (True, [notice])
        assert document["revision"] == hub.head(NAME)


def test_two_environments_are_one_commit(team: Publisher, hub: HubServer) -> None:
    sources = write("a.json", timed(1)), write("b.json", timed(1), environment=OF_0_7_2)
    team(*sources, "--yes")
    assert len(hub.commits(NAME)) == 2
    assert [row["folder"] for row in team.rows()] == ["0.7.2.post1/nvidia-h200", FOLDER]


# --- options


def message(hub: HubServer) -> str:
    repository = hub.repository(NAME)
    assert repository is not None
    return repository.details(hub.head(NAME)).message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--message", "Nightly tune 17"], "Nightly tune 17", id="given"),
        pytest.param([], "Publish 3 entries for NVIDIA H200, flashinfer 0.7.2.post1, 0.7.4", id="by default"),
        pytest.param(["--message", ""], "Publish 3 entries for NVIDIA H200, flashinfer 0.7.2.post1, 0.7.4", id="empty"),
    ],
)
def test_the_message_of_the_commit(team: Publisher, hub: HubServer, arguments: list[str], expected: str) -> None:
    team(write("a.json", *BEFORE), write("b.json", timed(1), environment=OF_0_7_2), "--yes", *arguments)
    assert message(hub) == expected


def test_a_pull_request(team: Publisher, hub: HubServer) -> None:
    team(write("tuned.json", *BEFORE), "--yes")
    before, more = hub.files(NAME), write("more.json", timed(4))
    lines = team(more, "--yes", "--create-pr").splitlines()
    assert lines[-1] == f"Opened {hub.endpoint}/datasets/{NAME}/discussions/1"
    assert hub.files(NAME) == before, "the branch stays"
    assert len(hub.files(NAME, "refs/pr/1")) == len(before) + 1

    document = team.json(more, "--yes", "--create-pr")
    assert document["pull_request"] == f"{hub.endpoint}/datasets/{NAME}/discussions/2"
    assert document["revision"] == hub.head(NAME, "refs/pr/2")


def test_a_branch(team: Publisher, hub: HubServer) -> None:
    hub.create(NAME)
    hub.force(NAME, "next", hub.head(NAME))
    before = hub.head(NAME)
    branch = Publisher(team.command_line, f"{REGISTRY}@next", team.files)
    branch(write("tuned.json", *BEFORE), "--yes")
    assert hub.head(NAME) == before
    assert len(branch.rows()) == 1


def test_a_branch_that_is_not_there_is_not_made(team: Publisher, hub: HubServer) -> None:
    hub.create(NAME)
    branch = Publisher(team.command_line, f"{REGISTRY}@next", team.files)
    line = branch.refused(4, write("tuned.json", *BEFORE), "--yes")
    assert line.startswith(f"{REGISTRY}@next: it has no such branch, tag or commit (404: ")


@pytest.mark.parametrize("private", [True, False])
def test_a_repository_is_made(team: Publisher, hub: HubServer, private: bool) -> None:
    team(write("tuned.json", *BEFORE), "--yes", *(["--private"] if private else []))
    repository = hub.repository(NAME)
    assert repository is not None
    assert repository.private == private


def test_a_private_repository_needs_a_token(team: Publisher, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.create(NAME, private=True)
    hub.tokens[TOKENS[0]] = Account()
    source = write("tuned.json", *BEFORE)
    done = team.run(source, "--yes")  # as if there were none, so it is to be made
    assert done.code == 4
    assert only_line(done.err).startswith(f"{REGISTRY}: the Hub does not take the token (401: ")
    assert len(hub.commits(NAME)) == 1
    monkeypatch.setenv("HF_TOKEN", TOKENS[0])
    team(source, "--yes")
    assert len(hub.commits(NAME)) == 2


def test_a_workload(directory: Publisher) -> None:
    workload = ["model=meta-llama/Llama-3.1-8B", "engine=vllm", "tensor_parallel=8", "note=at 32k tokens"]
    directory(write("tuned.json", *BEFORE), "--yes", *(f"--workload={pair}" for pair in workload))
    (row,) = directory.rows()
    assert row["workload"] == {
        "model": "meta-llama/Llama-3.1-8B",
        "engine": "vllm",
        "tensor_parallel": 8,
        "note": "at 32k tokens",
    }
    assert "`meta-llama/Llama-3.1-8B, engine vllm, tensor_parallel 8, at 32k tokens`" in (
        directory.files()["README.md"].decode()
    )


def test_conflicts(directory: Publisher) -> None:
    sources = [write("slow.json", timed(1, 3, 0.5), timed(2)), write("fast.json", timed(1, 7, 0.25))]
    os.utime("fast.json", (0, 0))
    key = timed(1).key.text
    answers = "tactic 3, 0.5 ms in slow.json; tactic 7, 0.25 ms in fast.json"
    for arguments in ([], ["--on-conflict", "error"]):
        assert directory.refused(2, *sources, "--yes", *arguments) == (
            f"sources have different answers to 1 key, the first {key}: {answers}; "
            "decide with --on-conflict fastest or newest, or leave a source out"
        )
    for rule, taken, left in (
        ("fastest", "tactic 7, 0.25 ms in fast.json", "another source has a faster answer to the same key"),
        ("newest", "tactic 3, 0.5 ms in slow.json", "another source has a newer answer to the same key"),
    ):
        lines = directory(*sources, "--dry-run", "--on-conflict", rule).splitlines()
        assert f"  {key}: {taken} is taken, of {answers}" in lines
        assert f"  {left}: 1 entry of CutlassBf16GemmRunner left out" in lines
        assert "  bf16_gemm    2        0          0         1" in lines


def test_every_open_conflict_is_shown(directory: Publisher) -> None:
    sources = [
        write("a.json", *(timed(m, 3, 0.5) for m in (1, 2, 4))),
        write("b.json", *(timed(m, 7) for m in (1, 2, 4))),
    ]
    done = directory.command_line("publish", *sources, "--to", directory.target, "--yes")
    assert (done.code, done.out) == (2, "")
    *others, refusal = done.err.splitlines()
    answers = "tactic 3, 0.5 ms in a.json; tactic 7, 0.5 ms in b.json"
    keys = sorted(timed(m).key.text for m in (1, 2, 4))
    assert refusal.startswith(
        f"fi-tunecache: sources have different answers to 3 keys, the first {keys[0]}: {answers}; "
    )
    assert others == [f"fi-tunecache: another conflict: {key}: {answers}" for key in keys[1:]]


def pulled(publisher: Publisher, *tuned: Entry) -> str:
    """A file that was pulled, and to which FlashInfer has added what it tuned."""
    publisher(write("before.json", *BEFORE), "--yes")
    Path("facts.json").write_text(json.dumps(made.H200.metadata()), "utf-8")
    pull = ["pull", "--registry", publisher.target, "--environment", "facts.json", "--to", "pulled.json"]
    publisher.command_line.output(*pull)
    document = json.loads(Path("pulled.json").read_bytes())
    saved = json.loads(Path(write("added.json", *tuned)).read_bytes())
    Path("pulled.json").write_text(json.dumps({**document, **saved, "_metadata": document["_metadata"]}))
    return "pulled.json"


def test_what_was_pulled_is_not_published_again(publisher: Publisher) -> None:
    source = pulled(publisher, timed(4))
    (row,) = publisher.rows()
    assert publisher.refused(2, source, "--yes") == (
        f"pulled.json can't be published: 2 of 3 entries came from bundle {row['bundle']}, the first "
        f"{BEFORE[0].key.text}; leave them out with --skip-pulled, or tune without fi-tunecache"
    )
    lines = publisher(source, "--yes", "--skip-pulled").splitlines()
    assert "  bf16_gemm    1        0          0         2" in lines
    assert (
        f"  it was pulled from a registry, not tuned: 2 entries of CutlassBf16GemmRunner left out "
        f"(bundle {row['bundle']})"
    ) in lines
    _, added = publisher.rows()
    document = json.loads(publisher.files()[f"{FOLDER}/{added['file']}"])
    assert document.keys() == {"_metadata", timed(4).key.text}
    assert MARK not in json.dumps(document[timed(4).key.text])


def test_recorded_lookups(directory: Publisher) -> None:
    """With them both runners of a shape are published, and which of them the caller is served is checked."""
    source = DATA / "h200-flashinfer-0.7.4" / "gemm-a.v1.json"
    lookups = DATA / "h200-flashinfer-0.7.4" / "gemm-a.lookups.json"
    without = directory(str(source), "--dry-run")
    assert "so only the fastest runner of a shape is kept" in without
    assert "1 bundle with 54 entries," in without
    lines = directory(str(source), "--lookups", str(lookups), "--dry-run").splitlines()
    assert lines[-1].startswith("1 bundle with 90 entries, ")
    assert lines[-2].startswith("  90 recorded lookups; every entry was loaded and served by ")
    assert not any("left out" in line for line in lines[3:])


@pytest.mark.parametrize(
    ("arguments", "v1", "store"),
    [
        pytest.param([], None, True, id="by default"),
        pytest.param(["--default-raced", "yes"], True, True, id="yes"),
        pytest.param(["--default-raced", "no"], False, False, id="no"),
    ],
)
def test_whether_the_default_raced(
    directory: Publisher, arguments: list[str], v1: bool | None, store: bool | None
) -> None:
    managed = str(DATA / "h200-flashinfer-0.7.2.post1" / "managed-store")
    lookups = str(DATA / "h200-flashinfer-0.7.2.post1" / "lookups.json")
    directory(write("tuned.json", *BEFORE), managed, "--lookups", lookups, "--yes", *arguments)
    assert {row["folder"]: row["default_raced"] for row in directory.rows()} == {
        "0.7.2.post1/nvidia-h200": store,
        FOLDER: v1,
    }


def test_from_the_cache(publisher: Publisher) -> None:
    """A mirror: the bundles as they are, with what the registry that they came from says of nobody else."""
    like = publisher.command_line.json("pull", "--like", FOLDER)["bundles"]
    document = publisher.json("--from", "cache", "--yes")
    assert sorted(bundle["sha256"] for bundle in document["bundles"]) == sorted(item["sha256"] for item in like)
    assert sorted(row["sha256"] for row in publisher.rows()) == sorted(item["sha256"] for item in like)
    for item in like:
        cached = Path("cache", "bundles", f"{item['sha256']}.json").read_bytes()
        assert publisher.files()[f"{FOLDER}/{item['bundle']}.json"] == cached
    assert publisher.json("--from", "cache", "--yes")["new"] == 0


def test_a_mix_of_sources(directory: Publisher) -> None:
    """Per-rank files of an engine, a store, a v1 file, a bundle and the cache, at once."""
    for rank in range(2):
        write(f"engine/hash/autotune_configs_dp0_rank{rank}.json", timed(1), timed(2 + rank))
    own = write("tuned.json", timed(8))
    bundle = next(iter((ROOT / "manifests" / "0.7.2.post1" / "nvidia-h200").glob("????????????????.json")))
    directory.command_line.output("pull", "--like", FOLDER)
    store = str(DATA / "h200-flashinfer-0.7.2.post1" / "managed-store")
    document = directory.json("engine", own, str(bundle), store, "--from", "cache", "--yes")
    kinds = [[Path(source).name for source in item["sources"]] for item in document["bundles"]]
    assert ["autotune_configs_dp0_rank0.json", "autotune_configs_dp0_rank1.json", "tuned.json"] in kinds
    assert [bundle.name] in kinds
    assert ["managed-store"] in kinds
    assert document["new"] == len(directory.rows()) == len(kinds) == 5


# --- what is refused


def changed(change: Callable[[dict[str, Any]], object], *entries: Entry) -> str:
    """A v1 file with something in it that FlashInfer has not put there, or an older one has."""
    path = Path(write("bad.json", *(entries or BEFORE)))
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document), "utf-8")
    return str(path)


def of_two_devices() -> str:
    path = Path(write("bad.json", *BEFORE))
    facts = json.dumps({**made.H200.metadata(), "gpu": "NVIDIA H100"})
    path.write_text(path.read_text().replace('{"', f'{{"_metadata":{facts},"', 1), "utf-8")
    return str(path)


def fact(name: str, value: object) -> Callable[[Publisher], list[str]]:
    return lambda publisher: [changed(lambda document: document["_metadata"].update({name: value}))]


def saved_by_0_7_2(publisher: Publisher) -> list[str]:
    """FlashInfer before 0.7.4 drops our marks."""
    publisher(write("before.json", *BEFORE, environment=OF_0_7_2), "--yes")
    return [write("bad.json", *BEFORE, timed(4), environment=OF_0_7_2)]


def conflicting(publisher: Publisher) -> list[str]:
    return [write("a.json", timed(1, 3)), write("bad.json", timed(1, 4))]


def yanked(publisher: Publisher) -> list[str]:
    source = write("bad.json", *BEFORE)
    publisher(source, "--yes")
    bundle = f"{FOLDER}/{publisher.rows()[0]['bundle']}"
    publisher.command_line.output("yank", bundle, "--from", publisher.target, "--reason", "wrong clocks")
    return [source]


FIRST = BEFORE[0].key.text
OLD_KEY = "('mm', 'Runner', ((1,),))"
EVERY_FACT = "tune again where FlashInfer finds every fact"

REFUSED: dict[str, list[tuple[str, Callable[[Publisher], list[str]], str]]] = {
    "facts that are missing or `unknown`, the wildcard `*`, no `_metadata`": [
        (
            "missing",
            lambda _: [changed(lambda document: document["_metadata"].pop("cudnn_version"))],
            f"bad.json can't be published: cudnn_version not known; {EVERY_FACT}",
        ),
        ("unknown", fact("gpu", "unknown"), f"bad.json can't be published: gpu not known; {EVERY_FACT}"),
        (
            "wildcard",
            fact("gpu", "*"),
            f"bad.json can't be published: gpu is the wildcard '*'; {EVERY_FACT}",
        ),
        (
            "no metadata",
            lambda _: [changed(lambda document: document.pop("_metadata"))],
            "bad.json can't be published: no _metadata: FlashInfer accepts the file blindly, on any GPU and any "
            f"version; {EVERY_FACT}",
        ),
    ],
    "two devices in one file": [
        (
            "metadata twice",
            lambda _: [of_two_devices()],
            "bad.json can't be published: _metadata stands there twice, and the last counts; "
            "remove one of them, or tune again",
        ),
        (
            "a list",
            fact("gpu", ["NVIDIA H200", "NVIDIA H100"]),
            f"bad.json can't be published: gpu is a list, not a string; {EVERY_FACT}",
        ),
    ],
    "FlashInfer before 0.7.1, keys without extras, cuDNN tactics that are a plan's position, a value of another "
    "runner than its key": [
        (
            "old FlashInfer",
            fact("flashinfer_version", "0.7.0"),
            "bad.json can't be published: it was tuned with FlashInfer 0.7.0; "
            "tune again with FlashInfer 0.7.1 or newer",
        ),
        (
            "no extras",
            lambda _: [changed(lambda document: document.update({OLD_KEY: ["Runner", 0]}))],
            f"bad.json can't be published: 1 key without extras, the first {OLD_KEY}; tune again with FlashInfer "
            "0.7.1 or newer: no lookup of FlashInfer 0.6.13 or newer can hit a key without extras",
        ),
        (
            "a plan's position",
            lambda _: [changed(lambda document: None, made.entry(made.key(made.CUDNN), 3))],
            f"bad.json can't be published: 1 entry of cuDNN whose tactic is a plan's position, the first {made.CUDNN} "
            f"at {made.key(made.CUDNN).text}; tune again without them",
        ),
        (
            "another runner",
            lambda _: [changed(lambda document: document[FIRST].__setitem__(0, "Other"))],
            f"bad.json can't be published: 1 entry of another runner than their key's, the first Other at {FIRST}; "
            "tune again without them",
        ),
    ],
    "entries that came from a registry": [
        (
            "marked",
            lambda publisher: [pulled(publisher, timed(4))],
            f"pulled.json can't be published: 2 of 3 entries came from bundle ID, the first {FIRST}; "
            "leave them out with --skip-pulled, or tune without fi-tunecache",
        ),
        (
            "not marked by 0.7.2",
            saved_by_0_7_2,
            "bad.json can't be published: 2 of 3 entries equal those of bundle ID, and FlashInfer 0.7.2.post1 saves no "
            f"marks, the first {FIRST}; leave them out with --skip-pulled, or tune without fi-tunecache",
        ),
    ],
    "sources with different tactics for one key": [
        (
            "of one time",
            conflicting,
            f"sources have different answers to 1 key, the first {FIRST}: tactic 3, 0.5 ms in a.json; tactic 4, 0.5 ms "
            "in bad.json; decide with --on-conflict fastest or newest, or leave a source out",
        ),
    ],
    "what was yanked": [
        (
            "its source",
            yanked,
            "bad.json can't be published: it went into bundle ID, which was yanked on DATE: wrong clocks; "
            "tune again, and leave this source out",
        ),
    ],
}
"""By the row of the table of what is refused in docs/team-registry.md."""


def test_the_page_names_what_is_refused() -> None:
    page = (ROOT / "docs" / "team-registry.md").read_text("utf-8")
    (table,) = re.findall(r"^### What is refused\n\n\| \| why \|\n\|---\|---\|\n(.*?)\n\n", page, re.M | re.S)
    assert [row.split(" | ")[0].removeprefix("| ") for row in table.splitlines()] == list(REFUSED)


@pytest.mark.parametrize(
    ("sources", "line"),
    [
        pytest.param(sources, line, id=f"{row.partition(',')[0]}: {name}")
        for row, cases in REFUSED.items()
        for name, sources, line in cases
    ],
)
def test_what_is_refused(directory: Publisher, sources: Callable[[Publisher], list[str]], line: str) -> None:
    given = sources(directory)
    told = directory.refused(2, *given, "--yes")
    assert re.sub(r"\d{4}-\d\d-\d\d", "DATE", re.sub(r"\b[0-9a-f]{16}\b", "ID", told)) == line
    assert directory.refused(2, *given, "--dry-run") == told


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param([], "there is nothing to publish; name a source, or --from cache", id="no source"),
        pytest.param(
            ["--from", "cache"], "there is nothing to publish; name a source, or pull something first", id="no cache"
        ),
        pytest.param(
            ["nowhere.json"],
            "nowhere.json does not exist; name a v1 file, a store, a bundle or a bundled module",
            id="a source that is not there",
        ),
        pytest.param(
            ["."],
            ". holds no managed store of FlashInfer (v2/<hash>) and no file of a rank (autotune_configs_dp0_rank0.json "
            "of vLLM, rank_tp0_pp0_dp0.json of SGLang); name a file, a bundle, a managed store or the cache directory "
            "of an engine",
            id="a directory without sources",
        ),
        pytest.param(
            ["tuned.json", "--lookups", "nowhere.json"],
            "nowhere.json can't be read (No such file or directory); name a file of recorded lookups",
            id="lookups that are not there",
        ),
        pytest.param(
            ["tuned.json", "--on-conflict", "best"],
            "Invalid value for '--on-conflict': 'best' is not one of 'error', 'fastest', 'newest'; "
            "see `fi-tunecache publish --help`",
            id="a rule that is none",
        ),
        pytest.param(
            ["tuned.json", "--workload", "modle=x"],
            "--workload 'modle' is not a field; the fields are model, engine, tensor_parallel, expert_parallel, note",
            id="a workload's field that is none",
        ),
        pytest.param(
            ["tuned.json", "--private"],
            "--private is for repositories on a Hub; leave it out for a directory",
            id="a private directory",
        ),
        pytest.param(
            ["tuned.json", "--create-pr"],
            "--create-pr is for repositories on a Hub; leave it out for a directory",
            id="a pull request in a directory",
        ),
    ],
)
def test_wrong_usage(directory: Publisher, arguments: list[str], line: str) -> None:
    write("tuned.json", *BEFORE)
    assert directory.refused(2, *arguments, "--yes") == line


@pytest.mark.parametrize(
    ("target", "line"),
    [
        pytest.param(
            "embedded",
            "'embedded' can't be written; name hf://datasets/organisation/name, or a directory as ./registry",
            id="the embedded one",
        ),
        pytest.param(
            "registry",
            "'registry' can't be written; name hf://datasets/organisation/name, or a directory as ./registry",
            id="a bare word",
        ),
        pytest.param("./tuned.json", "./tuned.json is there and not a directory; name another one", id="a file"),
        pytest.param(
            f"{REGISTRY}@{'1' * 40}",
            f"{REGISTRY}@{'1' * 40} is a commit, which can't be written; name a branch, or leave @ out",
            id="a commit",
        ),
        pytest.param(
            "hf://models/team/tuned",
            "'hf://models/team/tuned' does not name a dataset repository; write it like "
            "hf://datasets/organisation/name",
            id="a model",
        ),
    ],
)
def test_a_target_that_can_not_be_written(command_line: CommandLine, target: str, line: str) -> None:
    write("tuned.json", *BEFORE)
    for arguments in (["--yes"], ["--dry-run"]):
        assert command_line.fault(2, "publish", "tuned.json", "--to", target, *arguments) == line


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_hub_that_may_not_be_asked(
    team: Publisher, hub: HubServer, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    assert team.refused(2, write("tuned.json", *BEFORE), "--dry-run") == (
        f"{REGISTRY} can't be written while the Hub may not be asked; unset HF_HUB_OFFLINE"
    )
    assert hub.log == []


def test_a_hub_that_can_not_be_reached(command_line: CommandLine) -> None:
    publisher = Publisher(command_line, REGISTRY, dict)
    line = publisher.refused(4, write("tuned.json", *BEFORE), "--yes", "--timeout", "20")
    assert line.startswith(f"{REGISTRY}: the Hub can't be reached (Connection refused); check the network, ")


@pytest.mark.parametrize("name", ["registry.json", f"{FOLDER}/manifest.json", "README.md"])
def test_a_registry_that_is_damaged(directory: Publisher, name: str) -> None:
    directory(write("before.json", *BEFORE), "--yes")
    Path("registry", name).write_bytes(b"\xff")
    line = directory.refused(5, write("tuned.json", timed(4)), "--yes")
    assert line.startswith(f"./registry/{name}: ")


def test_a_directory_that_can_not_be_made(command_line: CommandLine) -> None:
    Path("file").touch()
    publisher = Publisher(command_line, "./file/registry", dict)
    done = publisher.run(write("tuned.json", *BEFORE), "--yes")
    assert done.code == 2
    assert only_line(done.err).endswith(
        "/file/registry can't be written (Not a directory); check that the registry's directory can be written"
    )


# --- what nobody else may know


class Private(NamedTuple):
    """Something of this machine or user, and how it is called where it is found in words."""

    text: str
    found: str


def private_things(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Private]:
    monkeypatch.setenv("HF_TOKEN", TOKENS[0])
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "a-token-that-looks-like-none")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LOGNAME", "zachary")
    monkeypatch.setattr(platform, "node", lambda: "gpu17.corp.example")
    assert getpass.getuser() == "zachary"
    looks = "is given what looks like a token; revoke it, and leave it out"
    path = (
        "holds a path of this machine, and everybody will read it; leave it out, or give the name that others know, "
        "such as meta-llama/Llama-3.1-8B"
    )
    named = "holds '{}', the name of this host or user, and everybody will read it; leave it out"
    return {
        "token": Private(f"with {TOKENS[0]}", looks),
        "another token": Private("with hf_ANOTHERanotherANOTHERanother", looks),
        "home": Private(f"from {tmp_path}/home/tuned.json", path),
        "path": Private("from /mnt/data/tuned.json", path),
        "host": Private("tuned on GPU17", named.format("gpu17")),
        "user": Private("by zachary", named.format("zachary")),
    }


@pytest.mark.parametrize("thing", ["token", "another token", "home", "path", "host", "user"])
@pytest.mark.parametrize(
    ("option", "prefix"),
    [pytest.param("--message", "", id="message"), pytest.param("--workload", "note=", id="workload")],
)
def test_words_that_tell_of_this_machine(
    directory: Publisher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, prefix: str, thing: str
) -> None:
    private = private_things(monkeypatch, tmp_path)[thing]
    line = directory.refused(2, write("tuned.json", *BEFORE), "--yes", option, prefix + private.text)
    told = f"{option} note" if prefix and "token" not in thing else option
    assert line == f"{told} {private.found}"


def test_a_token_that_looks_like_none(directory: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known from where it is kept; also where a workload would bring it into the bundle."""
    monkeypatch.setenv("HF_TOKEN", "sesame-open-sesame")
    source = write("tuned.json", *BEFORE)
    assert directory.refused(2, source, "--message", "sesame-open-sesame") == "--message holds HF_TOKEN; leave it out"
    line = directory.refused(5, source, "--workload", "note=sesame-open-sesame")
    assert re.fullmatch(
        rf"{FOLDER}/[0-9a-f]{{16}}\.json would hold HF_TOKEN; find out how it came into the source", line
    )


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("two\nlines", id="two lines"),
        pytest.param("x" * 501, id="long"),
        pytest.param("\x1b[31m", id="red"),
    ],
)
def test_a_message_that_is_no_line(directory: Publisher, text: str) -> None:
    assert directory.refused(2, write("tuned.json", *BEFORE), "--message", text) == (
        "--message is no printable line of at most 500 characters; shorten it"
    )


def test_a_user_without_a_name_or_a_home(directory: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container."""
    for variable in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    directory(write("tuned.json", *BEFORE), "--yes", "--message", "Nightly tune")
    assert len(directory.rows()) == 1


def test_nothing_of_this_machine_is_published(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: HubServer
) -> None:
    private_things(monkeypatch, tmp_path)
    hub.tokens[TOKENS[0]] = Account()
    path = write("home/zachary/gpu17/tuned.json", *BEFORE)
    publisher(str(tmp_path / path), "--yes")
    everything = b"\n".join(name.encode() + data for name, data in publisher.files().items())
    if publisher.target == REGISTRY:
        everything += message(hub).encode()
    for text in (TOKENS[0], "a-token-that", str(tmp_path), "zachary", "gpu17", "home"):
        assert text.encode() not in everything
    assert read_source(Path(path)).sections[0].digest.encode() in everything, "its hash tells nothing"
