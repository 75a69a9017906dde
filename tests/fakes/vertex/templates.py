"""The template registry of the stand-in: Artifact Registry's format KFP, as its two hosts answer kfp's client.

What is refused stands in the API's documentation: names, tags, bodies and masks; who has no token or asks for another
project. A file's version is its digest. Uploading the same bytes again is taken, and counted.
"""

from __future__ import annotations

import hashlib
import json
import re
from email import message_from_bytes
from typing import Any
from urllib.parse import unquote

import pytest
import requests
import yaml
from google.auth.credentials import Credentials
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from vlmpipe.rehearsal.http_server import ApiError

TOKEN = "a-token"
FILES, API = "us-central1-kfp.pkg.dev", "artifactregistry.googleapis.com"
NAME, TAG = re.compile(r"[a-z0-9][a-z0-9-]{3,127}"), re.compile(r"[A-Za-z0-9._~:@-]{1,128}")
VERSION = re.compile(r"sha256:[0-9a-f]{64}")
MAX_TAGS, LARGEST_BYTES = 8, 10 << 20
API_PATH = re.compile(r"/v1/projects/([^/]+)/locations/([^/]+)/repositories/([^/]+)/packages/([^/]+)/tags(?:/([^/]+))?")


class Templates:
    """One repository, in memory.

    Attributes:
        files: content by package and version.
        tags: version by package and tag.
        uploads: how often something was uploaded, the same again or not.
    """

    def __init__(self, project: str, location: str, repository: str = "templates") -> None:
        self.files: dict[tuple[str, str], bytes] = {}
        self.tags: dict[tuple[str, str], str] = {}
        self.uploads = 0
        self._project, self._location, self._repository = project, location, repository

    def answer(
        self, method: str, host: str, path: str, query: dict[str, str], headers: Any, body: bytes
    ) -> bytes | dict[str, Any]:
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            raise ApiError(401, "Request had invalid authentication credentials.")
        if host == API:
            return self._api(method, unquote(path), query, headers, body)
        project, repository, *rest = unquote(path).strip("/").split("/")
        self._require_repository(project, self._location, repository)
        if query:
            raise ApiError(400, f"Unknown query {sorted(query)}")
        if method == "POST" and not rest:
            return self._upload(headers.get("Content-Type", ""), body)
        if method == "GET" and len(rest) == 2:
            return self._download(*rest)
        raise ApiError(501, f"no such route here: {method} {path}")

    def _upload(self, kind: str, body: bytes) -> bytes:
        message = message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode() + body)
        if message.get_content_type() != "multipart/form-data" or not message.is_multipart():
            raise ApiError(400, f"expected multipart/form-data, found {kind!r}")
        parts = {str(part.get_param("name", header="content-disposition")): part for part in message.get_payload()}  # type: ignore[union-attr]
        if parts.keys() - {"tags"} != {"content"}:
            raise ApiError(400, f"expected the parts content and tags, found {sorted(parts)}")
        content: Any = parts["content"].get_payload(decode=True)  # type: ignore[union-attr]
        tags = parts["tags"].get_payload(decode=True).decode().split(",") if "tags" in parts else []  # type: ignore[union-attr]
        name = self._name_in(content)
        if len(tags) > MAX_TAGS:
            raise ApiError(400, f"{len(tags)} tags are more than {MAX_TAGS}")
        for tag in tags:
            self._require_tag(tag)
        version = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.uploads += 1
        self.files[name, version] = content
        self.tags |= {(name, tag): version for tag in tags}
        return f"{name}/{version}".encode()

    def _name_in(self, content: bytes) -> str:
        if len(content) > LARGEST_BYTES:
            raise ApiError(400, f"{len(content)} bytes are more than {LARGEST_BYTES}")
        spec = pipeline_spec_pb2.PipelineSpec()
        try:
            json_format.ParseDict(yaml.safe_load(content), spec)
        except (yaml.YAMLError, json_format.ParseError) as error:
            raise ApiError(400, f"the file is no pipeline: {error}") from None
        name = str(spec.pipeline_info.name)
        if not NAME.fullmatch(name):
            raise ApiError(400, f"the pipeline's name {name!r} does not match {NAME.pattern}")
        return name

    def _download(self, name: str, version: str) -> bytes:
        if not version.startswith("sha256:"):
            if (name, version) not in self.tags:
                raise ApiError(404, f"Tag {version} of package {name} was not found")
            version = self.tags[name, version]
        if (name, version) not in self.files:
            raise ApiError(404, f"Version {version} of package {name} was not found")
        return self.files[name, version]

    def _api(self, method: str, path: str, query: dict[str, str], headers: Any, body: bytes) -> dict[str, Any]:
        match = API_PATH.fullmatch(path)
        if not match:
            raise ApiError(501, f"no such route here: {method} {path}")
        project, location, repository, name, tag = match.groups()
        self._require_repository(project, location, repository)
        if name not in {package for package, _ in self.files}:
            raise ApiError(404, f"Package {name} was not found")
        asked = (method, bool(tag), frozenset(query))
        if asked == ("POST", False, frozenset({"tagId"})):
            self._require_tag(query["tagId"])
            if (name, query["tagId"]) in self.tags:
                raise ApiError(409, f"the tag {query['tagId']} already exists")
            return self._set(name, query["tagId"], headers, body)
        if asked not in {("GET", True, frozenset()), ("PATCH", True, frozenset({"updateMask"}))}:
            raise ApiError(400, f"not understood: {method} {path} with {sorted(query)}")
        if (name, tag) not in self.tags:
            raise ApiError(404, f"Tag {tag} of package {name} was not found")
        if method == "GET":
            return self._tag(name, tag)
        if query["updateMask"] != "version":
            raise ApiError(400, f"update_mask {query['updateMask']!r}: only version can change")
        return self._set(name, tag, headers, body)

    def _set(self, name: str, tag: str, headers: Any, body: bytes) -> dict[str, Any]:
        content = json.loads(body)
        if headers.get("Content-Type") != "application/json" or content.keys() - {"name"} != {"version"}:
            raise ApiError(400, f"Invalid JSON payload received: {sorted(content)}")
        prefix, _, version = content["version"].rpartition("/versions/")
        if prefix != self._package(name) or not VERSION.fullmatch(version):
            raise ApiError(400, f"{content['version']!r} is not a version of {self._package(name)}")
        if (name, version) not in self.files:
            raise ApiError(404, f"Version {version} of package {name} was not found")
        self.tags[name, tag] = version
        return self._tag(name, tag)

    def _tag(self, name: str, tag: str) -> dict[str, Any]:
        package = self._package(name)
        return {"name": f"{package}/tags/{tag}", "version": f"{package}/versions/{self.tags[name, tag]}"}

    def _package(self, name: str) -> str:
        return f"projects/{self._project}/locations/{self._location}/repositories/{self._repository}/packages/{name}"

    def _require_repository(self, project: str, location: str, repository: str) -> None:
        if project != self._project:  # the real service does not tell strangers which projects exist
            raise ApiError(403, f"Permission denied on resource project {project} (or it may not exist).")
        if (location, repository) != (self._location, self._repository):
            raise ApiError(404, f"Repository {repository} in {location} was not found")

    def _require_tag(self, tag: str) -> None:
        if not TAG.fullmatch(tag) or tag.startswith("sha256:"):
            raise ApiError(400, f"{tag!r} cannot be a tag")


class Token(Credentials):
    """Credentials that are good, or that the service does not know."""

    def __init__(self, token: str = TOKEN) -> None:
        super().__init__()
        self.token = token

    def refresh(self, request: object) -> None:
        raise AssertionError("good for as long as a test takes")


def redirect(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Send what goes to the two hosts to the stand-in, with the host's name. Nothing else may leave the machine."""
    send = requests.adapters.HTTPAdapter.send

    def sending(adapter: Any, request: requests.PreparedRequest, **options: Any) -> Any:
        scheme, _, rest = str(request.url).partition("://")
        host, _, path = rest.partition("/")
        if (scheme, host) in {("https", FILES), ("https", API)}:
            request.url = f"{endpoint}/{path}"
            request.headers["Host"] = host
        else:
            assert request.url.startswith("http://127.0.0.1:"), f"a request to {request.url}"
        return send(adapter, request, **options)

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", sending)
