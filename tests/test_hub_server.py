"""The loopback Hub as a test sees it, and as plain HTTP; the clients are in ``test_hub_server_clients.py``."""

from __future__ import annotations

import http.client
import json
import math
import signal
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hub_server import Account, Fault, HubServer

TOKEN = "hf_of_a_test"
NAMES = ["a/b.json", "a/deep/er/c.json", "a.json", "with space.txt", "ünïcode→.txt", "100%+more&=?#.txt"]


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def request(hub: HubServer, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
    connection = http.client.HTTPConnection(hub.endpoint.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def commit_body(files: dict[str, bytes], **header: str) -> bytes:
    rows: list[dict[str, object]] = [{"key": "header", "value": {"summary": "A commit", **header}}]
    rows += [
        {"key": "file", "value": {"path": path, "content": b64encode(data).decode()}} for path, data in files.items()
    ]
    return b"\n".join(json.dumps(row).encode() for row in rows)


def at_once(number: int, work: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# What a test does without a client


def test_what_is_put_can_be_read_at_its_commit_and_later(hub: HubServer) -> None:
    assert hub.create("org/name")
    assert not hub.create("org/name")
    first = hub.put("org/name", {"a/b.json": b"1", "c.json": b"2"})
    second = hub.put("org/name", {"a/b.json": b"3", "c.json": None})

    assert hub.read("org/name", "a/b.json") == b"3"
    assert hub.read("org/name", "a/b.json", first) == b"1"
    assert hub.files("org/name").keys() == {".gitattributes", "a/b.json"}
    assert hub.commits("org/name")[:2] == [second, first]
    assert hub.head("org/name") == second


def test_putting_the_same_again_makes_no_commit(hub: HubServer) -> None:
    hub.create("org/name")
    commit = hub.put("org/name", {"a": b"1"})
    assert hub.put("org/name", {"a": b"1"}) == commit


def test_a_branch_can_be_forced_back(hub: HubServer) -> None:
    hub.create("org/name")
    first = hub.put("org/name", {"a": b"1"})
    second = hub.put("org/name", {"a": b"2"})
    hub.force("org/name", "main", first)
    hub.force("org/name", "dev/next", second)
    assert hub.read("org/name", "a") == b"1"
    assert hub.references("org/name") == {"refs/heads/main": first, "refs/heads/dev/next": second}


def test_git_finds_the_repositories_sound_and_reads_the_same_files(hub: HubServer, tmp_path: Path) -> None:
    hub.create("org/name")
    hub.put("org/name", {name: name.encode() for name in NAMES}, "Message")
    bare, clone = tmp_path / "hub/org/name.git", tmp_path / "clone"
    subprocess.run(["git", f"--git-dir={bare}", "fsck", "--strict"], check=True, capture_output=True)
    subprocess.run(["git", "clone", "--quiet", bare, clone], check=True)
    assert {name: (clone / name).read_bytes() for name in NAMES} == {name: name.encode() for name in NAMES}


def test_a_folder_can_be_served_again(hub: HubServer, tmp_path: Path) -> None:
    hub.create("org/name", private=True)
    commit = hub.put("org/name", {"a": b"1"})
    hub.close()
    with HubServer(tmp_path / "hub", tokens={TOKEN: Account()}) as again:
        assert again.read("org/name", "a", commit) == b"1"
        assert request(again, "GET", "/api/datasets/org/name").status == 401


# Plain HTTP


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_file(hub: HubServer, name: str) -> None:
    hub.create("org/name")
    hub.put("org/name", {name: b"content"})
    quoted = "".join(f"%{byte:02X}" for byte in name.encode())
    assert request(hub, "GET", f"/datasets/org/name/resolve/main/{quoted}").body == b"content"


@pytest.mark.parametrize(
    ("wanted", "status", "body", "span"),
    [
        pytest.param("bytes=2-", 206, b"2345", "bytes 2-5/6", id="the rest"),
        pytest.param("bytes=1-2", 206, b"12", "bytes 1-2/6", id="the middle"),
        pytest.param("bytes=4-99", 206, b"45", "bytes 4-5/6", id="beyond the end"),
        pytest.param("bytes=6-", 416, None, "bytes */6", id="nothing left"),
        pytest.param("lines=1-2", 200, b"012345", None, id="another unit"),
    ],
)
def test_a_part_of_a_file(hub: HubServer, wanted: str, status: int, body: bytes | None, span: str | None) -> None:
    hub.create("org/name")
    hub.put("org/name", {"f": b"012345"})
    reply = request(hub, "GET", "/datasets/org/name/resolve/main/f", Range=wanted)
    assert (reply.status, reply.headers.get("content-range")) == (status, span)
    assert body in (None, reply.body)


@pytest.mark.parametrize("path", ["/", "/org/name/resolve/main/f", "/datasets/org/../../etc/resolve/main/f", "/api/x"])
def test_whatever_else_is_asked_is_not_found(hub: HubServer, path: str) -> None:
    reply = request(hub, "GET", path)
    assert (reply.status, reply.headers["x-error-code"]) == (404, "RepoNotFound")


@pytest.mark.parametrize("revision", ["nope", "0" * 40, "..%2F..%2Fconfig", "refs%2Fpr%2F1", "refs%2Fheads"])
def test_a_revision_that_is_none(hub: HubServer, revision: str) -> None:
    hub.create("org/name")
    reply = request(hub, "HEAD", f"/datasets/org/name/resolve/{revision}/f")
    assert (reply.status, reply.headers["x-error-code"]) == (404, "RevisionNotFound")


@pytest.mark.parametrize("path", ["../f", "/f", "a//f", ".git/config", "f/below"])
def test_a_path_that_cannot_be_committed(hub: HubServer, path: str) -> None:
    hub.create("org/name")
    commit = hub.put("org/name", {"f": b""})
    assert request(hub, "POST", "/api/datasets/org/name/commit/main", commit_body({path: b""})).status == 400
    assert hub.head("org/name") == commit


@pytest.mark.parametrize(
    ("token", "path", "body", "status"),
    [
        pytest.param(None, "/api/repos/create", {"name": "new", "type": "dataset"}, 401, id="creating without a token"),
        pytest.param(
            "reads", "/api/repos/create", {"name": "new", "type": "dataset"}, 403, id="creating, to read only"
        ),
        pytest.param("writes", "/api/repos/create", {"name": "new", "type": "model"}, 400, id="a model"),
        pytest.param("writes", "/api/datasets/org/name/tag/main", {"tag": "no tag"}, 400, id="no name of a tag"),
        pytest.param("reads", "/api/datasets/org/name/tag/main", {"tag": "v1"}, 403, id="tagging, to read only"),
        pytest.param(
            "writes", "/api/datasets/org/name/commit/main", {"key": "lfsFile", "value": {}}, 400, id="a file in LFS"
        ),
    ],
)
def test_what_is_refused(hub: HubServer, token: str | None, path: str, body: object, status: int) -> None:
    hub.create("org/name")
    hub.tokens |= {"writes": Account(), "reads": Account(write=False)}
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    assert request(hub, "POST", path, json.dumps(body).encode(), **headers).status == status
    assert list(hub.references("org/name")) == ["refs/heads/main"]


@pytest.mark.parametrize(
    ("path", "status"), [("/api/whoami-v2", 401), ("/api/datasets/org/name/tree/main/nothing", 404)]
)
def test_what_nobody_is_told(hub: HubServer, path: str, status: int) -> None:
    hub.create("org/name")
    hub.tokens[TOKEN] = Account()
    assert request(hub, "GET", path).status == status


def test_a_client_that_goes_while_it_sends_is_no_error(hub: HubServer) -> None:
    connection = http.client.HTTPConnection(hub.endpoint.removeprefix("http://"))
    connection.request("POST", "/api/repos/create", b'{"name":', {"Content-Length": "1000"})
    connection.close()
    assert request(hub, "POST", "/api/validate-yaml").status == 200
    hub.close()
    assert [request.path for request in hub.log] == ["/api/validate-yaml"]


def test_the_log_tells_of_each_request_but_no_token(hub: HubServer) -> None:
    hub.create("org/name")
    request(hub, "HEAD", "/datasets/org/name/resolve/main/f", Authorization=f"Bearer {TOKEN}", Range="bytes=1-")
    request(hub, "POST", "/api/validate-yaml", b"body")
    first, second = hub.log
    assert (first.method, first.path, first.status) == ("HEAD", "/datasets/org/name/resolve/main/f", 404)
    assert (first.authorised, first.headers["range"]) == (True, "bytes=1-")
    assert (second.authorised, second.body) == (False, b"body")
    assert TOKEN not in repr([request.__dict__ for request in hub.log])
    assert hub.requests("resolve") == [first]
    assert hub.requests(method="GET|POST") == [second]
    hub.clear_log()
    assert hub.log == []


def test_an_error_inside_is_answered_and_kept(tmp_path: Path) -> None:
    with HubServer(tmp_path) as hub:
        hub.create("org/name")
        assert request(hub, "POST", "/api/datasets/org/name/commit/main", b"no JSON").status == 500
        assert "JSONDecodeError" in hub.errors[0]


def test_64_clients_at_once(hub: HubServer) -> None:
    hub.create("org/name")
    hub.put("org/name", {"f": b"content"})
    replies: list[bytes] = []
    at_once(64, lambda _: replies.append(request(hub, "GET", "/datasets/org/name/resolve/main/f").body))
    assert replies == [b"content"] * 64


def test_of_32_commits_on_one_parent_one_succeeds(hub: HubServer) -> None:
    hub.create("org/name")
    parent = hub.head("org/name")
    statuses: list[int] = []

    def work(index: int) -> None:
        body = commit_body({f"{index}": b""}, parentCommit=parent)
        statuses.append(request(hub, "POST", "/api/datasets/org/name/commit/main", body).status)

    at_once(32, work)
    assert sorted(statuses) == [200] + [412] * 31
    assert len(hub.commits("org/name")) == 2


def test_without_a_parent_all_of_32_commits_succeed(hub: HubServer) -> None:
    hub.create("org/name")
    at_once(
        32, lambda index: request(hub, "POST", "/api/datasets/org/name/commit/main", commit_body({f"{index}": b""}))
    )
    assert len(hub.commits("org/name")) == 33
    assert len(hub.files("org/name")) == 33


def test_a_server_that_ignores_the_parent(hub: HubServer) -> None:
    hub.create("org/name")
    hub.ignore_parent_commit = True
    stale = hub.head("org/name")
    hub.put("org/name", {"f": b"mine"})
    body = commit_body({"f": b"theirs"}, parentCommit=stale)
    assert request(hub, "POST", "/api/datasets/org/name/commit/main", body).status == 200
    assert hub.read("org/name", "f") == b"theirs"


def test_a_stopped_server_refuses(hub: HubServer) -> None:
    hub.close()
    with pytest.raises(ConnectionRefusedError):
        request(hub, "GET", "/")
    hub.close()


def test_names_that_are_none(hub: HubServer) -> None:
    with pytest.raises(ValueError, match="not owner/name"):
        hub.create("../name")
    with pytest.raises(KeyError):
        hub.head("org/name")
    hub.create("org/name")
    with pytest.raises(KeyError):
        hub.read("org/name", "nothing")
    with pytest.raises(ValueError, match="cannot set main"):
        hub.force("org/name", "main", "no commit")


# Faults, as plain HTTP


def file_request(hub: HubServer, method: str = "GET") -> Reply:
    if hub.repository("org/name") is None:
        hub.create("org/name")
        hub.put("org/name", {"f": b"012345"})
    return request(hub, method, "/datasets/org/name/resolve/main/f")


def test_a_fault_happens_so_often_and_only_where_it_matches(hub: HubServer) -> None:
    hub.fault(Fault("resolve/main/f$", "GET", skip=1, times=2, status=503, headers={"Retry-After": "7"}))
    assert file_request(hub, "HEAD").status == 200
    replies = [file_request(hub) for _ in range(4)]
    assert [reply.status for reply in replies] == [200, 503, 503, 200]
    assert replies[1].headers["retry-after"] == "7"
    assert [request.status for request in hub.log] == [200, 200, 503, 503, 200]


def test_the_first_fault_that_matches_is_applied(hub: HubServer) -> None:
    hub.fault(Fault(times=1, status=500))
    hub.fault(Fault(status=503))
    assert [file_request(hub).status for _ in range(2)] == [500, 503]
    hub.clear_faults()
    assert file_request(hub).status == 200


def test_a_late_answer(hub: HubServer) -> None:
    hub.fault(Fault(delay=0.2))
    start = time.monotonic()
    assert file_request(hub).status == 200
    assert time.monotonic() - start >= 0.2


def test_a_body_that_is_cut(hub: HubServer) -> None:
    hub.fault(Fault(cut=2))
    with pytest.raises(http.client.IncompleteRead) as caught:
        file_request(hub)
    assert caught.value.partial == b"01"
    assert hub.log[-1].status == 200


def test_a_body_that_stalls(hub: HubServer) -> None:
    hub.fault(Fault(cut=2, hang=0.2))
    start = time.monotonic()
    with pytest.raises(http.client.IncompleteRead):
        file_request(hub)
    assert time.monotonic() - start >= 0.2


def test_a_body_without_its_length(hub: HubServer) -> None:
    hub.fault(Fault(without=("Content-Length",)))
    reply = file_request(hub)
    assert (reply.body, reply.headers["transfer-encoding"]) == (b"012345", "chunked")
    assert "content-length" not in reply.headers
    assert "content-length" not in file_request(hub, "HEAD").headers


def test_silence_until_the_server_stops(tmp_path: Path) -> None:
    with HubServer(tmp_path) as hub:
        hub.fault(Fault(hang=math.inf))
        ended: list[type[BaseException]] = []

        def wait(_: int) -> None:
            try:
                request(hub, "GET", "/")
            except http.client.RemoteDisconnected as error:
                ended.append(type(error))

        thread = threading.Thread(target=wait, args=(0,))
        thread.start()
        while not hub.log:
            time.sleep(0.01)
        assert hub.log[0].status == 0
        assert thread.is_alive()
        hub.close()
        thread.join()
        assert ended == [http.client.RemoteDisconnected]


# As a program


def test_as_a_program(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.hub_server",
        "--folder",
        str(tmp_path),
        "--token",
        TOKEN,
        "--create",
        "org/name",
    ]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    host = process.stdout.readline().removeprefix("export HF_ENDPOINT=http://").strip()
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {TOKEN}"}, 200)):
        connection = http.client.HTTPConnection(host)
        connection.request("GET", "/api/datasets/org/name", headers=headers)
        assert connection.getresponse().status == status
        connection.close()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert out.splitlines() == [
        "401 GET /api/datasets/org/name (without a token)",
        "200 GET /api/datasets/org/name (with a token)",
    ]
    assert (process.returncode, err) == (0, "")
