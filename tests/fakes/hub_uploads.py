"""What a strict Hugging Face hub does with uploads: repositories in memory, by the requests of the hub's client.

Refused, as huggingface.co does: unknown tokens and accounts, weights that are not sent as large files, large files of
another size or checksum than announced, commits on an older head, deletions of what is not there; names of repositories
and branches that its client's own rules forbid, paths that leave the repository, more files at a time than its client
asks about, regular files above 5 MB, more than 1 GB of them or 25,000 large files in a commit, a card without metadata,
and requests without what its client always sends. Files that the branch's .gitignore names are to be left out, which
the client does in silence.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

import yaml
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from vlmpipe.rehearsal.http_server import HttpServer

LARGE = (".safetensors",)
MAX_FILES = 256  # of one question how to send them (huggingface_hub's _fetch_upload_modes)
SAMPLE_BYTES = 512
MAX_REGULAR_BYTES, MAX_PAYLOAD_BYTES, MAX_LARGE_FILES = 5_000_000, 1_000_000_000, 25_000  # create_commit's comments
FORBIDDEN = {"", ".", "..", ".git", ".cache"}  # parts of paths
OID = re.compile(r"[0-9a-f]{64}")


class Refused(Exception):
    """An HTTP status of an error, X-Error-Code, the message, and what the answer has beside it."""

    def __init__(self, status: int, code: str, message: str, **content: Any) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.content = status, code, message, content


@dataclass
class Branch:
    """`commits` are the titles, oldest first; `files` those of the newest commit."""

    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    commits: list[str] = field(default_factory=lambda: ["initial commit"])

    @property
    def head(self) -> str:
        return hashlib.sha1("\n".join(self.commits).encode()).hexdigest()


@dataclass
class Repository:
    private: bool
    branches: dict[str, Branch] = field(default_factory=lambda: {"main": Branch()})


@dataclass
class UploadHub:
    """`writers` are the accounts by token. `status`: answer everything with it. `meanwhile` is done before each
    commit."""

    writers: dict[str, str]
    endpoint: str = ""
    status: int = 0
    meanwhile: Callable[[Branch], object] = lambda branch: None
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # content by sha256
    requests: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, token: str, body: bytes) -> Any:
        if self.status:
            raise Refused(self.status, "", "out of order")
        parts = [unquote(part) for part in path.strip("/").split("/")]
        match (method, *parts):
            case ("PUT", "large", oid):  # an address that is signed: no token
                if hashlib.sha256(body).hexdigest() != oid:
                    raise Refused(400, "", "checksum")
                self.large[oid] = body
                return {}
            case ("POST", "api", "validate-yaml"):
                return _valid_card(json.loads(body))
            case ("POST", "api", "repos", "create"):
                return self._create(json.loads(body), self._account(token))
            case (_, "api", "models", account, name, *asked):
                return self._of_repository(method, f"{account}/{name}", asked, token, body)
            case ("POST", account, name, "info", "lfs", "objects", "batch"):
                self._writable(f"{account}/{name.removesuffix('.git')}", token)
                return {"objects": [self._object(one) for one in _batch(json.loads(body))]}
        raise Refused(404, "", f"no {method} {path}")

    def _account(self, token: str) -> str:
        if token not in self.writers:
            raise Refused(401, "", "Invalid username or password.")
        return self.writers[token]

    def _create(self, asked: dict[str, Any], account: str) -> dict[str, str]:
        if set(asked) - {"name", "organization", "type", "visibility"} or not asked.get("name"):
            raise Refused(400, "", f"fields {sorted(asked)}")
        if asked.get("type", "model") != "model" or asked["visibility"] not in ("public", "private"):
            raise Refused(400, "", "a model is public or private; only a Space can be protected")
        try:
            validate_repo_id(f"{asked['organization']}/{asked['name']}")
        except HFValidationError as error:
            raise Refused(400, "", str(error)) from None
        if asked["organization"] != account:
            raise Refused(403, "", f"no rights to create a model under the namespace {asked['organization']}")
        name = f"{account}/{asked['name']}"
        if name in self.repositories:
            raise Refused(409, "", "You already created this model repo", url=f"{self.endpoint}/{name}")
        self.repositories[name] = Repository(asked["visibility"] == "private")
        return {"url": f"{self.endpoint}/{name}"}

    def _writable(self, name: str, token: str) -> Repository:
        account = self._account(token)
        if name not in self.repositories:
            raise Refused(404, "RepoNotFound", "Repository not found")
        if name.partition("/")[0] != account:
            raise Refused(403, "", "no write access")
        return self.repositories[name]

    def _of_repository(self, method: str, name: str, asked: list[str], token: str, body: bytes) -> Any:
        repository = self._writable(name, token)
        match (method, *asked):
            case ("POST", "branch", revision):
                if revision.startswith("refs/") or ".." in revision or revision.endswith("/"):
                    raise Refused(400, "", "Invalid reference for a branch")
                if revision in repository.branches:
                    raise Refused(409, "", "Reference already exists")
                start = _branch(repository, json.loads(body or b"{}").get("startingPoint", "main"))
                repository.branches[revision] = Branch(dict(start.files), list(start.commits))
                return {}
            case ("GET", "revision", revision):
                branch = _revision(repository, revision)
                there = [{"rfilename": file} for file in branch.files]
                return {"id": name, "sha": branch.head, "private": repository.private, "siblings": there}
            case ("POST", "preupload", revision):
                branch = _branch(repository, revision)
                files = json.loads(body)["files"]
                if len(files) > MAX_FILES:
                    raise Refused(400, "", f"{len(files)} files are more than {MAX_FILES}")
                return {"files": [_mode(branch, one) for one in files]}
            case ("POST", "commit", revision):
                branch = _branch(repository, revision)
                self.meanwhile(branch)
                self._commit(branch, [json.loads(line) for line in body.splitlines()])
                return {"commitUrl": f"{self.endpoint}/{name}/commit/{branch.head}", "commitOid": branch.head}
        raise Refused(404, "", f"no {method} {asked}")

    def _object(self, one: dict[str, Any]) -> dict[str, Any]:
        if one["oid"] in self.large:
            return one
        return {**one, "actions": {"upload": {"href": f"{self.endpoint}/large/{one['oid']}"}}}

    def _commit(self, branch: Branch, lines: list[dict[str, Any]]) -> None:
        header, *changes = lines or [{}]
        if header.get("key") != "header" or not header["value"].get("summary"):
            raise Refused(400, "", "a commit begins with its header, which has a summary")
        if header["value"].get("parentCommit", branch.head) != branch.head:
            raise Refused(412, "", "A commit has happened since. Please refresh and try again.")
        if not changes:
            raise Refused(400, "", "empty commit")
        sizes = [len(change["value"]["content"]) for change in changes if change["key"] == "file"]
        if sum(sizes) > MAX_PAYLOAD_BYTES or len(changes) - len(sizes) > MAX_LARGE_FILES:
            raise Refused(413, "", "a commit has at most 25k large files and 1 GB of regular ones")
        paths = [change["value"]["path"] for change in changes]
        for path in paths:
            _require_path(path)
        if len(set(paths)) < len(paths):
            raise Refused(400, "", "a path twice in one commit")
        files = dict(branch.files)
        for change in changes:
            value = change["value"]
            if change["key"] == "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise Refused(404, "EntryNotFound", "A file with this name doesn't exist")
            elif change["key"] == "lfsFile":
                content = self.large.get(value["oid"])
                if value.get("algo") != "sha256":
                    raise Refused(400, "", "algo: sha256")
                if content is None or len(content) != value["size"]:
                    raise Refused(400, "", f"{value['path']} was not uploaded")
                files[value["path"]] = content
            else:
                if value["path"].endswith(LARGE) or change["key"] != "file":
                    raise Refused(400, "", f"{value['path']} is no regular file")
                if value.get("encoding") != "base64":
                    raise Refused(400, "", "encoding: base64")
                content = base64.b64decode(value["content"], validate=True)
                if len(content) > MAX_REGULAR_BYTES:
                    raise Refused(400, "", f"{value['path']} has more than 5 MB, and is no regular file")
                files[value["path"]] = content
        branch.files = files
        branch.commits.append(header["value"]["summary"])


def _require_path(path: str) -> None:
    """A path within the repository, as its client's own check of it (CommitOperationAdd)."""
    if FORBIDDEN & set(path.split("/")):
        raise Refused(400, "", f"invalid path {path!r}")


