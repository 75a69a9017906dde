"""The stand-ins for the Hugging Face hub are strict: files, ranges and uploads are refused as its client expects it."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import constants, errors, get_hf_file_metadata

from tests.fakes.hub import FakeHub, Repository, running_hub
from tests.fakes.hub_uploads import UploadHub, running_upload_hub

FILE = "/{}/resolve/{}/{}"
WEIGHTS = b"weights"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with running_hub(
        me__open=Repository(content=b"0123456789", revisions=("main", "refs/pr/1")),
        me__private=Repository(readers=("t",)),
        me__gated=Repository(readers=("t",), gated=True),
        me__disabled=Repository(disabled=True),
        me__large=Repository(("m.safetensors",), content=WEIGHTS),
    ) as running:
        running.no_tokens, running.renamed = {"old"}, {"me/older": "me/large"}
        yield running


def ask(
    endpoint: str, method: str, path: str, *, token: str = "", body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=10)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, sent | ({"Authorization": f"Bearer {token}"} if token else {}))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


# ---- files

GATE, ABSENT = errors.GatedRepoError, errors.RepositoryNotFoundError
REFUSED: list[tuple[str, str, int, str, type[Exception]]] = [
    (FILE.format("me/none", "main", "config.json"), "", 401, "RepoNotFound", ABSENT),
    (FILE.format("me/none", "main", "config.json"), "t", 404, "RepoNotFound", ABSENT),
    (FILE.format("me/private", "main", "config.json"), "", 401, "RepoNotFound", ABSENT),
    (FILE.format("me/private", "main", "config.json"), "other", 404, "RepoNotFound", ABSENT),
    (FILE.format("me/gated", "main", "config.json"), "", 401, "GatedRepo", GATE),
    (FILE.format("me/gated", "main", "config.json"), "other", 403, "GatedRepo", GATE),
    (FILE.format("me/open", "v2", "config.json"), "", 404, "RevisionNotFound", errors.RevisionNotFoundError),
    (FILE.format("me/open", "main", "model.bin"), "", 404, "EntryNotFound", errors.EntryNotFoundError),
    ("/me/open/tree/main", "", 400, "", errors.BadRequestError),
    (FILE.format("me/disabled", "main", "config.json"), "", 403, "", errors.DisabledRepoError),
    (FILE.format("me/open", "main", "config.json"), "old", 401, "", errors.HfHubHTTPError),
]


@pytest.mark.parametrize(("path", "token", "status", "code", "meaning"), REFUSED)
def test_a_file_that_may_not_be_read_is_refused_as_the_client_knows_it(
    hub: FakeHub, path: str, token: str, status: int, code: str, meaning: type[Exception]
) -> None:
    found, headers, _ = ask(hub.endpoint, "HEAD", path, token=token)
    assert (found, headers.get("X-Error-Code", "")) == (status, code)
    with pytest.raises(meaning):
        get_hf_file_metadata(f"{hub.endpoint}{path}", token=token or False)


def test_a_revision_is_quoted_in_an_address(hub: FakeHub) -> None:
    assert ask(hub.endpoint, "HEAD", FILE.format("me/open", "refs%2Fpr%2F1", "config.json"))[0] == 200
    assert ask(hub.endpoint, "POST", FILE.format("me/open", "main", "config.json"))[0] == 501


@pytest.mark.parametrize(
    ("asked", "status", "told", "content"),
    [
        ("bytes=2-4", 206, "bytes 2-4/10", b"234"),
        ("bytes=8-20", 206, "bytes 8-9/10", b"89"),
        ("bytes=7-", 206, "bytes 7-9/10", b"789"),
        ("bytes=-2", 206, "bytes 8-9/10", b"89"),
        ("bytes=10-12", 416, "bytes */10", b""),
        ("bytes=4-2", 416, "bytes */10", b""),
        ("bytes=0-1,4-5", 200, None, b"0123456789"),
        ("lines=1-2", 200, None, b"0123456789"),
    ],
)
def test_ranges(hub: FakeHub, asked: str, status: int, told: str | None, content: bytes) -> None:
    path = FILE.format("me/open", "main", "config.json")
    found, headers, data = ask(hub.endpoint, "GET", path, Range=asked)
    assert (found, headers.get("Content-Range"), data) == (status, told, content)
    assert ask(hub.endpoint, "HEAD", path, Range=asked)[1]["Content-Length"] == "10"


def test_a_large_file_is_at_another_address_that_is_signed(hub: FakeHub) -> None:
    """As the client reads it: size and checksum are in the redirect, whose own answer is shorter."""
    path = FILE.format("me/large", "main", "m.safetensors")
    found = get_hf_file_metadata(f"{hub.endpoint}{path}", token="t")
    checksum = hashlib.sha256(WEIGHTS).hexdigest()
    assert (found.size, found.etag, found.commit_hash) == (len(WEIGHTS), checksum, "0" * 40)
    assert found.location.startswith(hub.store) and hub.store != hub.endpoint
    signed = found.location.removeprefix(hub.store)
    assert ask(hub.store, "GET", signed)[::2] == (200, WEIGHTS)
    assert ask(hub.store, "GET", signed, Range="bytes=1-2")[::2] == (206, WEIGHTS[1:3])
    assert ask(hub.store, "GET", signed, token="t")[0] == 400, "its client sends the token to the hub alone"
    assert ask(hub.store, "GET", signed.partition("?")[0])[0] == 403
    assert ask(hub.store, "GET", signed.replace(checksum, "0" * 64))[0] == 403


def test_a_name_that_was_left_redirects_to_the_new_one(hub: FakeHub) -> None:
    old, new = (FILE.format(name, "main", "m.safetensors") for name in ("me/older", "me/large"))
    status, headers, _ = ask(hub.endpoint, "HEAD", old)
    assert (status, headers["Location"]) == (307, new)
    assert get_hf_file_metadata(f"{hub.endpoint}{old}").size == len(WEIGHTS)


def test_a_small_file_has_gits_checksum(hub: FakeHub) -> None:
    found = get_hf_file_metadata(hub.endpoint + FILE.format("me/open", "main", "config.json"))
    assert found.etag == hashlib.sha1(b"blob 10\x000123456789").hexdigest()


def test_lists_of_a_gated_repository_are_public_and_its_files_are_not(hub: FakeHub) -> None:
    for path in ("/api/models/me/gated", "/api/models/me/gated/tree/main?recursive=True"):
        assert ask(hub.endpoint, "GET", path)[0] == 200
    (entry,) = json.loads(ask(hub.endpoint, "GET", "/api/models/me/large/tree/main")[2])
    assert entry["lfs"]["oid"] == hashlib.sha256(WEIGHTS).hexdigest()
    for path, code in (("me/private", "RepoNotFound"), ("me/open/revision/v9", "RevisionNotFound")):
        status, headers, _ = ask(hub.endpoint, "GET", f"/api/models/{path}")
        assert (status in (401, 404), headers["X-Error-Code"]) == (True, code)


@pytest.mark.parametrize("size", [0, 3])
def test_a_connection_that_ends_early_ends_early(hub: FakeHub, size: int) -> None:
    hub.cut_off = [size]
    with pytest.raises(http.client.IncompleteRead):
        ask(hub.endpoint, "GET", FILE.format("me/open", "main", "config.json"))
    assert ask(hub.endpoint, "GET", FILE.format("me/open", "main", "config.json"))[0] == 200


# ---- uploads

Body = dict[str, Any]
SMALL = b"{}"
OID = hashlib.sha256(WEIGHTS).hexdigest()


@pytest.fixture
def uploads() -> Iterator[UploadHub]:
    with running_upload_hub(t="me", other="you") as running:
        assert send(running, "POST", "/api/repos/create", CREATE)[0] == 200
        yield running


def send(hub: UploadHub, method: str, path: str, content: Any, token: str = "t") -> tuple[int, str]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    status, _, data = ask(hub.endpoint, method, path, token=token, body=body)
    return status, data.decode()


def lines(*changes: Body, header: Body | None = None) -> bytes:
    first = {"key": "header", "value": {"summary": "m", "description": ""}} if header is None else header
    return "\n".join(map(json.dumps, (first, *changes))).encode()


def regular(path: str, content: bytes = SMALL, **changes: str) -> Body:
    value = {"path": path, "content": base64.b64encode(content).decode(), "encoding": "base64"}
    return {"key": "file", "value": value | changes}


def large(**changes: Any) -> Body:
    return {"key": "lfsFile", "value": {"path": "m.safetensors", "algo": "sha256", "oid": OID, "size": 7} | changes}


def batch(**changes: Any) -> Body:
    objects = [{"oid": OID, "size": 7}]
    return {"operation": "upload", "transfers": ["basic"], "objects": objects, "hash_algo": "sha256"} | changes


CREATE = {"name": "model", "organization": "me", "type": "model", "visibility": "private"}
PREUPLOAD, COMMIT, BATCH = (
    "/api/models/me/model/preupload/main", "/api/models/me/model/commit/main", "/me/model.git/info/lfs/objects/batch"
)  # fmt: skip
SAMPLE = base64.b64encode(b"x").decode()
ASKED = {"path": "a.json", "sample": SAMPLE, "size": 1}
UPLOADS_REFUSED: dict[str, tuple[str, Any, int, str]] = {
    "a repository twice": ("/api/repos/create", CREATE, 409, "already created"),
    "another's account": ("/api/repos/create", CREATE | {"organization": "you"}, 403, "no rights"),
    "an unknown field": ("/api/repos/create", CREATE | {"colour": 1}, 400, "colour"),
    "no name": ("/api/repos/create", CREATE | {"name": ""}, 400, "name"),
    "two dashes": ("/api/repos/create", CREATE | {"name": "a--b"}, 400, "--"),
    "a name like a repository of git": ("/api/repos/create", CREATE | {"name": "a.git"}, 400, ".git"),
    "97 characters": ("/api/repos/create", CREATE | {"name": "a" * 97}, 400, "96"),
    "a protected model": ("/api/repos/create", CREATE | {"visibility": "protected"}, 400, "public or private"),
    "a branch of pull requests": ("/api/models/me/model/branch/refs%2Fpr%2F5", {}, 400, "Invalid reference"),
    "a branch that is there": ("/api/models/me/model/branch/main", {}, 409, "already exists"),
    "no repository": ("/api/models/me/none/branch/v1", {}, 404, "not found"),
    "no revision": ("/api/models/me/model/preupload/v9", {"files": [ASKED]}, 404, "Invalid rev"),
    "257 files": (PREUPLOAD, {"files": [ASKED] * 257}, 400, "256"),
    "a path of another folder": (PREUPLOAD, {"files": [ASKED | {"path": "../a"}]}, 400, "invalid path"),
    "git's own files": (PREUPLOAD, {"files": [ASKED | {"path": ".git/config"}]}, 400, "invalid path"),
    "a sample of all": (
        PREUPLOAD, {"files": [ASKED | {"sample": base64.b64encode(b"x" * 513).decode()}]}, 400, "512 bytes"
    ),
    "a download": (BATCH, batch(operation="download"), 422, "operation"),
    "another checksum's kind": (BATCH, batch(hash_algo="md5"), 422, "hash_algo"),
    "no oid": (BATCH, batch(objects=[{"oid": "1", "size": 7}]), 422, "oid"),
    "no size": (BATCH, batch(objects=[{"oid": OID}]), 422, "size"),
    "no header": (COMMIT, lines(header=regular("a.json")), 400, "header"),
    "no summary": (COMMIT, lines(regular("a"), header={"key": "header", "value": {"summary": ""}}), 400, "summary"),
    "no change": (COMMIT, lines(), 400, "empty"),
    "an older head": (
        COMMIT, lines(regular("a"), header={"key": "header", "value": {"summary": "m", "parentCommit": "0"}}),
        412, "has happened since",
    ),
    "a path twice": (COMMIT, lines(regular("a"), regular("a")), 400, "twice"),
    "an absolute path": (COMMIT, lines(regular("/a")), 400, "invalid path"),
    "another encoding": (COMMIT, lines(regular("a", encoding="utf-8")), 400, "encoding"),
    "weights as a regular file": (COMMIT, lines(regular("m.safetensors")), 400, "no regular file"),
    "weights that were not sent": (COMMIT, lines(large()), 400, "was not uploaded"),
    "weights without their checksum's kind": (COMMIT, lines(large(algo="md5")), 400, "algo"),
    "a regular file of more than 5 MB": (COMMIT, lines(regular("a.json", b" " * 5_000_001)), 400, "5 MB"),
    "more than 25,000 large files": (
        COMMIT, lines(*(large(path=f"{number}.safetensors") for number in range(25_001))), 413, "25k"
    ),
    "files of the client's own folder": (COMMIT, lines(regular("a/.cache/b")), 400, "invalid path"),
    "a folder of git in a folder": (COMMIT, lines(regular("a/.git/config")), 400, "invalid path"),
    "a branch from nowhere": ("/api/models/me/model/branch/v1", {"startingPoint": "v0"}, 404, "Invalid rev"),
    "a card of no kind of repository": (
        "/api/validate-yaml", {"repoType": "bucket", "content": "---\npipeline_tag: a\n---\n"}, 400, "repoType"
    ),
    "a card without a task": (
        "/api/validate-yaml", {"repoType": "model", "content": "---\ntags: []\n---\n"}, 400, "pipeline_tag"
    ),
    "a deletion of nothing": (
        COMMIT, lines({"key": "deletedFile", "value": {"path": "none.json"}}), 404, "doesn't exist"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UPLOADS_REFUSED)
def test_an_upload_with_one_fault_is_refused_and_changes_nothing(uploads: UploadHub, name: str) -> None:
    path, content, status, said = UPLOADS_REFUSED[name]
    before = repr(uploads.repositories)
    found, text = send(uploads, "POST", path, content)
    assert (found, said in text) == (status, True), text
    assert repr(uploads.repositories) == before


@pytest.mark.parametrize(
    ("token", "path", "content", "status"),
    [
        ("", "/api/repos/create", CREATE | {"name": "b"}, 401),
        ("unknown", COMMIT, lines(regular("a")), 401),
        ("other", COMMIT, lines(regular("a")), 403),
        ("other", BATCH, batch(), 403),
    ],
)
def test_only_the_repositorys_account_may_write(
    uploads: UploadHub, token: str, path: str, content: Any, status: int
) -> None:
    assert send(uploads, "POST", path, content, token)[0] == status


def test_large_files_are_sent_before_they_are_committed(uploads: UploadHub) -> None:
    status, text = send(uploads, "POST", BATCH, batch())
    (one,) = json.loads(text)["objects"]
    address = one["actions"]["upload"]["href"].removeprefix(uploads.endpoint)
    assert status == 200 and send(uploads, "PUT", address, b"others", token="")[0] == 400, "another checksum"
    assert send(uploads, "PUT", address, WEIGHTS, token="")[0] == 200
    assert send(uploads, "POST", COMMIT, lines(large(size=6)))[0] == 400, "another size than announced"
    assert send(uploads, "POST", COMMIT, lines(large(), regular("a.json")))[0] == 200
    assert uploads.repositories["me/model"].branches["main"].files["m.safetensors"] == WEIGHTS
