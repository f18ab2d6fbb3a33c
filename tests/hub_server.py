"""A Hugging Face hub for tests: a real HTTP server with repos, branches, commits, large files and tokens.

It speaks what `huggingface_hub` asks for when it makes a repo, commits to it and downloads from it, and misbehaves on
demand: `hub.broken[PATTERN] = what` applies to requests whose `METHOD path` the pattern is found in.
"""

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from rmdm.share.remote import PROXIES

UPLOADS = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
"""`huggingface_hub` uploads large files in a way that its own HTTP library would have otherwise."""
TOKENS = {"hf_alice": "alice", "hf_bob": "bob"}
NAME = r"(?P<name>[^/]+/[^/]+)"


@dataclass
class Repo:
    """Commits by their hash, each all the files it has, and the branches that point to them."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        """A new state of a branch."""
        facts = repr((len(self.commits), branch, sorted((name, oid(data)) for name, data in files.items())))
        sha = hashlib.sha1(facts.encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        self.messages.append(message)
        return sha

    def find(self, revision: str) -> str | None:
        """The commit that a branch or a hash means."""
        return self.branches.get(revision, revision if revision in self.commits else None)


@dataclass
class Hub:
    """The server as tests see it."""

    url: str
    repos: dict[str, Repo] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256, before a commit names them."""
    broken: dict[str, Any] = field(default_factory=dict)
    """A status; `cut` ends one answer half-way; `short` answers with half a file as if it were all."""
    asked: list[str] = field(default_factory=list)
    large: str = ".safetensors"
    """Files with this ending are large files."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        """What a branch holds."""
        repo = self.repos[name]
        return repo.commits[repo.branches[branch]]

    def change(self, name: str, **files: bytes | None) -> None:
        """Commit to main behind everybody's back; None deletes, and `__` is a slash, `_` a dot."""
        now = dict(self.files(name))
        for key, data in files.items():
            path = key.replace("__", "/").replace("_", ".")
            now.pop(path, None)
            if data is not None:
                now[path] = data
        self.repos[name].commit("main", now, "change")


