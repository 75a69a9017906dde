"""A strict Hugging Face hub on this machine: it serves files of its repositories, ranges and lists of them.

Each refusal has the status, X-Error-Code and X-Error-Message by which the hub's own client tells them apart
(`hf_raise_for_status`): no repository, or a private one, with 401 and 404; a gate with 401 and 403; one that its author
disabled; a token that is none, also for a public file; no such revision, no such file. A range that does not lie in the
file is 416, as RFC 9110 says. Large files are not here: the answer is a redirect that has their size and checksum
(X-Linked-Size, X-Linked-Etag) and leads to a store of another origin by an address that is signed for one commit's
file, and the store refuses requests with an Authorization. Repositories that were renamed redirect to their new name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import quote, unquote, urlsplit

from vlmpipe.rehearsal.http_server import HttpServer

COMMIT = "0" * 40
FILE = re.compile(r"/(?P<repo>[\w.-]+/[\w.-]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
LISTING = re.compile(r"/api/models/(?P<repo>[\w.-]+/[\w.-]+)(/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
LARGE = ".safetensors"
Headers = dict[str, str]


@dataclass
class Repository:
    """`readers` are tokens; empty is public. A gated repository is visible to all and readable by its readers."""

    files: tuple[str, ...] = ("config.json", "tokenizer_config.json")
    content: bytes = b"{}"  # of each file that `contents` does not name
    contents: dict[str, bytes] = field(default_factory=dict)
    revisions: tuple[str, ...] = ("main",)
    readers: tuple[str, ...] = ()
    gated: bool = False
    disabled: bool = False


@dataclass
class FakeHub:
    """The hub's repositories, the endpoints of hub and store, and the requests of files that arrived at the hub."""

    repositories: dict[str, Repository]
    endpoint: str = ""
    store: str = ""
    status: int = 0  # answer everything with this HTTP status
    limit: Headers = field(default_factory=dict)  # headers of these answers
    only: str = ""  # end of the paths that are answered so; "" for all
    no_tokens: set[str] = field(default_factory=set)  # tokens that were deleted
    renamed: dict[str, str] = field(default_factory=dict)
    is_hub: bool = True  # otherwise something between answers for it, without the hub's headers
    cut_off: list[int] = field(default_factory=list)  # the next files end after so many bytes
    shown_size: int | None = None  # of every large file, in place of its own
    requests: list[str] = field(default_factory=list)
    gives_ranges: bool = True
    sent_bytes: int = 0  # by ranges
    kept: dict[str, bytes] = field(default_factory=dict)  # large files by checksum

    def answer(self, path: str, token: str) -> tuple[int, Headers, bytes]:
        """Status, headers and content, as huggingface.co answers."""
        address = path.partition("?")[0]
        if self.status and address.endswith(self.only):
            return self.status, self.limit, b""
        asked = FILE.fullmatch(address) or LISTING.fullmatch(address)
        if asked is None:
            return 400, {}, b""
        if new := self.renamed.get(asked["repo"]):
            return 307, {"Location": path.replace(asked["repo"], new, 1)}, b""
        is_file = asked.re is FILE
        if refused := self._refusal(asked["repo"], unquote(asked["revision"] or "main"), token, is_file=is_file):
            return *refused, b""
        repository = self.repositories[asked["repo"]]
        if not is_file:
            return 200, {}, json.dumps(_listing(repository, asked["repo"], asked["what"])).encode()
        file = unquote(asked["file"])
        headers = {"X-Repo-Commit": COMMIT} if self.is_hub else {}
        if file not in repository.files:
            return 404, headers | {"X-Error-Code": "EntryNotFound"}, b""
        content = repository.contents.get(file, repository.content)
        if not file.endswith(LARGE):
            return 200, headers | ({"ETag": f'"{_blob(content)}"'} if self.is_hub else {}), content
        checksum = hashlib.sha256(content).hexdigest()
        self.kept[checksum] = content
        size = len(content) if self.shown_size is None else self.shown_size
        signed = f"{self.store}/{checksum}?file={quote(file)}&signature={_signature(checksum)}"
        linked = {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{checksum}"', "Location": signed}
        return 302, headers | (linked if self.is_hub else {"Location": signed}), b"Found"

    def _refusal(self, name: str, revision: str, token: str, *, is_file: bool) -> tuple[int, Headers] | None:
        """Of a gated repository the list of its files is given to everybody."""
        repository = self.repositories.get(name)
        if token in self.no_tokens:
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}
        may_read = repository is not None and (not repository.readers or token in repository.readers)
        if repository is None or not (may_read or repository.gated):
            return (404 if token else 401), {"X-Error-Code": "RepoNotFound"}
        if repository.disabled:
            return 403, {"X-Error-Message": "Access to this resource is disabled."}
        if is_file and not may_read:
            return (403 if token else 401), {"X-Error-Code": "GatedRepo"}
        return None if revision in (*repository.revisions, COMMIT) else (404, {"X-Error-Code": "RevisionNotFound"})

    def stored(self, path: str, authorization: str) -> tuple[int, Headers, bytes]:
        """What the store answers: no file without its signature, and none to a request with other credentials."""
        address = urlsplit(path)
        checksum = address.path.removeprefix("/")
        if authorization:
            return 400, {}, b"<Error><Code>InvalidArgument</Code>Only one auth mechanism allowed</Error>"
        if checksum not in self.kept or f"signature={_signature(checksum)}" not in address.query:
            return 403, {}, b"<Error><Code>AccessDenied</Code></Error>"
        return 200, {"ETag": f'"{checksum}"'}, self.kept[checksum]


