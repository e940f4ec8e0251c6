"""Publishing to a Hub: whatever the Hub does, the bundle is there, or the error says how far it got."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import publisher
import pytest
from command_line import TOKENS, isolated
from hub_registry import FOLDER, MANIFEST, NAME, NETWORK, NO_HUB, PORTAL, REGISTRY, VERSIONS
from hub_registry import publish as put
from hub_server import Account, Fault, HubServer, Request
from publisher import bundle_of, numbers, outcomes

from fi_tunecache.deadline import Deadline
from fi_tunecache.errors import UsageError
from fi_tunecache.folder import Folder
from fi_tunecache.hub import HubAccess
from fi_tunecache.manifest import read_manifest
from fi_tunecache.publish.hub import HubTarget
from fi_tunecache.registry import Registry
from fi_tunecache.user_cache import UserCache

OPEN = "; it may have written all the same; publish again: it does no harm"
LOGIN = "log in with `hf auth login` or set HF_TOKEN"
SEEMED_TO_FAIL = f"{REGISTRY} reported a failure, but had written"
STALE = f"{REGISTRY} let a stale write pass: what others had published is put back"
HEAD, UPLOAD, COMMIT, HISTORY, CREATION = "expand=sha", "/(preupload|commit)/", "/commit/", "/commits/", "/repos/create"

Publish = Callable[..., dict[str, Any]]


class Machine:
    """Publishes bundles by number, with the client that is installed here; each time as if for the first time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def __call__(
        self, number: int, name: str = REGISTRY, seconds: float = 30, *, private: bool = False, create_pr: bool = False
    ) -> dict[str, Any]:
        self._count += 1
        deadline = Deadline(seconds)
        access = HubAccess(UserCache(self._folder / f"cache{self._count}"), deadline)
        return publisher.publish(HubTarget(name, access, private=private), number, deadline, create_pr=create_pr)