def _batch(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a question where to send large files (git-lfs, docs/api/batch.md)."""
    if asked.get("operation") != "upload" or asked.get("hash_algo", "sha256") != "sha256":
        raise Refused(422, "", "operation: upload, hash_algo: sha256")
    if "basic" not in asked.get("transfers", ["basic"]):
        raise Refused(422, "", "transfers: this stand-in knows basic")
    for one in asked["objects"]:
        if not OID.fullmatch(str(one.get("oid"))) or not isinstance(one.get("size"), int) or one["size"] < 0:
            raise Refused(422, "", "objects: each has an oid and a size")
    return list(asked["objects"])


def _branch(repository: Repository, revision: str) -> Branch:
    if revision not in repository.branches:
        raise Refused(404, "RevisionNotFound", "Invalid rev id")
    return repository.branches[revision]


def _revision(repository: Repository, revision: str) -> Branch:
    """A branch by its name, or by the commit that it is at."""
    return next((one for one in repository.branches.values() if one.head == revision), None) or _branch(
        repository, revision
    )


def _mode(branch: Branch, one: dict[str, Any]) -> dict[str, Any]:
    """How a file is sent, and the checksum of the one that is there: git's, or of a large file its sha256."""
    _require_path(one["path"])
    if len(base64.b64decode(one["sample"], validate=True)) > SAMPLE_BYTES or one["size"] < 0:
        raise Refused(400, "", "sample: the first 512 bytes")
    is_large, there = one["path"].endswith(LARGE) or one["size"] > MAX_REGULAR_BYTES, branch.files.get(one["path"])
    ignored = branch.files.get(".gitignore", b"").decode().splitlines()
    is_ignored = any(fnmatch(one["path"], pattern) for pattern in ignored)
    mode = {"path": one["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": is_ignored}
    if there is None:
        return mode
    blob = hashlib.sha1(b"blob %d\0" % len(there) + there)
    return {**mode, "oid": hashlib.sha256(there).hexdigest() if is_large else blob.hexdigest()}


def _valid_card(asked: dict[str, Any]) -> dict[str, Any]:
    if asked["repoType"] not in ("model", "dataset", "space"):
        raise Refused(400, "", "repoType: model, dataset or space")
    _, header, _ = ("---\n" + asked["content"].removeprefix("---\n")).split("---\n", 2)
    metadata = yaml.safe_load(header)
    if not isinstance(metadata.get("pipeline_tag"), str):
        wrong = '"pipeline_tag" must be a string'
        raise Refused(400, "", wrong, errors=[{"message": wrong}])
    return {"warnings": [], "errors": []}


@contextmanager
def running_upload_hub(**writers: str) -> Iterator[UploadHub]:
    """Serve a hub without repositories. writers: accounts by their tokens."""
    hub = UploadHub(writers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        do_POST = do_PUT = do_GET

        def _answer(self) -> None:
            body = self._body()
            path, token = self.path.partition("?")[0], self.headers.get("Authorization", "").removeprefix("Bearer ")
            hub.requests.append(f"{self.command} {path}")
            status, headers = 200, {}
            try:
                content = hub.answer(self.command, path, token, body)
            except Refused as error:
                status, content = error.status, {"error": error.message, **error.content}
                headers = {"X-Error-Code": error.code, "X-Error-Message": error.message}
            data = json.dumps(content).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HttpServer(Handler) as server:
        hub.endpoint = server.endpoint
        yield hub
