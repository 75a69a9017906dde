"""A strict Hugging Face hub on this machine: it serves files of its repositories, or ranges of them; nothing else.

Each refusal has the status and the X-Error-Code by which the hub's own client tells them apart (`hf_raise_for_status`):
no repository, or a private one, with 401 and 404; a gate with 401 and 403; no such revision, no such file. A range that
does not lie in the file is 416, as RFC 9110 says.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "0" * 40
FILE = re.compile(r"/(?P<repo>[\w.-]+/[\w.-]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Repository:
    """`readers` are tokens; empty is public. A gated repository is visible to all and readable by its readers."""

    files: tuple[str, ...] = ("config.json", "tokenizer_config.json")
    content: bytes = b"{}"  # of each file that `contents` does not name
    contents: dict[str, bytes] = field(default_factory=dict)
    revisions: tuple[str, ...] = ("main",)
    readers: tuple[str, ...] = ()
    gated: bool = False


@dataclass
class FakeHub:
    """The hub's repositories, its endpoint, and the requests of files that arrived."""

    repositories: dict[str, Repository]
    endpoint: str = ""
    status: int = 0  # answer everything with this HTTP status
    requests: list[str] = field(default_factory=list)
    gives_ranges: bool = True
    sent_bytes: int = 0  # by ranges

    def answer(self, path: str, token: str) -> tuple[int, str]:
        """Status and X-Error-Code, as huggingface.co answers."""
        if self.status:
            return self.status, ""
        asked = FILE.fullmatch(path)
        if asked is None:
            return 400, ""
        revision, file = unquote(asked["revision"]), unquote(asked["file"])
        repository = self.repositories.get(asked["repo"])
        may_read = repository is not None and (not repository.readers or token in repository.readers)
        if repository is None or not (may_read or repository.gated):
            return (404 if token else 401), "RepoNotFound"
        if not may_read:
            return (403 if token else 401), "GatedRepo"
        if revision not in repository.revisions:
            return 404, "RevisionNotFound"
        return (200, "") if file in repository.files else (404, "EntryNotFound")


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


@contextmanager
def running_hub(**repositories: Repository) -> Iterator[FakeHub]:
    """Serve repositories, by their ids with `__` for the slash."""
    hub = FakeHub({name.replace("__", "/"): repository for name, repository in repositories.items()})

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self.wfile.write(self._answer())

        def _answer(self) -> bytes:
            asked = FILE.fullmatch(self.path)
            if asked:  # the client also asks once a process for what else the hub can do
                hub.requests.append(self.path)
            status, code = hub.answer(self.path, self.headers.get("Authorization", "").removeprefix("Bearer "))
            content = b""
            if asked and status == 200:
                repository = hub.repositories[asked["repo"]]
                content = repository.contents.get(unquote(asked["file"]), repository.content)
            etag, whole = (
                hashlib.sha256(content).hexdigest(),
                len(content),
            )  # clients keep one copy of files with the same
            start = end = 0
            if status == 200 and hub.gives_ranges and self.command == "GET":
                try:
                    span = span_of(self.headers.get("Range", ""), whole)
                except ValueError:
                    status, content = 416, b""
                else:
                    if span:
                        start, end = span
                        status, content = 206, content[start:end]
                        hub.sent_bytes += len(content)
            self.send_response(status)
            if status in (206, 416):
                part = f"{start}-{end - 1}" if status == 206 else "*"
                self.send_header("Content-Range", f"bytes {part}/{whole}")
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            return content

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