@pytest.fixture
def publish(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name, value in isolated(tmp_path, {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKENS[0]}).items():
        monkeypatch.setenv(name, value)
    return Machine(tmp_path)


@pytest.fixture
def team(hub: HubServer) -> HubServer:
    """A Hub whose repository holds bundle 1."""
    put(hub, bundle_of(1))
    hub.clear_log()
    return hub


def held(hub: HubServer, revision: str = "main") -> list[int]:
    """The bundles that are listed; each is there."""
    return numbers(hub.files(NAME, revision))


def serial(hub: HubServer) -> int:
    return read_manifest(hub.read(NAME, MANIFEST), Folder.parse(FOLDER)).serial


def meanwhile(hub: HubServer, path: str, *others: Callable[[], object]) -> None:
    """Let others do something while requests for a path are answered, one after the other."""
    left = list(others)

    def on_request(request: Request) -> None:
        if left and re.search(path, request.path):
            left.pop(0)()

    hub.on_request = on_request


# --- what goes well, and how many requests it takes

LOOK = ["GET sha", "GET tree"]
DESCRIPTOR, CARD, MANIFEST_READ = (
    [f"{method} {name}" for method in ("HEAD", "GET")] for name in ("registry.json", "README.md", "manifest.json")
)
WRITE = ["POST validate-yaml", "POST preupload", "POST commit"]
CHECK = [*MANIFEST_READ, "GET commits"]


def asked(hub: HubServer) -> list[str]:
    """The requests since this was asked last; each by its method and what is asked for."""
    found = []
    for request in hub.log:
        kind = re.search(r"create|validate-yaml|preupload|commits?(?=/)|tree|sha$|[\w.-]+$", request.path)
        assert kind is not None
        found.append(f"{request.method} {kind[0]}")
    hub.clear_log()
    return found


def test_a_new_repository(hub: HubServer, publish: Machine) -> None:
    outcome = publish(1)
    assert outcome == {
        "revision": hub.head(NAME),
        "changed": True,
        "attempts": 1,
        "pull_request": None,
        "notices": [],
    }
    requests = asked(hub)
    assert requests == ["GET sha", "POST create", *LOOK, *WRITE, *CHECK, "HEAD manifest.json"]
    assert len(requests) == 11
    assert held(hub) == [1]
    assert hub.files(NAME).keys() >= {".gitattributes", "README.md", "coverage.svg", "registry.json"}
    assert json.loads(hub.read(NAME, "registry.json"))["name"] == REGISTRY
    assert f"fi-tunecache pull --registry {REGISTRY}".encode() in hub.read(NAME, "README.md")


def test_another_bundle(hub: HubServer, publish: Machine) -> None:
    publish(1)
    asked(hub)
    assert publish(2)["revision"] == hub.head(NAME)
    requests = asked(hub)
    assert requests == [*LOOK, *MANIFEST_READ, *DESCRIPTOR, *CARD, *WRITE, *CHECK]
    assert len(requests) == 14
    assert held(hub) == [1, 2]


def test_the_same_again_is_not_written(hub: HubServer, publish: Machine) -> None:
    first = publish(1)
    commits = hub.commits(NAME)
    asked(hub)
    assert publish(1) == {**first, "changed": False, "attempts": 0}
    assert asked(hub) == [*LOOK, *MANIFEST_READ, *DESCRIPTOR, *CARD]
    assert hub.commits(NAME) == commits


def test_what_a_snapshot_shows_can_be_read(team: HubServer, publish: Machine, tmp_path: Path) -> None:
    target = HubTarget(REGISTRY, HubAccess(UserCache(tmp_path / "cache"), Deadline(30)))
    snapshot = target.snapshot()
    put(team, bundle_of(2))
    registry = Registry(target.tree(snapshot))
    assert snapshot.manifests == {folder: registry.manifest(folder) for folder in registry.folders()}
    assert len(snapshot.manifests[Folder.parse(FOLDER)].bundles) == 1


def test_another_attempt_reads_what_has_changed(hub: HubServer, publish: Machine) -> None:
    publish(1)
    asked(hub)
    hub.fault(Fault(COMMIT, status=412, times=1))
    publish(2)
    first = [*LOOK, *MANIFEST_READ, *DESCRIPTOR, *CARD, *WRITE]
    assert asked(hub) == [*first, *LOOK, *WRITE, *CHECK]

    meanwhile(hub, "/preupload/", lambda: put(hub, bundle_of(7)))
    publish(3)
    assert asked(hub) == [*first, *LOOK, *MANIFEST_READ, *WRITE, *CHECK]
    assert held(hub) == [1, 2, 3, 7]


@pytest.mark.parametrize("private", [False, True])
def test_who_may_see_a_repository_that_is_made(hub: HubServer, publish: Machine, private: bool) -> None:
    publish(1, private=private)
    repository = hub.repository(NAME)
    assert repository is not None
    assert repository.private is private


def test_a_public_repository_is_not_taken_for_a_private_one(team: HubServer, publish: Machine) -> None:
    before = team.head(NAME)
    refused = publish(2, private=True)
    assert refused["error"] == "UsageError"
    assert "is there, and public; leave out --private" in refused["said"]
    assert team.head(NAME) == before
    repository = team.repository(NAME)
    assert repository is not None
    assert not repository.private


def test_a_repository_that_others_make_at_the_same_time(hub: HubServer, publish: Machine) -> None:
    """What is written is built on what they have put there meanwhile, not on nothing."""
    meanwhile(hub, CREATION, lambda: put(hub, bundle_of(7)))
    outcome = publish(1)
    assert (outcome["attempts"], outcome["notices"]) == (2, [])
    assert held(hub) == [1, 7]
    assert serial(hub) == 2


def test_another_branch(team: HubServer, publish: Machine) -> None:
    main = team.head(NAME)
    team.force(NAME, "staging/next", main)
    outcome = publish(2, f"{REGISTRY}@staging/next")
    assert team.head(NAME, "staging/next") == outcome["revision"] != main
    assert held(team, "staging/next") == [1, 2]
    assert team.head(NAME) == main


def test_a_pull_request(team: HubServer, publish: Machine) -> None:
    main = team.head(NAME)
    outcome = publish(2, create_pr=True)
    assert outcome["pull_request"] == f"{team.endpoint}/datasets/{NAME}/discussions/1"
    assert team.head(NAME, "refs/pr/1") == outcome["revision"] != main
    assert held(team, "refs/pr/1") == [1, 2]
    assert team.head(NAME) == main


def test_a_pull_request_to_a_repository_that_is_made(hub: HubServer, publish: Machine) -> None:
    assert publish(1, create_pr=True)["pull_request"]
    assert held(hub, "refs/pr/1") == [1]
    assert hub.files(NAME).keys() == {".gitattributes"}


def test_what_others_have_written_is_kept(team: HubServer, publish: Machine) -> None:
    theirs = {"notes/data.bin": bytes(range(256)), "0.7.4/read.me": b"theirs", "manifest.json": b"none of ours"}
    card = "---\nlicense: mit\n---\n# By hand\n\nGrüße\n"
    descriptor = b'{"name": "Ours", "format": 1, "notices": ["Moving"]}'
    team.put(NAME, {**theirs, "README.md": card.encode(), "registry.json": descriptor})
    assert publish(2)["notices"] == publish(3)["notices"] == []
    files = team.files(NAME)
    assert {path: files[path] for path in theirs} == theirs
    assert files["README.md"].decode().startswith(card)
    assert files["README.md"].decode().count("fi-tunecache:begin") == 1
    assert files["registry.json"] == descriptor
    assert held(team) == [1, 2, 3]


# --- what can't be written at all


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        pytest.param(
            f"{REGISTRY}@{'1' * 40}",
            {},
            "is a commit, which can't be written; name a branch, or leave @ out",
            id="commit",
        ),
        pytest.param(
            REGISTRY,
            {"HF_HUB_OFFLINE": "1"},
            "can't be written while the Hub may not be asked; unset HF_HUB_OFFLINE",
            id="offline",
        ),
    ],
)
def test_a_name_that_can_not_be_written(tmp_path: Path, name: str, variables: dict[str, str], message: str) -> None:
    access = HubAccess(UserCache(tmp_path), Deadline(1), offline=bool(variables))
    with pytest.raises(UsageError) as caught:
        HubTarget(name, access)
    assert str(caught.value) == f"{name} {message}"