def oid(data: bytes) -> str:
    """Git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub at `hub.url`; alice and bob have tokens."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def at_hub(monkeypatch: pytest.MonkeyPatch, cache: Path, token: str | None = "hf_alice") -> Iterator[Hub]:
    """A hub that this process takes for the Hugging Face hub, with an empty cache."""
    from huggingface_hub import constants

    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        log_in(monkeypatch, token)
        for name in PROXIES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # Large files of the real hub go to a storage with a protocol of its own, of which no server can be had here.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub


def log_in(monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    """Be somebody else, or nobody."""
    if token is None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
    else:
        monkeypatch.setenv("HF_TOKEN", token)


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Handler(http.server.BaseHTTPRequestHandler):
    """One request after another; the connection ends with each."""

    @property
    def hub(self) -> Hub:
        """The state."""
        return self.server.hub  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_PUT(self) -> None:
        self.answer()

    def answer(self) -> None:
        """Find who answers, and whether it is to go wrong."""
        path = unquote(urlsplit(self.path).path)
        asked = f"{self.command} {path}"
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        with self.hub.lock:
            self.hub.asked.append(asked)
            found = next((pattern for pattern in self.hub.broken if re.search(pattern, asked)), None)
            how = None if found is None else self.hub.broken[found]
            if how == "cut":
                del self.hub.broken[found]
            try:
                if isinstance(how, int):
                    raise Refused(how, "out of order")
                self.how = how
                self.route(path)
            except Refused as error:
                body = json.dumps({"error": error.message}).encode()
                headers = {"X-Error-Message": error.message, **({"X-Error-Code": error.code} if error.code else {})}
                self.reply(body, error.status, headers)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has left

    def route(self, path: str) -> None:
        """The functions, by method and path."""
        routes = [
            ("POST", r"/api/repos/create", self.create),
            ("POST", r"/api/validate-yaml", self.validate),
            ("POST", rf"/api/models/{NAME}/branch/(?P<revision>.+)", self.branch),
            ("POST", rf"/api/models/{NAME}/preupload/(?P<revision>.+)", self.preupload),
            ("POST", rf"/api/models/{NAME}/commit/(?P<revision>.+)", self.commit),
            ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", self.batch),
            ("PUT", r"/lfs/(?P<sha>[0-9a-f]{64})", self.upload),
            ("GET", rf"/api/models/{NAME}/revision/(?P<revision>.+)", self.info),
            ("GET", rf"/api/models/{NAME}/tree/(?P<revision>.+)", self.tree),
            ("GET", rf"/api/models/{NAME}", self.info),
            ("GET|HEAD", rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", self.resolve),
        ]
        for methods, pattern, answer in routes:
            found = re.fullmatch(pattern, path)
            if found and self.command in methods.split("|"):
                answer(**found.groupdict())
                return
        raise Refused(404, f"no {path} here")

    @property
    def user(self) -> str | None:
        """Who asks; a token that nobody has is refused."""
        header = self.headers.get("Authorization")
        if header is None:
            return None
        user = TOKENS.get(header.removeprefix("Bearer "))
        if user is None:
            raise Refused(401, "Invalid credentials in Authorization header")
        return user

    def writer(self, owner: str) -> None:
        """Refuse those who may not write there."""
        if self.user is None:
            raise Refused(401, "Invalid username or password.")
        if self.user != owner:
            raise Refused(403, f"You don't have the rights to write in {owner}")

    def repo(self, name: str) -> Repo:
        """A repo that the asking user may see."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self.user != name.split("/")[0]):
            raise Refused(404 if self.user else 401, "Repository not found", "RepoNotFound")
        return repo

    def state(self, name: str, revision: str | None) -> tuple[str, dict[str, bytes]]:
        """Commit and files of a revision."""
        repo = self.repo(name)
        sha = repo.find(revision or "main")
        if sha is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha, repo.commits[sha]

    def create(self) -> None:
        asked = json.loads(self.body)
        owner, name = asked["organization"] or self.user, f"{asked['organization'] or self.user}/{asked['name']}"
        self.writer(owner)
        if name in self.hub.repos:
            self.send({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, 409)
            return
        repo = self.hub.repos[name] = Repo(asked.get("visibility") == "private" or asked.get("private") is True)
        repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self.send({"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def validate(self) -> None:
        """The front matter must be YAML, with a licence that the hub knows."""
        text = json.loads(self.body)["content"]
        found = re.match(r"---\n(.*?)---\n", text, flags=re.DOTALL)
        facts = yaml.safe_load(found[1]) if found else {}
        wrong = [] if isinstance(facts.get("license"), str) else [{"message": '"license" must be a string'}]
        self.send({"errors": wrong, "warnings": []}, 400 if wrong else 200)

    def branch(self, name: str, revision: str) -> None:
        self.writer(name.split("/")[0])
        repo = self.repo(name)
        if revision in repo.branches:
            raise Refused(409, "Reference already exists")
        repo.branches[revision] = repo.branches["main"]
        self.send({})

    def preupload(self, name: str, revision: str) -> None:
        self.writer(name.split("/")[0])
        _, files = self.state(name, revision)
        self.send({
            "files": [
                {
                    "path": file["path"], "shouldIgnore": False,
                    "uploadMode": "lfs" if file["path"].endswith(self.hub.large) else "regular",
                    "oid": oid(files[file["path"]]) if file["path"] in files else None,
                }
                for file in json.loads(self.body)["files"]
            ]
        })  # fmt: skip

    def batch(self, name: str) -> None:
        self.writer(name.split("/")[0])
        objects = []
        for one in json.loads(self.body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}", "header": {}}}
            new = {} if one["oid"] in self.hub.uploads else {"actions": upload}
            objects.append({"oid": one["oid"], "size": one["size"], **new})
        self.send({"transfer": "basic", "objects": objects})

    def upload(self, sha: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != sha:
            raise Refused(400, "the bytes are not those of the hash")
        self.hub.uploads[sha] = self.body
        self.send({})

    def commit(self, name: str, revision: str) -> None:
        self.writer(name.split("/")[0])
        _, before = self.state(name, revision)
        files, summary = dict(before), ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                summary = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise Refused(400, f"unknown operation {entry['key']}")
        sha = self.repo(name).commit(revision, files, summary)
        self.send({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}"})

    def info(self, name: str, revision: str | None = None) -> None:
        sha, files = self.state(name, revision)
        about = {"id": name, "modelId": name, "sha": sha, "private": self.repo(name).private, "tags": []}
        self.send({**about, "siblings": [{"rfilename": path} for path in sorted(files)]})

    def tree(self, name: str, revision: str) -> None:
        _, files = self.state(name, revision)
        entries = []
        for path, data in sorted(files.items()):
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": oid(data)}
            if path.endswith(self.hub.large):
                sha = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": sha, "size": len(data), "pointerSize": 134}
            entries.append(entry)
        self.reply(json.dumps(entries).encode())

    def resolve(self, name: str, revision: str, file: str) -> None:
        sha, files = self.state(name, revision)
        if file not in files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        data = files[file]
        tag = hashlib.sha256(data).hexdigest() if file.endswith(self.hub.large) else oid(data)
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            self.reply(data, 200, headers)
            return
        first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        status = 200
        if first:
            start = int(first[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        if self.how == "short":
            data = data[: len(data) // 2]
        self.reply(data, status, headers, data[: len(data) // 2] if self.how == "cut" else None)

    def send(self, value: dict[str, Any], status: int = 200) -> None:
        self.reply(json.dumps(value).encode(), status)

    def reply(
        self, data: bytes, status: int = 200, headers: dict[str, str] | None = None, sent: bytes | None = None
    ) -> None:
        """`sent`: what is sent of what is promised."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if sent is None else sent)

    def log_message(self, format: str, *args: Any) -> None:
        """Not a word."""
