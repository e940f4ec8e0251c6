"""What can go wrong with a Hub: for each fault the message, the exit code, and what is still there afterwards.

Every machine here logs in with a token that no output and no file may hold (``conftest.py`` sees to that).
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import TOKENS, only_line
from hub_registry import (
    FILE,
    FOLDER,
    MANIFEST,
    NAME,
    NETWORK,
    NEW,
    NO_HUB,
    PORTAL,
    REGISTRY,
    Machine,
    every_client,
    one_bundle,
)
from hub_server import Account, Fault, HubServer

from fi_tunecache.bundle import write_bundle

TOKEN = TOKENS[0]
API, A_MANIFEST, A_BUNDLE = "^/api/", r"/manifest\.json", r"/[0-9a-f]{16}\.json"
LOGIN = "log in with `hf auth login` or set HF_TOKEN"
PRIVATE = f"it does not exist, or it is private and can't be seen .*; check the name, or {LOGIN}"
GARBLED = (
    r"what came of a file is not what was announced \(file should be of size \d+ but has size \d+\); "
    "try again later, and check whether a proxy or a captive portal answers instead of the Hub"
)
IN_TIME = rf"the Hub gave no answer in time \(2 s\); try again with a longer --timeout, or {NETWORK}"


# --- the table


Spoil = Callable[[HubServer], object]


def fault(*faults: Fault) -> Spoil:
    def spoil(hub: HubServer) -> None:
        for item in faults:
            hub.fault(item)

    return spoil


def put(**fields: object) -> Spoil:
    """Publishes a manifest whose second row has other fields."""

    def spoil(hub: HubServer) -> None:
        manifest = json.loads(hub.read(NAME, MANIFEST))
        manifest["bundles"][1].update(fields)
        hub.put(NAME, {MANIFEST: json.dumps(manifest).encode()})

    return spoil


def other_bytes(hub: HubServer) -> None:
    """As many as there should be."""
    hub.fault(Fault(NEW, body=hub.read(NAME, NEW).replace(b"2026-12-01", b"2026-12-02")))


def size(by: int) -> int:
    return len(write_bundle(one_bundle(2))[0]) + by


def mark(name: str) -> Spoil:
    return lambda hub: (hub.folder / f"{NAME}.git" / name).touch()


def account(**rights: bool) -> Spoil:
    return lambda hub: hub.tokens.update({TOKEN: Account(**rights)})


def together(*spoils: Spoil) -> Spoil:
    return lambda hub: [spoil(hub) for spoil in spoils]


FAULTS = {
    # who may read
    "401 with a wrong token": (
        lambda hub: hub.tokens.update({"another": hub.tokens.pop(TOKEN)}),
        4,
        rf"the Hub does not take the token \(401: Invalid credentials .*\); {LOGIN}",
    ),
    "401 of a file": (fault(Fault(A_MANIFEST, status=401)), 4, rf"the Hub does not take the token \(401\); {LOGIN}"),
    "401 as the Hub answers who asks for what he can't see": (
        fault(Fault(API, status=401, code="RepoNotFound", message="Invalid username or password.")),
        4,
        PRIVATE,
    ),
    "403 gated": (
        together(mark("gated"), account(granted=False)),
        4,
        rf"it is gated, and no access was granted \(403: Access to dataset {NAME} is restricted and you are not in "
        rf"the list\); ask for access on its page, and {LOGIN}",
    ),
    "403": (fault(Fault(API, status=403)), 4, rf"the Hub refuses \(403\); {LOGIN} with a token that may do this"),
    # what is not there
    "404 repository": (
        together(mark("private"), account(granted=False)),
        4,
        PRIVATE,
    ),
    "404 revision": (
        fault(Fault(API, status=404, code="RevisionNotFound", message="Invalid rev id: main")),
        4,
        r"it has no such branch, tag or commit \(404: Invalid rev id: main\); check what follows the @",
    ),
    "404 of a mirror without the API": (
        fault(Fault(API, status=404)),
        4,
        r"the Hub has no such address \(404\); "
        "check the name; a mirror may offer downloads only: see HF_ENDPOINT",
    ),
    "404 bundle": (
        lambda hub: hub.put(NAME, {NEW: None}),
        5,
        f"{NEW}: the manifest names it, but it is missing; tell the publisher",
    ),
    # limits and faults of the Hub
    "429 for long": (
        fault(Fault(API, status=429, headers={"Retry-After": "300"})),
        4,
        rf"the Hub limits the number of requests \(429\); try again in 300 s, or {LOGIN}: the limits are higher then",
    ),
    "429 for long, as huggingface.co says it": (
        fault(Fault(API, status=429, headers={"RateLimit": '"api";r=0;t=155'})),
        4,
        r"the Hub limits the number of requests \(429\); try again in 155 s, or .*",
    ),
    "429 of a file for long": (
        fault(Fault(FILE, status=429, headers={"Retry-After": "300"})),
        4,
        r"the Hub limits the number of requests \(429\); try again in 300 s, or .*",
    ),
    "500 for ever": (fault(Fault(API, status=500)), 4, r"the Hub has a fault of its own \(500\); try again later"),
    "500 of a file for ever": (
        fault(Fault(A_BUNDLE, status=500)),
        4,
        r"the Hub has a fault of its own \(500\); try again later",
    ),
    "503 for ever": (
        fault(Fault(API, status=503, message="Down for maintenance")),
        4,
        r"the Hub has a fault of its own \(503: Down for maintenance\); try again later",
    ),
    "400": (
        fault(Fault(API, status=400, message="Bad day")),
        4,
        r"the Hub refuses the request \(400: Bad day\); see what it says",
    ),
    "a message that drives a terminal": (
        fault(Fault(API, status=400, body=json.dumps({"error": "\x1b[2J" + "x" * 9999}).encode())),
        4,
        r"the Hub refuses the request \(400: \N{REPLACEMENT CHARACTER}\[2Jx{296}\); see what it says",
    ),
    # the network
    "dropped connections": (fault(Fault(API, hang=0.01)), 4, rf"the Hub can't be reached \(\w+\); {NETWORK}"),
    "hanging": (fault(Fault(API, hang=math.inf)), 4, IN_TIME),
    "hanging at the facts of a file": (fault(Fault(FILE, "HEAD", hang=math.inf)), 4, IN_TIME),
    "hanging in the middle of a file": (fault(Fault(NEW, "GET", cut=100, hang=math.inf)), 4, IN_TIME),
    "a body that is cut for ever": (fault(Fault(API, cut=9)), 4, rf"the Hub can't be reached \(\w+\); {NETWORK}"),
    # what is no Hub
    "HTML with 200": (fault(PORTAL()), 4, NO_HUB),
    "HTML with 200 for a file": (fault(PORTAL(FILE)), 4, NO_HUB),
    "HTML with 200 for the bytes of a file": (fault(PORTAL(FILE, "GET")), 4, GARBLED),
    "an answer without a commit": (fault(Fault(API, body=b'{"id":"team/tuned"}')), 4, NO_HUB),
    "a commit that is none": (fault(Fault(API, body=b'{"id":"team/tuned","sha":"../../x"}')), 4, NO_HUB),
    "a list": (fault(Fault(API, body=b"[]")), 4, NO_HUB),
    "no X-Repo-Commit": (fault(Fault(FILE, without=("X-Repo-Commit",))), 4, NO_HUB),
    "no ETag": (fault(Fault(FILE, without=("ETag",))), 4, NO_HUB),
    # damaged or hostile data
    "poisoned bundle": (
        other_bytes,
        5,
        f"{NEW}: sha256 is [0-9a-f]{{16}}…, the manifest says {Path(NEW).stem}…; "
        "the file was changed; fetch it again or tell the publisher",
    ),
    "longer bundle": (fault(Fault(NEW, body=b"x" * 9999)), 5, f"{NEW} has more than {size(0)} bytes; .*"),
    "shorter bundle": (
        fault(Fault(NEW, body=b"short")),
        5,
        f"{NEW}: size is 5 bytes, the manifest says {size(0)}; the file was changed; .*",
    ),
    "more bytes than announced": (fault(Fault(NEW, "GET", body=b"x" * 9999)), 4, GARBLED),
    "wrong size in the manifest": (
        put(size=size(1)),
        5,
        f"{NEW}: size is {size(0)} bytes, the manifest says {size(1)}; .*",
    ),
    "too small a size in the manifest": (put(size=size(-1)), 5, f"{NEW} has more than {size(-1)} bytes; .*"),
    "wrong facts in the manifest": (put(created="2026-12-09"), 5, f"{NEW}: the manifest is wrong about its crea.*"),
    "a path in the manifest": (put(file="../../../x.json"), 5, f"{MANIFEST}: .* is not a bundle's file name.*"),
    "poisoned manifest": (fault(Fault(A_MANIFEST, body=b"{}")), 5, rf"{MANIFEST}: not a manifest \(.*\); tell .*"),
    "truncated manifest": (
        fault(Fault(A_MANIFEST, body=b'{"format":1,"bun')),
        5,
        rf"{MANIFEST}: not a JSON document \(Input data was truncated\); fetch or write it again",
    ),
    "manifest of a newer format": (
        fault(Fault(A_MANIFEST, body=b'{"format":2,"rows":[]}')),
        5,
        f"{MANIFEST}: registry format 2 is newer than 1; upgrade fi-tunecache",
    ),
    "manifest of 17 MiB": (
        fault(Fault(A_MANIFEST, body=b" " * (17 << 20))),
        5,
        f"{MANIFEST} has more than 16777216 bytes; fetch it again or tell the publisher",
    ),
    "manifest of 70 MiB": (fault(Fault(A_MANIFEST, body=b" " * (70 << 20))), 5, f"{MANIFEST} has more than .*"),
}  # fmt: skip

DECISIVE = [
    "401 with a wrong token",
    "403 gated",
    "404 repository",
    "404 bundle",
    "429 of a file for long",
    "500 of a file for ever",
    "hanging in the middle of a file",
    "HTML with 200",
    "HTML with 200 for the bytes of a file",
    "no X-Repo-Commit",
    "poisoned bundle",
    "more bytes than announced",
    "manifest of 70 MiB",
]


def check(hub: HubServer, machine: Machine, name: str) -> None:
    """An error of one line; the selection that was pulled before is still there; without the fault, all is well."""
    spoil, code, line = FAULTS[name]
    sound, before = hub.files(NAME), machine.state()
    spoil(hub)
    started = time.monotonic()
    done = machine.pull("--timeout", "2" if name.startswith("hanging") else "30")
    assert time.monotonic() - started < (3 if name.startswith("hanging") else 8)
    assert (done.code, done.out) == (code, ""), done
    assert re.fullmatch(rf"{REGISTRY}[:/] ?(?:{line})", only_line(done.err)), done.err

    assert machine.state() == before
    biggest = max(path.lstat().st_size for path in machine.cache.rglob("*"))
    assert biggest <= 65 << 20, "a Hub can't fill the disk"
    hub.clear_log()
    assert machine.entries("--offline") == 1
    assert hub.log == []

    hub.clear_faults()
    hub.tokens.clear()
    for marker in ("gated", "private"):
        (hub.folder / f"{NAME}.git" / marker).unlink(missing_ok=True)
    hub.put(NAME, sound)
    assert machine.entries() == 2


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault(hub: HubServer, pulled_machine: Machine, name: str) -> None:
    check(hub, pulled_machine, name)


@every_client
@pytest.mark.parametrize("name", DECISIVE)
def test_a_fault_with_every_client(hub: HubServer, pulled_machine: Machine, name: str) -> None:
    check(hub, pulled_machine, name)


# --- faults that pass


PASSING = {
    "429 for a second": (fault(Fault(API, status=429, headers={"Retry-After": "1"}, times=1)), 6),
    "429 of the facts of a file": (fault(Fault(FILE, "HEAD", status=429, headers={"Retry-After": "1"}, times=1)), 6),
    "429 of a file": (fault(Fault(FILE, "GET", status=429, headers={"Retry-After": "1"}, times=1)), 7),
    "500 once": (fault(Fault(API, status=500, times=1)), 6),
    "500 of a file, once": (fault(Fault(FILE, "GET", status=500, times=1)), 7),
    "503 twice": (fault(Fault(API, status=503, times=2)), 7),
    "a dropped connection": (fault(Fault(API, hang=0.01, times=1)), 6),
    "a body that is cut": (fault(Fault(FILE, "GET", cut=50, times=1)), (6, 7)),
    "no Content-Length of the bytes": (fault(Fault(FILE, "GET", without=("Content-Length",))), 5),
    "a slow Hub": (fault(Fault(delay=0.2)), 5),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes(hub: HubServer, pulled_machine: Machine, name: str) -> None:
    spoil, requests = PASSING[name]
    spoil(hub)
    started = time.monotonic()
    assert pulled_machine.entries() == 2
    if name in ("429 for a second", "429 of a file"):
        assert time.monotonic() - started > 1, "it waits as long as it is told to"
    assert len(hub.log) in ((requests,) if isinstance(requests, int) else requests)


@every_client
@pytest.mark.parametrize("name", ["429 of a file", "500 of a file, once", "a body that is cut"])
def test_a_fault_that_passes_with_every_client(hub: HubServer, pulled_machine: Machine, name: str) -> None:
    PASSING[name][0](hub)
    assert pulled_machine.entries() == 2
    assert len(hub.log) in (6, 7)


@every_client
def test_no_content_length(hub: HubServer, pulled_machine: Machine) -> None:
    """Of a file's facts: clients before 1.0 can't do without."""
    hub.fault(Fault(FILE, without=("Content-Length",)))
    done = pulled_machine.pull("--json")
    if done.code:
        assert (done.code, done.out) == (4, "")
        assert re.fullmatch(rf"{REGISTRY}: {NO_HUB}", only_line(done.err))
    else:
        assert json.loads(done.out)["entries"] == 2


# --- a branch that goes back


def test_a_rollback_is_refused(hub: HubServer, pulled_machine: Machine) -> None:
    """Who can rewind a branch could undo a yank."""
    second, first = hub.commits(NAME)[:2]
    assert pulled_machine.entries() == 2
    before = pulled_machine.state()
    hub.force(NAME, "main", first)
    done = pulled_machine.pull()
    assert (done.code, done.out) == (5, "")
    assert only_line(done.err) == (
        f"{REGISTRY}/{FOLDER}: its manifest has gone back from change 2, seen before, to 1; "
        "ask the publisher why; --allow-rollback takes it, and a commit after @ pins one"
    )
    assert pulled_machine.state() == before
    assert pulled_machine.entries("--offline") == 2
    assert pulled_machine.entries("--registry", f"{REGISTRY}@{first}") == 1
    hub.force(NAME, "main", second)
    assert pulled_machine.entries() == 2


def test_a_folder_that_is_gone(hub: HubServer, pulled_machine: Machine) -> None:
    """Without a manifest nothing is there to go back; a yank can't be undone by that."""
    hub.put(NAME, {FOLDER: None})
    before = pulled_machine.state()
    done = pulled_machine.pull()
    assert (done.code, done.out) == (5, "")
    assert "its manifest has gone back from change 1, seen before, to 0;" in only_line(done.err)
    assert pulled_machine.state() == before