def test_a_branch_that_is_not_there(team: HubServer, publish: Machine) -> None:
    outcome = publish(2, f"{REGISTRY}@staging")
    assert outcome["said"] == (
        f"{REGISTRY}@staging: it has no such branch, tag or commit (404: Invalid rev id: staging); "
        "check what follows the @"
    )
    assert team.references(NAME).keys() == {"refs/heads/main"}


def test_a_card_that_could_not_be_kept(team: HubServer, publish: Machine) -> None:
    head = team.put(NAME, {"README.md": "# Größe".encode("latin-1")})
    outcome = publish(2)
    assert (outcome["error"], outcome["code"]) == ("FormatError", 5)
    assert outcome["said"] == f"{REGISTRY}@{head}/README.md: not UTF-8 text; save it as UTF-8"
    assert team.head(NAME) == head


@pytest.mark.parametrize(
    ("account", "said"),
    [
        pytest.param(Account(write=False), "the Hub refuses (403", id="a token that may only read"),
        pytest.param(None, "the Hub does not take the token (401", id="a token that it does not know"),
    ],
)
@pytest.mark.parametrize("there", [False, True], ids=["no repository", "a repository"])
def test_a_token_that_may_not_write(
    hub: HubServer, publish: Machine, account: Account | None, said: str, there: bool
) -> None:
    if there:
        put(hub, bundle_of(1))
    hub.tokens["hf_" + "1" * 34] = Account()
    if account is not None:
        hub.tokens[TOKENS[0]] = account
    outcome = publish(2)
    assert (outcome["error"], outcome["code"]) == ("RegistryError", 4)
    assert outcome["said"].startswith(f"{REGISTRY}: {said}")
    assert LOGIN in outcome["said"]
    assert held(hub) == [1] if there else hub.repository(NAME) is None


