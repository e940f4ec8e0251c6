"""The calls of the Hub that huggingface_hub 0.34 to 2 makes for dataset repositories.

Every file is a regular one: there is no LFS and no Xet.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode

from .answer import Answer, Refusal, json_answer
from .hub import Account, Hub
from .objects import Node
from .repository import NO_COMMIT, Commit, Repository

__all__ = ["Call", "answer"]


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def parts(self) -> list[str]:
        """Of the path, split before it is unquoted: a revision may hold a slash."""
        return [unquote(part) for part in self.path.partition("?")[0].strip("/").split("/")]

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(self.path.partition("?")[2])

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def answer(hub: Hub, call: Call) -> Answer:
    """The answer of a Hub that works, refusals included."""
    try:
        return _answer(hub, call, _account(hub, call.headers.get("authorization")))
    except Refusal as refusal:
        return refusal.answer


def _account(hub: Hub, authorisation: str | None) -> Account | None:
    if not hub.tokens:
        return Account()  # an open server: everybody may do everything
    if authorisation is None:
        if hub.require_token:
            raise Refusal(401, "RepoNotFound", "Invalid username or password.")
        return None
    account = hub.tokens.get(authorisation.removeprefix("Bearer "))
    if account is None:
        raise Refusal(401, "", "Invalid credentials in Authorization header")
    return account


def _answer(hub: Hub, call: Call, account: Account | None) -> Answer:
    method = "GET" if call.method == "HEAD" else call.method

    def repository(owner: str, name: str, *, write: bool = False, content: bool = False) -> Repository:
        return _allowed(hub, account, f"{owner}/{name}", write=write, content=content)

    match [method, *call.parts]:
        case "GET", "datasets", owner, name, "resolve", revision, *path:
            return _resolve(repository(owner, name, content=True), revision, "/".join(path), call.headers.get("range"))
        case "GET", "api", "datasets", owner, name:
            return _information(repository(owner, name), f"{owner}/{name}", "main", call.query)
        case "GET", "api", "datasets", owner, name, "revision", revision:
            return _information(repository(owner, name), f"{owner}/{name}", revision, call.query)
        case "GET", "api", "datasets", owner, name, "tree", revision, *path:
            return _page(hub, call, _tree(repository(owner, name), revision, "/".join(path), call.query))
        case "GET", "api", "datasets", owner, name, "commits", revision:
            found = repository(owner, name)
            return _page(hub, call, [_history_row(commit) for commit in found.history(found.resolve(revision))])
        case "GET", "api", "datasets", owner, name, "refs":
            return _references(repository(owner, name).references())
        case "POST", "api", "datasets", owner, name, "paths-info", revision:
            return _paths_info(repository(owner, name), revision, parse_qs(call.body.decode()).get("paths", []))
        case "POST", "api", "datasets", owner, name, "preupload", revision:
            return _preupload(repository(owner, name, write=True), revision, call.json["files"])
        case "POST", "api", "datasets", owner, name, "commit", revision:
            author = account.name if account else ""
            found = repository(owner, name, write=True)
            return _commit(hub, found, f"datasets/{owner}/{name}", revision, author, call)
        case "POST", "api", "datasets", owner, name, "tag", revision:
            found = repository(owner, name, write=True)
            return _new_reference(found, f"refs/tags/{call.json['tag']}", revision)
        case "POST", "api", "datasets", owner, name, "branch", branch:
            found = repository(owner, name, write=True)
            return _new_reference(found, f"refs/heads/{branch}", call.json.get("startingPoint") or "main")
        case "POST", "api", "repos", "create":
            return _create(hub, account, call.json)
        case "POST", "api", "validate-yaml":
            return json_answer({"errors": [], "warnings": []})
        case "GET", "api", "whoami-v2":
            return _whoami(account)
        case _:
            raise Refusal(404, "RepoNotFound", f"No such call: {call.method} {call.path}")


def _allowed(hub: Hub, account: Account | None, name: str, *, write: bool, content: bool) -> Repository:
    found = hub.repository(name)
    status = 403 if account else 401
    if found is None or (found.private and not (account and account.granted)):
        raise Refusal(404 if account else 401, "RepoNotFound", "Repository not found")
    if write and not (account and account.write):
        raise Refusal(status, "" if account else "RepoNotFound", f"No right to write to {name}")
    if content and found.gated and not (account and account.granted):
        raise Refusal(status, "GatedRepo", f"Access to dataset {name} is restricted and you are not in the list")
    return found


def _create(hub: Hub, account: Account | None, wanted: Mapping[str, Any]) -> Answer:
    if not (account and account.write):
        raise Refusal(403 if account else 401, "", "No right to create a repository")
    if wanted.get("type") != "dataset":
        raise Refusal(400, "", "This server has datasets only")
    name = f"{wanted.get('organization') or account.name}/{wanted['name']}"
    about = {"url": f"{hub.endpoint}/datasets/{name}", "name": name}
    # 0.x tells the visibility as a flag, 1.x and 2.x as a word.
    private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
    if hub.create(name, private=private):
        return json_answer(about)
    return json_answer({"error": "You already created this dataset repo", **about}, 409)


def _whoami(account: Account | None) -> Answer:
    if account is None:
        raise Refusal(401, "", "Invalid username or password.")
    role = "write" if account.write else "read"
    return json_answer({"type": "user", "name": account.name, "orgs": [], "auth": {"accessToken": {"role": role}}})


def _information(found: Repository, name: str, revision: str, query: Mapping[str, list[str]]) -> Answer:
    commit = found.resolve(revision)
    date = _date(found.details(commit))
    files = [path for path, node in found.files(commit).items() if node.size is not None]
    about = {
        "sha": commit,
        "author": name.partition("/")[0],
        "private": found.private,
        "gated": "manual" if found.gated else False,
        "lastModified": date,
        "siblings": [{"rfilename": path} for path in files],
    }
    if wanted := query.get("expand"):
        about = {field: value for field, value in about.items() if field in wanted}
    return json_answer({"id": name, **about})


def _resolve(found: Repository, revision: str, path: str, wanted: str | None) -> Answer:
    commit = found.resolve(revision)
    headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
    node = found.files(commit).get(path)
    if node is None or node.size is None:
        raise Refusal(404, "EntryNotFound", "Entry not found", **headers)
    headers |= {"ETag": f'"{node.oid}"', "Content-Type": "application/octet-stream"}
    data = found.read(node.oid)
    span = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
    if span is None:
        return Answer(200, data, headers)
    first, last = int(span[1]), min(int(span[2] or node.size - 1), node.size - 1)
    if first > last:
        raise Refusal(416, "", "Range not satisfiable", **{"Content-Range": f"bytes */{node.size}"})
    return Answer(206, data[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{node.size}"})


def _tree(found: Repository, revision: str, path: str, query: Mapping[str, list[str]]) -> list[dict[str, object]]:
    files = found.files(found.resolve(revision))
    folder = path.rstrip("/") + "/" if path else ""
    if folder and path.rstrip("/") not in files:
        raise Refusal(404, "EntryNotFound", f"{path} does not exist on {revision}")
    recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
    below = [name for name in files if name.startswith(folder) and (recursive or "/" not in name[len(folder) :])]
    return [_row(name, files[name]) for name in below]


def _row(path: str, node: Node) -> dict[str, object]:
    return {
        "type": "directory" if node.size is None else "file",
        "oid": node.oid,
        "size": node.size or 0,
        "path": path,
    }


def _history_row(commit: Commit) -> dict[str, object]:
    title, _, message = commit.message.partition("\n")
    return {
        "id": commit.oid,
        "title": title,
        "message": message.strip(),
        "authors": [{"user": commit.author}],
        "date": _date(commit),
    }


def _page(hub: Hub, call: Call, rows: list[dict[str, object]]) -> Answer:
    start = int(call.query.get("cursor", ["0"])[0])
    end = start + hub.page_size
    if end >= len(rows):
        return json_answer(rows[start:end])
    following = urlencode({**call.query, "cursor": end}, doseq=True)
    link = f'<{hub.endpoint}{call.path.partition("?")[0]}?{following}>; rel="next"'
    return json_answer(rows[start:end], Link=link)


def _paths_info(found: Repository, revision: str, paths: Iterable[str]) -> Answer:
    files = found.files(found.resolve(revision))
    wanted = [path.rstrip("/") for path in paths]
    return json_answer([_row(path, files[path]) for path in wanted if path in files])


def _references(references: Mapping[str, str]) -> Answer:
    def under(prefix: str) -> list[dict[str, str]]:
        return [
            {"name": name.removeprefix(prefix), "ref": name, "targetCommit": commit}
            for name, commit in references.items()
            if name.startswith(prefix)
        ]

    return json_answer(
        {
            "branches": under("refs/heads/"),
            "converts": [],
            "tags": under("refs/tags/"),
            "pullRequests": under("refs/pr/"),
        }
    )


def _new_reference(found: Repository, name: str, revision: str) -> Answer:
    target = found.resolve(revision)
    with found.lock:
        if found.target(name):
            raise Refusal(409, "", f"Reference {name} exists already")
        if not found.move(name, target, NO_COMMIT):
            raise Refusal(400, "", f"Invalid reference: {name}")
    return json_answer({})


def _preupload(found: Repository, revision: str, files: Iterable[Mapping[str, Any]]) -> Answer:
    there = found.files(found.resolve(revision))
    rows = []
    for file in files:
        node = there.get(file["path"])
        known = {"oid": node.oid} if node and node.size is not None else {}
        rows.append({"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, **known})
    return json_answer({"files": rows})


def _commit(hub: Hub, found: Repository, name: str, revision: str, author: str, call: Call) -> Answer:
    header: Mapping[str, Any] = {}
    changes: dict[str, bytes | None] = {}
    for line in call.body.splitlines():
        item = json.loads(line)
        key, value = item["key"], item["value"]
        if key == "header":
            header = value
        elif key == "file":
            changes[value["path"]] = base64.b64decode(value["content"])
        elif key in ("deletedFile", "deletedFolder"):
            changes[value["path"]] = None
        else:
            raise Refusal(400, "", f"This server has no {key}")
    message = f"{header['summary']}\n\n{header.get('description') or ''}".rstrip()
    with found.lock:
        reference, head = found.reference(revision)
        stale = header.get("parentCommit") not in (None, head)
        if stale and not hub.ignore_parent_commit:
            raise Refusal(412, "", "A commit has happened since. Please refresh and try again.")
        about = {}
        if "create_pr" in call.query:
            number = 1 + sum(name.startswith("refs/pr/") for name in found.references())
            reference = f"refs/pr/{number}"
            about["pullRequestUrl"] = f"{hub.endpoint}/{name}/discussions/{number}"
        oid = found.commit(reference, head, changes, message, author)
    return json_answer({"success": True, "commitOid": oid, "commitUrl": f"{hub.endpoint}/{name}/commit/{oid}", **about})


def _date(commit: Commit) -> str:
    return datetime.fromtimestamp(commit.seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