def test_a_folder_that_never_was(hub: HubServer, pulled_machine: Machine) -> None:
    """No folder for this GPU: code 3, with what there is."""
    done = pulled_machine.pull("--device", "NVIDIA B200", "--fact", "flashinfer_version=0.9")
    assert (done.code, done.out) == (3, "")
    assert only_line(done.err) == (
        f"nothing in {REGISTRY} fits NVIDIA B200, flashinfer 0.9 at match level exact; "
        f"there is {FOLDER}; see `fi-tunecache list`"
    )


# --- the token's file


LOST = "the file that `hf auth login` wrote can't be read"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(Path.mkdir, "IsADirectoryError", id="a directory"),
        pytest.param(lambda path: path.write_bytes(b"hf_\xff\xfe"), "UnicodeDecodeError", id="no text"),
        pytest.param(lambda path: path.symlink_to(path), "OSError", id="a link to itself"),
    ],
)
def test_a_token_file_that_can_not_be_read(
    hub: HubServer, pulled_machine: Machine, make: Callable[[Path], object], reason: str
) -> None:
    del pulled_machine.environ["HF_TOKEN"]
    before, path = pulled_machine.state(), pulled_machine.folder / "mine"
    make(path)
    done = pulled_machine.pull(HF_TOKEN_PATH=str(path))
    assert (done.code, done.out) == (4, "")
    line = f"{REGISTRY}: {LOST} ({path}: {reason}); fix its permissions, or log in again"
    assert only_line(done.err) == line
    assert hub.log == []
    assert {name: status for name, status in pulled_machine.state().items() if not name.startswith("mine")} == before
    assert pulled_machine.entries(HF_TOKEN_PATH=str(pulled_machine.folder / "none")) == 2


def test_a_token_that_can_not_be_sent(pulled_machine: Machine) -> None:
    done = pulled_machine.pull(HF_TOKEN="hf_täken")
    assert done.code == 4
    assert re.fullmatch(rf"{REGISTRY}: the Hub does not take the token .*; {LOGIN}", only_line(done.err)), done.err