# --- faults


class Case(NamedTuple):
    """What goes wrong when bundle 2 is published beside 1, and what comes of it.

    ``said`` is a regular expression for the error after the registry's name; empty where there is none.
    """

    faults: tuple[Fault, ...]
    said: str = ""
    written: bool = True
    attempts: int = 1
    notices: tuple[str, ...] = ()
    seconds: float = 30


def limited(seconds: str) -> Fault:
    return Fault(COMMIT, status=429, times=1, headers={"Retry-After": seconds})


SERVER = "the Hub has a fault of its own"
GOES_WELL = [
    pytest.param(Case((Fault(HEAD, status=500, times=1),)), id="500 when asked for the commit"),
    pytest.param(Case((Fault(HEAD, status=429, times=1),)), id="429 when asked for the commit"),
    pytest.param(Case((Fault("/tree/", status=503, times=1),)), id="503 when asked for the files"),
    pytest.param(Case((Fault("/resolve/", status=502, times=1),)), id="502 when asked for a file"),
    pytest.param(Case((Fault(UPLOAD, status=503, times=1),), attempts=2), id="503 before anything is sent"),
    pytest.param(Case((Fault(HISTORY, status=500, times=1),)), id="500 when asked for the history"),
]
DECISIVE = [
    pytest.param(Case((Fault(COMMIT, status=412, times=1),), attempts=2), id="412"),
    pytest.param(Case((limited("1"),), attempts=2), id="429, a second"),
    pytest.param(Case((limited("0"),), attempts=2), id="429, at once"),
    pytest.param(Case((Fault(COMMIT, status=429, times=1),), attempts=2), id="429, nothing said"),
    pytest.param(
        Case((Fault(COMMIT, status=500, performed=True, times=1),), notices=(SEEMED_TO_FAIL,)), id="500, written"
    ),
    pytest.param(Case((Fault(COMMIT, status=500, times=1),), attempts=2), id="500, not written"),
    pytest.param(Case((Fault(COMMIT, status=503, times=1),), attempts=2), id="503"),
    pytest.param(Case((Fault(COMMIT, cut=9, times=1),), notices=(SEEMED_TO_FAIL,)), id="cut answer"),
    pytest.param(Case((Fault(COMMIT, hang=0.01, times=1),), notices=(SEEMED_TO_FAIL,)), id="no answer"),
    pytest.param(
        Case((limited("3600"),), r"the Hub limits the number of requests \(429\); try again in 3600 s, or .*", False),
        id="429, an hour",
    ),
    pytest.param(
        Case((Fault(COMMIT, hang=30),), rf"the Hub gave no answer in time \(6 s\){re.escape(OPEN)}", seconds=6),
        id="hanging, written",
    ),
    pytest.param(
        Case(
            (Fault(UPLOAD, status=404),),
            r"the Hub has no such address \(404\); .* a mirror may offer downloads only.*",
            False,
        ),
        id="404: a mirror without uploads",
    ),
]
FAILS = [
    pytest.param(Case((Fault(status=401),), rf"the Hub does not take the token \(401\); {LOGIN}", False), id="401"),
    pytest.param(
        Case((Fault(status=401, code="RepoNotFound"),), rf"it does not exist, or .*{LOGIN}", False),
        id="401: not to be seen",
    ),
    pytest.param(Case((Fault(UPLOAD, status=403),), rf"the Hub refuses \(403\); {LOGIN}.*", False), id="403"),
    pytest.param(
        Case(
            (Fault("/resolve/", status=403, code="GatedRepo"),), r"it is gated, .*ask for access on its page.*", False
        ),
        id="403: gated",
    ),
    pytest.param(
        Case(
            (Fault(COMMIT, status=412),), r"somebody else has published meanwhile \(412\); try again", False, seconds=4
        ),
        id="412 for ever",
    ),
    pytest.param(Case((Fault(COMMIT, status=500),), rf"{SERVER} \(500\){re.escape(OPEN)}", False), id="500 for ever"),
    pytest.param(Case((Fault(COMMIT, status=503),), rf"{SERVER} \(503\){re.escape(OPEN)}", False), id="503 for ever"),
    pytest.param(
        Case((Fault(HEAD, status=503),), rf"{SERVER} \(503\); try again later", False), id="503 from the first"
    ),
    pytest.param(
        Case((Fault(HEAD, hang=30),), r"the Hub gave no answer in time \(3 s\); .*", False, seconds=3), id="hanging"
    ),
    pytest.param(Case((PORTAL(),), NO_HUB, False), id="HTML with 200"),
    pytest.param(
        Case((PORTAL(COMMIT),), rf"what answers is not a Hub, .*{re.escape(OPEN)}", False),
        id="HTML with 200 for a commit",
    ),
    pytest.param(
        Case((Fault(COMMIT, cut=9), Fault(HEAD, skip=1, status=500)), rf"{SERVER} \(500\){re.escape(OPEN)}"),
        id="cut answer, and no look possible",
    ),
    pytest.param(
        Case(
            (Fault("/resolve/", skip=6, status=500),),
            rf"{SERVER} \(500\); it was written, at [0-9a-f]{{12}}, but not read back; publish again: it does no harm",
        ),
        id="500 when it is read back",
    ),
]


