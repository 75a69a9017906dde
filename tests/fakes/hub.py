"""A strict Hugging Face hub on this machine: it serves files of its repositories, or ranges of them; nothing else."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
        repository = self.repositories.get(asked["repo"])
        may_read = repository is not None and (not repository.readers or token in repository.readers)
        if repository is None or not (may_read or repository.gated):
            return (404 if token else 401), "RepoNotFound"
        if not may_read:
            return (403 if token else 401), "GatedRepo"
        if asked["revision"] not in repository.revisions:
            return 404, "RevisionNotFound"
        return (200, "") if asked["file"] in repository.files else (404, "EntryNotFound")


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
                content = repository.contents.get(asked["file"], repository.content)
            etag = hashlib.sha256(content).hexdigest()  # clients keep one copy of files with the same
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if span and content and hub.gives_ranges:
                start, end, whole = int(span[1]), int(span[2]) + 1, len(content)
                status, content = 206, content[start:end]
                hub.sent_bytes += len(content)
            self.send_response(status)
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{start + len(content) - 1}/{whole}")
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
