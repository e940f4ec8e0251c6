"""``fi-tunecache yank``: what it changes in a registry, and what machines that have pulled make of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made
import pytest
from command_line import TOKENS, CommandLine, only_line
from hub_registry import FOLDER, NAME, REGISTRY, one_bundle, publish
from hub_server import Account, Fault, HubServer

from fi_tunecache.bundle import Bundle
from fi_tunecache.publish.directory import add_bundles

DATE = r"\d{4}-\d\d-\d\d"
REASON = "wrong results at M = 8"


class Registry:
    """A registry with two bundles: one of two entries, and a newer one of the first of them."""

    def __init__(
        self,
        command_line: CommandLine,
        name: str,
        files: Callable[[], dict[str, bytes]],
        add: Callable[[Bundle], object],
    ) -> None:
        self.name = name
        self.files = files
        self.add = add
        self.command_line = command_line
        entries = [made.entry(made.key(made.CUTLASS, m), 3, 0.5) for m in (1, 2)]
        add(made.bundle(entries))
        add(made.bundle([made.entry(made.key(made.CUTLASS, 1), 7, 0.25)], created="2026-12-02"))
        self.older, self.newer = (str(row["bundle"]) for row in self.rows())

    def rows(self) -> list[Any]:
        return list(self.command_line.json("list", "--registry", self.name)["bundles"])

    def yank(self, bundle: str, *arguments: str) -> str:
        return self.command_line.output("yank", f"{FOLDER}/{bundle}", *self._how(arguments))

    def refused(self, code: int, bundle: str, *arguments: str) -> str:
        before = self.files()
        done = self.command_line("yank", bundle, *self._how(arguments))
        assert (done.code, done.out) == (code, "")
        assert self.files() == before
        return only_line(done.err)

    def _how(self, arguments: tuple[str, ...]) -> list[str]:
        reason = [] if "--reason" in arguments else ["--reason", REASON]
        return ["--from", self.name, *reason, *arguments]


@pytest.fixture
def directory(command_line: CommandLine) -> Registry:
    root = Path("registry")
    return Registry(
        command_line,
        "./registry",
        lambda: {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()},
        lambda bundle: add_bundles(root, "made", [bundle]),
    )


@pytest.fixture
def team(command_line: CommandLine, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    return Registry(command_line, REGISTRY, lambda: hub.files(NAME), lambda bundle: publish(hub, bundle))


@pytest.fixture(params=["directory", "team"])
def registry(request: pytest.FixtureRequest) -> Registry:
    """Each kind of registry."""
    found: Registry = request.getfixturevalue(request.param)
    return found


# --- what changes


def test_only_the_row_and_the_card_change(registry: Registry) -> None:
    before, rows = registry.files(), registry.rows()
    assert registry.yank(registry.newer) == f"Yanked {FOLDER}/{registry.newer} of {registry.name}: {REASON}\n"

    after = registry.files()
    assert {path for path in after if after[path] != before.get(path)} - {".fi-tunecache.lock"} == {
        f"{FOLDER}/manifest.json",
        "README.md",
        "coverage.svg",
    }
    older, newer = registry.rows()
    assert older == rows[0]
    assert newer["yanked"].pop("reason") == REASON
    assert re.fullmatch(DATE, newer["yanked"].pop("date"))
    assert {**newer, "yanked": None} == rows[1]
    serials = [json.loads(files[f"{FOLDER}/manifest.json"])["serial"] for files in (before, after)]
    assert serials[1] == serials[0] + 1


def test_the_card_lists_it(registry: Registry) -> None:
    registry.yank(registry.newer)
    card = registry.files()["README.md"].decode()
    (line,) = [line for line in card.splitlines() if registry.newer in line]
    assert f"`{REASON}`" in line
    assert registry.older not in card, "bundles that may be used are counted, not listed"


def test_one_commit(team: Registry, hub: HubServer) -> None:
    before = len(hub.commits(NAME))
    team.yank(team.newer)
    repository = hub.repository(NAME)
    assert repository is not None
    assert len(hub.commits(NAME)) == before + 1
    assert repository.details(hub.head(NAME)).message == f"Yank {FOLDER}/{team.newer}"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda bundle: bundle, id="its name"),
        pytest.param(lambda bundle: bundle[:4], id="the start of it"),
        pytest.param(lambda bundle: f"{bundle}.json", id="its file"),
    ],
)
def test_how_a_bundle_may_be_named(directory: Registry, change: Callable[[str], str]) -> None:
    assert directory.yank(change(directory.newer)).startswith(f"Yanked {FOLDER}/{directory.newer} of ")


def test_yanked_twice(registry: Registry) -> None:
    registry.yank(registry.newer)
    before = registry.files()
    again = registry.yank(registry.newer, "--reason", "another reason")
    assert re.fullmatch(rf"{registry.newer} is yanked since {DATE}: {re.escape(REASON)}\n", again)
    document = json.loads(registry.yank(registry.newer, "--reason", "another reason", "--json"))
    assert (document["written"], document["reason"]) == (False, REASON)
    assert registry.files() == before


def test_what_was_odd_about_writing_is_told(team: Registry, hub: HubServer) -> None:
    hub.fault(Fault("/commit/", status=500, performed=True, times=1))
    done = team.command_line("yank", f"{FOLDER}/{team.newer}", "--from", team.name, "--reason", REASON)
    assert (done.code, done.out) == (0, f"Yanked {FOLDER}/{team.newer} of {REGISTRY}: {REASON}\n")
    assert only_line(done.err) == f"{REGISTRY} reported a failure, but had written"


def test_a_pull_request(team: Registry, hub: HubServer) -> None:
    before = hub.files(NAME)
    assert team.yank(team.newer, "--create-pr") == f"Opened {hub.endpoint}/datasets/{NAME}/discussions/1\n"
    assert hub.files(NAME) == before
    assert REASON.encode() in hub.files(NAME, "refs/pr/1")[f"{FOLDER}/manifest.json"]
    assert [row["yanked"] for row in team.rows()] == [None, None]


def test_whoever_publishes_beside_keeps_it_yanked(registry: Registry) -> None:
    registry.yank(registry.newer)
    registry.add(one_bundle(4))
    assert [bool(row["yanked"]) for row in registry.rows()] == [False, True, False]


# --- whoever has pulled


@pytest.fixture
def pull(registry: Registry) -> list[str]:
    Path("facts.json").write_text(json.dumps(made.H200.metadata()), "utf-8")
    return ["pull", "--registry", registry.name, "--environment", "facts.json"]


def providers(document: Any) -> dict[str, int]:
    return {bundle["bundle"]: bundle["entries"] for bundle in document["bundles"]}


def test_another_bundle_takes_over(registry: Registry, pull: list[str]) -> None:
    run = registry.command_line
    assert providers(run.json(*pull)) == {registry.newer: 1, registry.older: 1}
    registry.yank(registry.newer)
    assert providers(run.json(*pull, "--offline")) == {registry.newer: 1, registry.older: 1}, "nothing was asked yet"
    assert providers(run.json(*pull)) == {registry.older: 2}
    assert providers(run.json(*pull, "--offline")) == {registry.older: 2}


def test_where_there_is_no_other_bundle_nothing_is_left(registry: Registry, pull: list[str]) -> None:
    run = registry.command_line
    selection = Path(run.json(*pull)["path"])
    registry.yank(registry.newer)
    registry.yank(registry.older, "--reason", "wrong clocks")

    done = run(*pull)
    assert (done.code, done.out) == (3, "")
    removed, problem = done.err.splitlines()
    assert only_line(removed) == "what was chosen before is no longer there, and is removed from the cache"
    assert re.fullmatch(
        rf"nothing in {registry_name(registry)} fits NVIDIA H200, flashinfer 0\.7\.4 at match level exact \(nearest: "
        rf"bundle ({registry.older}: yanked on {DATE}: wrong clocks|{registry.newer}: yanked on {DATE}: {REASON})\); "
        "`fi-tunecache resolve` with the same options tells why, bundle by bundle",
        only_line(problem),
    )
    assert not selection.exists()
    assert run(*pull, "--offline").code == 3
    assert not selection.exists()


def registry_name(registry: Registry) -> str:
    """As a pattern: a path is shown whole."""
    return re.escape(registry.name) if "://" in registry.name else r"\S+/registry"


def test_resolve_and_list_tell_the_reason(registry: Registry, pull: list[str]) -> None:
    registry.yank(registry.newer)
    resolved = registry.command_line.output("resolve", *pull[1:])
    assert re.search(
        rf"^  bundle {registry.newer}: rejected: yanked on {DATE}: {re.escape(REASON)}: 1 entry lost$", resolved, re.M
    )
    assert f"  bundle {registry.older}: 2 of 2 entries\n" in resolved
    listed = registry.command_line.output("list", "--registry", registry.name)
    assert re.search(rf"^{registry.newer}: yanked on {DATE}, never used: {re.escape(REASON)}$", listed, re.M)


def test_another_match_level_of_what_was_pulled_offline(team: Registry, hub: HubServer) -> None:
    """A machine that has seen the yank makes nothing from the bundle any more, though it lies in its cache."""
    Path("facts.json").write_text(json.dumps(made.H200.metadata()), "utf-8")
    pull = ["pull", "--registry", team.name, "--environment", "facts.json"]
    team.command_line.output(*pull)
    team.yank(team.newer)
    team.command_line.output(*pull)
    hub.clear_log()
    document = team.command_line.json(*pull, "--offline", "--match", "compatible")
    assert providers(document) == {team.older: 2}
    assert hub.log == []


# --- what is refused


@pytest.mark.parametrize(
    ("bundle", "code", "line"),
    [
        pytest.param(
            f"{FOLDER}/0123456789abcdef",
            3,
            f"./registry has no bundle {FOLDER}/0123456789abcdef; see `fi-tunecache list --registry ./registry`",
            id="unknown",
        ),
        pytest.param(
            "0.7.2/nvidia-h200/0123456789abcdef",
            3,
            "./registry has no bundle 0.7.2/nvidia-h200/0123456789abcdef; "
            "see `fi-tunecache list --registry ./registry`",
            id="of a folder that is not there",
        ),
        pytest.param(
            "0123456789abcdef",
            2,
            "'0123456789abcdef' names no bundle; write it like 0.7.4/nvidia-h200/3f9a1c0e52d77b10",
            id="without its folder",
        ),
        pytest.param(
            f"{FOLDER}/012",
            2,
            f"'{FOLDER}/012' names no bundle; write it like 0.7.4/nvidia-h200/3f9a1c0e52d77b10",
            id="three digits",
        ),
        pytest.param(
            FOLDER,
            2,
            f"'{FOLDER}' names no bundle; write it like 0.7.4/nvidia-h200/3f9a1c0e52d77b10",
            id="a folder",
        ),
        pytest.param(
            "../../etc/0123456789abcdef",
            2,
            "'../../etc/0123456789abcdef' names no bundle; write it like 0.7.4/nvidia-h200/3f9a1c0e52d77b10",
            id="a path",
        ),
    ],
)
def test_a_bundle_that_is_not_there(directory: Registry, bundle: str, code: int, line: str) -> None:
    assert directory.refused(code, bundle) == line


def test_the_start_of_several_bundles(directory: Registry) -> None:
    """With some 300 bundles two begin with the same four digits; here is a pair that does."""
    starts: dict[str, int] = {}
    bundles = [one_bundle(m) for m in range(3, 1500)]
    add_bundles(Path("registry"), "made", bundles)
    for row in directory.rows():
        starts[row["bundle"][:4]] = starts.get(row["bundle"][:4], 0) + 1
    start = next(start for start, count in starts.items() if count == 2)
    assert directory.refused(2, f"{FOLDER}/{start}") == f"{start} is the start of 2 bundles; give more of its digits"


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        pytest.param("", "the reason is empty; say why, in a line", id="none"),
        pytest.param(" ", "the reason is empty; say why, in a line", id="blank"),
        pytest.param(
            "two\nlines", "--reason is no printable line of at most 500 characters; shorten it", id="two lines"
        ),
        pytest.param(
            "\x1b[31mred", "--reason is no printable line of at most 500 characters; shorten it", id="an escape"
        ),
        pytest.param("x" * 501, "--reason is no printable line of at most 500 characters; shorten it", id="long"),
        pytest.param(
            f"see {TOKENS[0]}", "--reason is given what looks like a token; revoke it, and leave it out", id="a token"
        ),
        pytest.param("open sesame-sesame", "--reason holds HF_TOKEN; leave it out", id="this user's token"),
        pytest.param(
            "see /mnt/notes.txt",
            "--reason holds a path of this machine, and everybody will read it; leave it out, or give the name that "
            "others know, such as meta-llama/Llama-3.1-8B",
            id="a path",
        ),
    ],
)
def test_a_reason_that_everybody_would_read(
    directory: Registry, monkeypatch: pytest.MonkeyPatch, reason: str, line: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "sesame-sesame")
    assert directory.refused(2, f"{FOLDER}/{directory.newer}", "--reason", reason) == line


def test_a_reason_is_trimmed(directory: Registry) -> None:
    directory.yank(directory.newer, "--reason", "  slow, see https://example.com/17 and tune M = 8 anew ")
    assert directory.rows()[1]["yanked"]["reason"] == "slow, see https://example.com/17 and tune M = 8 anew"


@pytest.mark.parametrize(
    ("target", "code", "line"),
    [
        pytest.param(
            "./nowhere",
            4,
            "./nowhere is not a registry, or can't be seen; check the name; see `hf auth login`",
            id="a directory that is not there",
        ),
        pytest.param(
            "embedded",
            2,
            "'embedded' can't be written; name hf://datasets/organisation/name, or a directory as ./registry",
            id="the embedded one",
        ),
        pytest.param(
            f"{REGISTRY}@{'1' * 40}",
            2,
            f"{REGISTRY}@{'1' * 40} is a commit, which can't be written; name a branch, or leave @ out",
            id="a commit",
        ),
    ],
)
def test_a_registry_that_can_not_be_changed(command_line: CommandLine, target: str, code: int, line: str) -> None:
    yank = ["yank", f"{FOLDER}/0123456789abcdef", "--from", target, "--reason", REASON]
    assert command_line.fault(code, *yank) == line


def test_a_directory_has_no_pull_requests(directory: Registry) -> None:
    assert directory.refused(2, f"{FOLDER}/{directory.newer}", "--create-pr") == (
        "--create-pr is for repositories on a Hub; leave it out for a directory"
    )


def test_a_repository_that_can_not_be_seen(
    command_line: CommandLine, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.create(NAME, private=True)
    hub.tokens[TOKENS[0]] = Account()
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    done = command_line("yank", f"{FOLDER}/0123456789abcdef", "--from", REGISTRY, "--reason", REASON)
    assert (done.code, done.out) == (4, "")
    assert only_line(done.err) == f"{REGISTRY} is not a registry, or can't be seen; check the name; see `hf auth login`"


def test_whoever_may_only_read(team: Registry, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens[TOKENS[0]] = Account(write=False)
    monkeypatch.setenv("HF_TOKEN", TOKENS[0])
    line = team.refused(4, f"{FOLDER}/{team.newer}")
    assert line.startswith(f"{REGISTRY}: the Hub refuses (403: ")
    assert line.endswith("; log in with `hf auth login` or set HF_TOKEN with a token that may do this")