def check(team: HubServer, publish: Publish, case: Case) -> None:
    before = team.head(NAME)
    for fault in case.faults:
        team.fault(fault)
    outcome = publish(2, seconds=case.seconds)
    team.clear_faults()
    if case.said:
        assert (outcome["error"], outcome["code"]) == ("RegistryError", 4)
        assert re.fullmatch(f"{REGISTRY}: {case.said}", outcome["said"])
    else:
        assert outcome == {
            "revision": team.head(NAME),
            "changed": True,
            "attempts": case.attempts,
            "pull_request": None,
            "notices": [*case.notices],
        }
    assert team.commits(NAME)[case.written] == before
    assert held(team) == [1, 2][: 1 + case.written]


@pytest.mark.parametrize("case", [*GOES_WELL, *DECISIVE, *FAILS])
def test_a_fault(team: HubServer, publish: Machine, case: Case) -> None:
    put(team, bundle_of(1))
    team.put(NAME, {"README.md": b"# By hand\n"})
    check(team, publish, case)


def test_a_hub_that_is_not_there(hub: HubServer, publish: Machine) -> None:
    hub.close()
    outcome = publish(1)
    assert outcome["said"] == f"{REGISTRY}: the Hub can't be reached (Connection refused); {NETWORK}"
    assert outcome["code"] == 4


def test_a_creation_that_seems_to_have_failed(hub: HubServer, publish: Machine) -> None:
    hub.fault(Fault(CREATION, status=500, performed=True, times=1))
    assert publish(1)["changed"]
    assert held(hub) == [1]


def test_an_answer_that_names_no_commit(team: HubServer, publish: Machine) -> None:
    body = {"commitOid": "../../etc", "commitUrl": f"{team.endpoint}/datasets/{NAME}/commit/..", "success": True}
    team.fault(Fault(COMMIT, body=json.dumps(body).encode(), times=1))
    assert publish(2)["notices"] == [SEEMED_TO_FAIL]
    assert held(team) == [1, 2]


