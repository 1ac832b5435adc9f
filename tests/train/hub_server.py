"""A Hub on this machine: the few endpoints that publishing and downloading use, over huggingface_hub's own client."""

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from tests.http_server import Connection, LocalServer

TOKEN = "hf_" + "a1" * 17
READER = "hf_" + "b2" * 17  # may only read
ROLES = {TOKEN: "write", READER: "read"}
START = {".gitattributes": b""}


@dataclass
class Repo:
    """One repository: every commit's files, the files that are large, and the tags."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    head: str = ""
    large: set[str] = field(default_factory=set)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, bytes]:
        """The branch's files."""
        return self.commits[self.head]

    def commit(self, files: dict[str, bytes]) -> str:
        """Record a new state of all files and return its hash."""
        state = repr((len(self.commits), sorted(files.items()))).encode()
        self.head = hashlib.sha1(state).hexdigest()
        self.commits[self.head] = files
        return self.head


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose "METHOD path" the pattern finds.

    `how` is "cut", the connection closed amid the body; "mute", closed after acting, before the answer; or a status.
    """

    where: str
    how: str | int
    times: int = 1000


def blob(data: bytes) -> str:
    """Return git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub(LocalServer):
    """The server and all that it keeps."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.received: list[str] = []  # hashes of the large files that came whole
        self.faults: list[Fault] = []
        self.watch: Callable[[str], None] = lambda _: None  # is told of each request before it is answered
        self.damage: str | None = None  # a file that downloads with one byte changed

    def fault(self, request: str) -> str | int | None:
        """Return what goes wrong with a request."""
        for each in self.faults:
            if each.times and re.search(each.where, request):
                each.times -= 1
                return each.how
        return None


class Handler(Connection):
    """Answers by the path."""

    server: Hub
    mute = False

    def route(self) -> None:
        """Read the body, then let the endpoint answer."""
        method = self.command
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{method} {path}")
        self.server.watch(f"{method} {path}")
        fault = self.server.fault(f"{method} {path}")
        if fault == "cut":
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length // 2 or int(method in ("POST", "PUT")))
            self.close()
            return
        body, self.mute = self.body(), fault == "mute"
        parts = path.strip("/").split("/")
        if isinstance(fault, int):
            self.refuse(fault, "a fault of the test's")
        elif method == "PUT":
            self.upload(parts[-1], body)
        elif path.startswith("/api/"):
            self.api(parts[1:], body)
        elif path.endswith("/verify"):
            self.answer({})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.batch(parts[0] + "/" + parts[1].removesuffix(".git"), json.loads(body))
        elif len(parts) > 4 and parts[2] == "resolve":
            self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.refuse(404, "no such endpoint")

    def api(self, parts: list[str], body: bytes) -> None:
        """Answer what is asked of the API."""
        if parts == ["validate-yaml"]:
            self.answer({"warnings": [], "errors": []})
        elif parts == ["repos", "create"]:
            self.create(json.loads(body))
        elif parts == ["repos", "delete"]:
            self.delete(json.loads(body))
        elif parts[0] == "models":
            self.models("/".join(parts[1:3]), parts[3:], body)
        else:
            self.refuse(404, "no such endpoint")

    def body(self) -> bytes:
        """Read the request's body, which a streaming client sends in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def close(self) -> None:
        self.close_connection = True
        self.connection.shutdown(2)

    def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send JSON, or bytes as they are."""
        if self.mute:
            return self.close()
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        return None

    def refuse(self, status: int, message: str, code: str | None = None) -> None:
        self.answer({"error": message}, status, {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}))

    @property
    def token(self) -> str:
        return str(self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def allowed(self, name: str, writing: bool = False) -> bool:
        """Whether the token may read, or write, in a namespace: all of them are of the user called me."""
        role = ROLES.get(self.token)
        return role == "write" and name.startswith("me/") if writing else role is not None

    def create(self, wish: dict[str, Any]) -> None:
        name = f"{wish['organization']}/{wish['name']}"
        if not self.allowed(name, writing=True):
            return self.refuse(403, "You don't have the rights to create a model under this namespace")
        if name in self.server.repos:
            return self.answer({"error": "You already created it", "url": f"{self.server.url}/{name}"}, 409)
        private = wish.get("private") or wish.get("visibility") == "private"  # older clients, newer ones
        repo = self.server.repos[name] = Repo(private=bool(private))
        repo.commit(dict(START))
        return self.answer({"url": f"{self.server.url}/{name}"})

    def delete(self, wish: dict[str, Any]) -> None:
        name = f"{wish['organization']}/{wish['name']}"
        if not self.allowed(name, writing=True):
            return self.refuse(403, "Forbidden")
        if self.server.repos.pop(name, None) is None:
            return self.refuse(404, "Repository not found", "RepoNotFound")
        return self.answer({})

    def batch(self, name: str, wish: dict[str, Any]) -> None:
        def actions(item: dict[str, Any]) -> dict[str, Any]:
            if item["oid"] in self.server.blobs:
                return item
            upload = {"href": f"{self.server.url}/lfs/{item['oid']}"}
            return {**item, "actions": {"upload": upload, "verify": {"href": f"{self.server.url}/lfs/verify"}}}

        if not self.allowed(name, writing=True):
            return self.refuse(403, "Forbidden")
        return self.answer({"transfer": "basic", "objects": [actions(item) for item in wish["objects"]]})

    def upload(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.refuse(400, "wrong hash")
        self.server.blobs[oid] = body
        self.server.received.append(oid)
        return self.answer({})

    def models(self, name: str, rest: list[str], body: bytes) -> None:
        """The repository's API: its facts, its tree, the way each file is uploaded, commits, tags."""
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and not self.allowed(name)):
            return self.refuse(401 if repo else 404, "Repository not found", "RepoNotFound")
        if rest[:1] == ["preupload"]:
            return self.answer({"files": [self.mode(repo, file) for file in json.loads(body)["files"]]})
        if rest[:1] == ["commit"]:
            return self.commit(name, repo, body)
        if rest[:1] == ["refs"]:
            tags = [{"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": at} for tag, at in repo.tags.items()]
            return self.answer({"branches": [], "converts": [], "tags": tags})
        revision = repo.head if not rest or rest[1] == "main" else repo.tags.get(rest[1], rest[1])
        return self.revision(name, repo, revision, rest[:1], body)

    def revision(self, name: str, repo: Repo, revision: str, asked: list[str], body: bytes) -> None:
        """A commit: its tag, its tree, or its facts."""
        if revision not in repo.commits:
            return self.refuse(404, "Revision not found", "RevisionNotFound")
        if asked == ["tag"]:
            tag = json.loads(body)["tag"]
            if tag in repo.tags:
                return self.refuse(409, "Tag exists")
            repo.tags[tag] = revision
            return self.answer({})
        if asked == ["tree"]:
            return self.answer([self.entry(repo, path, data) for path, data in repo.commits[revision].items()])
        files = [{"rfilename": path} for path in repo.commits[revision]]
        return self.answer({"id": name, "sha": revision, "private": repo.private, "tags": [], "siblings": files})

    def mode(self, repo: Repo, file: dict[str, Any]) -> dict[str, Any]:
        path = file["path"]
        large, there = path.endswith((".safetensors", ".png")), repo.files.get(path)
        oid = None if there is None else hashlib.sha256(there).hexdigest() if large else blob(there)
        return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def commit(self, name: str, repo: Repo, body: bytes) -> None:
        if not self.allowed(name, writing=True):
            return self.refuse(403, "Forbidden")
        files = dict(repo.files)
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header" and value.get("parentCommit", repo.head) != repo.head:
                return self.refuse(412, "A commit has happened since. Please refresh and try again.")
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
                repo.large.add(value["path"])
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        commit = repo.commit(files)
        url = f"{self.server.url}/{name}/commit/{commit}"
        return self.answer({"success": True, "commitOid": commit, "commitUrl": url})

    def entry(self, repo: Repo, path: str, data: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": path, "size": len(data), "oid": blob(data)}
        large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return {**entry, "lfs": large} if path in repo.large else entry

    def resolve(self, name: str, revision: str, path: str) -> None:
        """A file's bytes."""
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and not self.allowed(name)):
            return self.refuse(401, "Repository not found", "RepoNotFound")
        commit = repo.head if revision == "main" else revision
        data = repo.commits[commit][path]
        etag = hashlib.sha256(data).hexdigest() if path in repo.large else blob(data)
        if path == self.server.damage:
            data = data[:-1] + bytes([data[-1] ^ 1])
        return self.answer(data, headers={"ETag": f'"{etag}"', "X-Repo-Commit": commit})


for method in ("GET", "HEAD", "POST", "PUT", "DELETE"):
    setattr(Handler, f"do_{method}", Handler.route)


def become(hub: Hub, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make huggingface_hub, which read its settings on import, take this for the Hub and `folder` for its cache."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the client waits between its attempts
