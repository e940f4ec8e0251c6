"""The loopback Hub as clients see it: the huggingface_hub that is installed here, and each supported major."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
from hub_client import ClientError, HubClient
from hub_server import Account, Fault, HubServer

_NUMBERS = count()  # of repositories: a module's tests share a server


class Served(NamedTuple):
    hub: HubServer
    client: HubClient
    folder: Path
    repository: str

    def download(self, filename: str = "f", revision: str = "main", **arguments: object) -> bytes:
        """Into a new cache, so that nothing is there before."""
        cache = self.folder / str(len(list(self.folder.iterdir())))
        path = self.client.hf_hub_download(
            repo_id=self.repository,
            repo_type="dataset",
            filename=filename,
            revision=revision,
            cache_dir=cache,
            **arguments,
        )
        return Path(path).read_bytes()

    def commit(self, files: dict[str, str | None], **arguments: object) -> str:
        answer = self.client.create_commit(
            repo_id=self.repository, repo_type="dataset", files=files, commit_message="Title", **arguments
        )
        oid: str = answer["oid"]
        return oid


@pytest.fixture(
    scope="module",
    params=["installed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("0.36.2", "1.33.0", "2.4.0"))],
)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HubServer, HubClient]]:
    folder = tmp_path_factory.mktemp("hub")
    python = sys.executable
    if request.param != "installed":
        python = request.getfixturevalue("client_python")(request.param)
    with HubServer(folder / "hub") as hub:
        client = HubClient(python, hub.endpoint, folder / "home")
        yield hub, client
        client.close()


@pytest.fixture
def served(running: tuple[HubServer, HubClient], tmp_path: Path) -> Iterator[Served]:
    hub, client = running
    name = f"org/name{next(_NUMBERS)}"
    hub.create(name)
    hub.put(name, {"f": b"012345"})
    hub.clear_log()
    yield Served(hub, client, tmp_path, name)
    assert hub.errors == []
    hub.clear_faults()
    hub.tokens.clear()
    hub.require_token = False
    hub.page_size = 1000


def refused(name: str, status: int | None = None) -> AbstractContextManager[object]:
    """The client raises an exception of this name, or whose name ends so, for an answer with this status."""
    return pytest.raises(ClientError, match=rf"^\w*{name} \({status}\)")


def counted(hub: HubServer) -> list[str]:
    """The requests since the last call of this, by method and kind of call."""
    kinds = "resolve|revision|preupload|commit|tree|validate-yaml|create"
    found = [f"{request.method} {(re.search(kinds, request.path) or ['info'])[0]}" for request in hub.log]
    hub.clear_log()
    return found


def test_a_commit_and_its_download_take_these_requests(served: Served) -> None:
    hub, client = served.hub, served.client
    parent = client.dataset_info(repo_id=served.repository, expand=["sha"])["sha"]
    assert (parent, counted(hub)) == (hub.head(served.repository), ["GET info"])

    commit = served.commit({"README.md": "# Card", "a/b.json": "{}", "f": None}, parent_commit=parent)
    assert counted(hub) == ["POST validate-yaml", "POST preupload", "POST commit"]
    assert hub.commits(served.repository)[:2] == [commit, parent]
    assert hub.files(served.repository).keys() == {".gitattributes", "README.md", "a/b.json"}

    assert served.download("a/b.json", commit) == b"{}"
    assert counted(hub) == ["HEAD resolve", "GET resolve"]


def test_a_warm_download(served: Served) -> None:
    commit = served.hub.head(served.repository)
    arguments = {
        "repo_id": served.repository,
        "repo_type": "dataset",
        "filename": "f",
        "cache_dir": served.folder / "c",
    }
    served.client.hf_hub_download(**arguments)
    counted(served.hub)
    served.client.hf_hub_download(**arguments)
    assert counted(served.hub) == ["HEAD resolve"]
    served.client.hf_hub_download(**arguments, revision=commit)
    assert counted(served.hub) == []


def test_a_commit_that_changes_nothing_is_the_head(served: Served) -> None:
    head = served.hub.head(served.repository)
    assert served.commit({"f": "012345"}, parent_commit="0" * 40) == head
    assert counted(served.hub) == ["POST preupload", "GET revision"]


def test_a_stale_parent(served: Served) -> None:
    stale = served.hub.head(served.repository)
    served.hub.put(served.repository, {"f": b"theirs"})
    with refused("HfHubHTTPError", 412):
        served.commit({"f": "mine"}, parent_commit=stale)
    assert served.hub.read(served.repository, "f") == b"theirs"


def test_a_pull_request(served: Served) -> None:
    head = served.hub.head(served.repository)
    for number in (1, 2):
        commit = served.commit({"f": f"proposed {number}"}, create_pr=True, parent_commit=head)
        assert served.download(revision=f"refs/pr/{number}") == f"proposed {number}".encode()
        assert served.hub.head(served.repository, f"refs/pr/{number}") == commit
    again = served.commit({"f": "amended"}, revision="refs/pr/1")
    assert served.hub.commits(served.repository, "refs/pr/1")[2] == served.hub.head(served.repository) == head
    assert served.download(revision=again) == b"amended"


def test_branches_and_tags(served: Served) -> None:
    where = {"repo_id": served.repository, "repo_type": "dataset"}
    tagged = served.hub.head(served.repository)
    served.client.create_tag(**where, tag="v1")
    served.client.create_tag(**where, tag="v1", exist_ok=True)
    with refused("HfHubHTTPError", 409):
        served.client.create_tag(**where, tag="v1")
    served.client.create_branch(**where, branch="dev/next", revision="v1")
    commit = served.commit({"f": "on a branch"}, revision="dev/next")

    assert served.download(revision="v1") == b"012345"
    assert served.download(revision="dev/next") == b"on a branch"
    found = served.client.list_repo_refs(**where, include_pull_requests=True)
    assert {ref["name"]: ref["target_commit"] for ref in found["branches"]} == {"main": tagged, "dev/next": commit}
    assert {ref["name"]: ref["target_commit"] for ref in found["tags"]} == {"v1": tagged}
    assert found["pull_requests"] == []


def test_listings_come_in_pages(served: Served) -> None:
    where = {"repo_id": served.repository, "repo_type": "dataset"}
    served.hub.put(served.repository, {"a/b/1": b"1", "a/b/2": b"22", "a/3": b"333"})
    served.hub.page_size = 2
    tree = served.client.list_repo_tree(**where, recursive=True)
    assert counted(served.hub) == ["GET tree"] * 4
    assert {row["path"]: row.get("size") for row in tree} == {
        ".gitattributes": 46,
        "a": None,
        "a/3": 3,
        "a/b": None,
        "a/b/1": 1,
        "a/b/2": 2,
        "f": 6,
    }
    below = served.client.list_repo_tree(**where, path_in_repo="a")
    assert [row["path"] for row in below] == ["a/3", "a/b"]
    history = served.client.list_repo_commits(**where)
    assert [row["commit_id"] for row in history] == served.hub.commits(served.repository)
    assert history[-1]["title"] == "initial commit"


def test_what_is_known_of_paths(served: Served) -> None:
    found = served.client.get_paths_info(repo_id=served.repository, repo_type="dataset", paths=["f", "nothing"])
    assert [(row["path"], row["size"]) for row in found] == [("f", 6)]
    assert len(found[0]["blob_id"]) == 40


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        pytest.param({"filename": "nothing"}, "EntryNotFoundError", id="file"),
        pytest.param({"revision": "nothing"}, "RevisionNotFoundError", id="revision"),
    ],
)
def test_what_is_not_there(served: Served, arguments: dict[str, str], name: str) -> None:
    with refused(name, 404):
        served.download(**arguments)


def test_deleting_what_is_not_there(served: Served) -> None:
    with refused("EntryNotFoundError", 404):
        served.commit({"nothing": None})


def test_making_a_repository(served: Served) -> None:
    arguments = {"repo_id": f"{served.repository}-made", "repo_type": "dataset", "private": True}
    for _ in range(2):
        url = served.client.create_repo(**arguments, exist_ok=True)
        assert url == f"{served.hub.endpoint}/datasets/{served.repository}-made"
    with refused("HfHubHTTPError", 409):
        served.client.create_repo(**arguments)
    assert served.client.dataset_info(repo_id=arguments["repo_id"])["private"] is True


@pytest.mark.parametrize(
    ("account", "name", "status"),
    [
        pytest.param(None, "RepositoryNotFoundError", 401, id="no token"),
        pytest.param(Account(granted=False), "RepositoryNotFoundError", 404, id="somebody else"),
        pytest.param(Account(write=False), None, None, id="may read"),
    ],
)
def test_a_private_repository(served: Served, account: Account | None, name: str | None, status: int | None) -> None:
    private = f"{served.repository}-private"
    served.hub.create(private, private=True)
    served.hub.tokens |= {"hf_used": account or Account(), "hf_other": Account()}
    token = "hf_used" if account else False
    if name is None:
        assert served.client.dataset_info(repo_id=private, token=token)["sha"] == served.hub.head(private)
    else:
        with refused(name, status):
            served.client.dataset_info(repo_id=private, token=token)
    assert served.hub.log[-1].authorised is bool(account)


def test_a_gated_repository(served: Served) -> None:
    gated = served._replace(repository=f"{served.repository}-gated")
    gated.hub.create(gated.repository, gated=True)
    gated.hub.put(gated.repository, {"f": b"content"})
    gated.hub.tokens |= {"hf_granted": Account(), "hf_other": Account(granted=False)}
    assert gated.client.dataset_info(repo_id=gated.repository, token=False)["gated"] == "manual"
    for token, status in ((False, 401), ("hf_other", 403)):
        with refused("GatedRepoError", status):
            gated.download(token=token)
    assert gated.download(token="hf_granted") == b"content"


def test_who_may_write(served: Served) -> None:
    served.hub.tokens |= {"hf_writes": Account("ada"), "hf_reads": Account(write=False)}
    with refused("RepositoryNotFoundError", 401):
        served.commit({"f": "1"}, token=False)
    with refused("HfHubHTTPError", 403):
        served.commit({"f": "1"}, token="hf_reads")
    with refused("HfHubHTTPError", 401):
        served.commit({"f": "1"}, token="hf_unknown")
    served.commit({"f": "1"}, token="hf_writes")
    newest = served.client.list_repo_commits(repo_id=served.repository, repo_type="dataset", token=False)[0]
    assert newest["authors"] == ["ada"]
    assert served.client.whoami(token="hf_writes")["name"] == "ada"


def test_a_token_for_everything(served: Served) -> None:
    served.hub.tokens["hf_known"] = Account()
    served.hub.require_token = True
    with refused("RepositoryNotFoundError", 401):
        served.download(token=False)
    assert served.download(token="hf_known") == b"012345"


# Faults

PORTAL = Fault(status=200, body=b"<html>Log in</html>", headers={"Content-Type": "text/html"})


@pytest.mark.parametrize(
    ("fault", "name", "status"),
    [
        pytest.param(Fault(status=401, code="RepoNotFound"), "RepositoryNotFoundError", 401, id="401"),
        pytest.param(Fault(status=401), "HfHubHTTPError", 401, id="bare 401"),
        pytest.param(Fault(status=403, code="GatedRepo"), "GatedRepoError", 403, id="gated"),
        pytest.param(Fault(status=404, code="RevisionNotFound"), "RevisionNotFoundError", 404, id="no revision"),
        pytest.param(Fault(status=404, code="EntryNotFound"), "EntryNotFoundError", 404, id="no file"),
        pytest.param(Fault(status=429, headers={"Retry-After": "1"}), "HfHubHTTPError", 429, id="429"),
        pytest.param(Fault(status=500, message="Oops → 1\n2"), "HfHubHTTPError", 500, id="500"),
        pytest.param(Fault(status=503), "HfHubHTTPError", 503, id="503"),
        pytest.param(PORTAL, "JSONDecodeError", None, id="captive portal"),
        pytest.param(Fault(hang=0.01), "(ConnectionError|RemoteProtocolError)", None, id="dropped"),
        pytest.param(Fault(hang=30), "ReadTimeout", None, id="hanging"),
    ],
)
def test_a_fault_when_asking_for_the_commit(served: Served, fault: Fault, name: str, status: int | None) -> None:
    served.hub.fault(fault)
    with refused(name, status):
        served.client.dataset_info(repo_id=served.repository, timeout=0.5)
    assert len(served.hub.log) == 1


@pytest.mark.parametrize(
    ("fault", "name", "status"),
    [
        pytest.param(Fault(status=401, code="RepoNotFound"), "RepositoryNotFoundError", 401, id="401"),
        pytest.param(Fault(status=403, code="GatedRepo"), "GatedRepoError", 403, id="gated"),
        pytest.param(Fault(status=404, code="EntryNotFound"), "EntryNotFoundError", 404, id="no file"),
        pytest.param(PORTAL, "LocalEntryNotFoundError", None, id="captive portal"),
        pytest.param(Fault(without=("X-Repo-Commit",)), "LocalEntryNotFoundError", None, id="no X-Repo-Commit"),
        pytest.param(Fault(without=("ETag",)), "LocalEntryNotFoundError", None, id="no ETag"),
        pytest.param(Fault(method="GET", body=b"short"), "OSError", None, id="short"),
    ],
)
def test_a_fault_when_downloading(served: Served, fault: Fault, name: str, status: int | None) -> None:
    served.hub.fault(fault)
    with refused(name, status):
        served.download()


@pytest.mark.parametrize(
    ("fault", "data"),
    [
        pytest.param(Fault(body=b"poison"), b"poison", id="poison"),
        pytest.param(Fault(method="GET", without=("Content-Length",)), b"012345", id="no Content-Length"),
    ],
)
def test_a_fault_that_the_client_does_not_see(served: Served, fault: Fault, data: bytes) -> None:
    served.hub.fault(fault)
    assert served.download() == data


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_redirect_to_another_origin_without_the_token(served: Served, method: str, tmp_path: Path) -> None:
    with HubServer(tmp_path / "other", host="127.0.0.2") as other:
        other.create(served.repository)
        other.put(served.repository, {"f": b"others"})
        served.hub.fault(Fault(method=method, redirect=other.endpoint))
        assert served.download(token="hf_secret") == b"others"
        assert [request.authorised for request in other.log] == [False]
    assert all(request.authorised for request in served.hub.log)


def test_a_commit_that_seems_to_have_failed(served: Served) -> None:
    served.hub.fault(Fault("/commit/", status=500, performed=True))
    with refused("HfHubHTTPError", 500):
        served.commit({"f": "new"})
    assert served.hub.read(served.repository, "f") == b"new"


def test_a_cut_download_is_continued(served: Served) -> None:
    data = bytes(range(256)) * (12 << 12)  # of 12 MiB; clients keep what they have in steps of 10
    served.hub.put(served.repository, {"f": data})
    served.hub.fault(Fault(method="GET", cut=11 << 20, times=1))
    arguments = {
        "repo_id": served.repository,
        "repo_type": "dataset",
        "filename": "f",
        "cache_dir": served.folder / "c",
    }
    with suppress(ClientError):  # 0.x gives up, and continues when called again; the others continue at once
        served.client.hf_hub_download(**arguments)
    path = served.client.hf_hub_download(**arguments)
    assert Path(path).read_bytes() == data
    continued = served.hub.requests(method="GET")[-1]
    assert (continued.status, continued.headers["range"]) == (206, f"bytes={10 << 20}-")