def test_an_answer_that_names_another_commit(team: HubServer, publish: Machine) -> None:
    """What is read back at that commit is not what was written; it is looked for again, and found."""
    head = team.head(NAME)
    body = {"commitOid": head, "commitUrl": f"{team.endpoint}/datasets/{NAME}/commit/{head}", "success": True}
    team.fault(Fault(COMMIT, body=json.dumps(body).encode(), times=1))
    assert publish(2)["changed"]
    assert held(team) == [1, 2]


# --- a server that ignores parent_commit


@pytest.fixture
def careless(team: HubServer) -> HubServer:
    team.ignore_parent_commit = True
    return team


def test_what_a_stale_write_has_overwritten_is_put_back(careless: HubServer, publish: Machine) -> None:
    meanwhile(careless, "/preupload/", lambda: put(careless, bundle_of(7)), lambda: put(careless, bundle_of(8)))
    outcome = publish(2)
    assert (outcome["attempts"], outcome["notices"]) == (3, [STALE, STALE])
    assert outcome["revision"] == careless.head(NAME)
    assert held(careless) == [1, 2, 7, 8]


def test_a_new_repository_that_others_write_to_at_the_same_time(hub: HubServer, publish: Machine) -> None:
    hub.ignore_parent_commit = True
    meanwhile(hub, "/preupload/", lambda: put(hub, bundle_of(7)))
    assert publish(1)["notices"] == [STALE]
    assert held(hub) == [1, 7]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        pytest.param(Fault(HISTORY, status=404), "the Hub has no such address (404)", id="no history"),
        pytest.param(Fault(HISTORY, status=403), "the Hub refuses (403)", id="a history that may not be read"),
        pytest.param(PORTAL(HISTORY), "what answers is not a Hub", id="HTML with 200"),
        pytest.param(Fault(HISTORY, body=b"[]"), "its history does not show", id="an empty history"),
    ],
)
def test_a_history_that_can_not_be_read_is_told(team: HubServer, publish: Machine, fault: Fault, why: str) -> None:
    team.fault(fault)
    outcome = publish(2)
    (notice,) = outcome["notices"]
    assert notice.startswith(f"it can't be told whether others' rows were overwritten ({REGISTRY}: ")
    assert why in notice
    assert (outcome["revision"], held(team)) == (team.head(NAME), [1, 2])


# --- the same with each major of huggingface_hub


@pytest.fixture(params=[pytest.param(version, marks=pytest.mark.slow) for version in VERSIONS])
def publish_with(
    request: pytest.FixtureRequest, client_python: Callable[[str], str], hub: HubServer, tmp_path: Path
) -> Publish:
    """In a process that has another huggingface_hub."""
    python = client_python(request.param)
    environ = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKENS[0]}

    def run(number: int, name: str = REGISTRY, seconds: float = 30) -> dict[str, Any]:
        folder = tmp_path / "machine"
        with publisher.publisher(name, [number], folder=folder, python=python, seconds=seconds, **environ) as process:
            (outcome,) = outcomes(process)
        return outcome

    return run


def test_each_client_publishes(hub: HubServer, publish_with: Publish) -> None:
    assert publish_with(1)["changed"]
    assert publish_with(2)["changed"]
    again = publish_with(2)
    assert (again["changed"], again["revision"]) == (False, hub.head(NAME))
    assert held(hub) == [1, 2]
    assert serial(hub) == 2


@pytest.mark.parametrize("case", DECISIVE)
def test_a_fault_with_each_client(team: HubServer, publish_with: Publish, case: Case) -> None:
    check(team, publish_with, case)


def test_each_client_puts_back_what_a_stale_write_has_overwritten(careless: HubServer, publish_with: Publish) -> None:
    meanwhile(careless, "/preupload/", lambda: put(careless, bundle_of(7)))
    assert publish_with(2)["notices"] == [STALE]
    assert held(careless) == [1, 2, 7]