def _signature(checksum: str) -> str:
    return hashlib.sha256(checksum.encode()).hexdigest()[:8]


def _listing(repository: Repository, name: str, what: str | None) -> object:
    """A repository's head, or its files, as the client's `repo_info` and `list_repo_tree` read them."""
    if what != "tree":
        return {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in repository.files]}
    files = []
    for file in repository.files:
        content = repository.contents.get(file, repository.content)
        size, checksum = len(content), hashlib.sha256(content).hexdigest()
        lfs = {"lfs": {"oid": checksum, "size": size, "pointerSize": 130}} if file.endswith(LARGE) else {}
        files.append({"type": "file", "path": file, "size": size, "oid": _blob(content), **lfs})
    return files


def _blob(content: bytes) -> str:
    """git's checksum of a file, which is the ETag of one that is in git itself."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def span_of(header: str, whole: int) -> tuple[int, int] | None:
    """First byte and the one behind the last of a Range header; None for none, or one that is left unheeded.

    Raises ValueError for a range outside the file.
    """
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if not found or found.groups() == ("", ""):
        return None
    if not found[1]:
        start, end = max(0, whole - int(found[2])), whole
    else:
        start, end = int(found[1]), min(whole, int(found[2]) + 1) if found[2] else whole
    if start >= end:
        raise ValueError(header)
    return start, end


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    is_store = False

    def do_HEAD(self) -> None:
        self._send(*self._answer())

    def do_GET(self) -> None:
        status, headers, content = self._answer()
        whole = len(content)
        if status == 200 and self.hub.gives_ranges:
            try:
                span = span_of(self.headers.get("Range", ""), whole)
            except ValueError:
                status, headers, content = 416, headers | {"Content-Range": f"bytes */{whole}"}, b""
            else:
                if span:
                    status, content = 206, content[slice(*span)]
                    headers |= {"Content-Range": f"bytes {span[0]}-{span[1] - 1}/{whole}"}
                    self.hub.sent_bytes += len(content)
        self._send(status, headers, content)
        is_file = status in (200, 206) and (self.is_store or FILE.fullmatch(self.path))
        if is_file and self.hub.cut_off:
            content, self.close_connection = content[: self.hub.cut_off.pop(0)], True
        self.wfile.write(content)

    def _answer(self) -> tuple[int, Headers, bytes]:
        authorization = self.headers.get("Authorization", "")
        if self.is_store:
            return self.hub.stored(self.path, authorization)
        if FILE.fullmatch(self.path):  # the client also asks once a process for what else the hub can do
            self.hub.requests.append(self.path)
        return self.hub.answer(self.path, authorization.removeprefix("Bearer "))

    def _send(self, status: int, headers: Headers, content: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running_hub(**repositories: Repository) -> Iterator[FakeHub]:
    """Serve repositories, by their ids with `__` for the slash."""
    hub = FakeHub({name.replace("__", "/"): repository for name, repository in repositories.items()})
    own, store = (
        HttpServer(type("Bound", (_Handler,), {"hub": hub, "is_store": is_store})) for is_store in (False, True)
    )
    with own, store:
        hub.endpoint, hub.store = own.endpoint, store.endpoint
        yield hub
