"""Client for one Artifact Registry repository of published pipelines (format KFP)."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
from google.api_core import exceptions
from google.auth.exceptions import GoogleAuthError, TransportError
from kfp.registry import RegistryClient
from requests.exceptions import HTTPError, RequestException

from trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.backends.vertex.client import LONGEST_MESSAGE_CHARS, Place, credentials_for, no_credentials, reason_of
from vlmpipe.backends.vertex.retries import REQUEST_TIMEOUT_S, Answer, retrying

HOST = r"https://(?P<location>[a-z0-9-]+)-kfp\.pkg\.dev/(?P<project>[a-z0-9.:-]+)/(?P<repository>[a-z][a-z0-9-]*)"
DIGEST = "sha256:"  # begins a version's name, and no tag's


class PromptClient(RegistryClient):
    """kfp's client, which would wait for an answer for ever: it calls requests without a limit, in these two places.

    `timeout_s` is the longest time without a byte from the server.
    """

    def __init__(self, host: str, auth: Any, timeout_s: float) -> None:
        super().__init__(host, auth=auth)
        self.timeout_s = timeout_s

    def _request(
        self,
        request_url: str,
        request_body: str | None = "",
        http_request: str | None = None,
        extra_headers: dict[str, str] | None = None,
    ) -> requests.Response:
        return self._answered(http_request or "get", request_url, data=request_body, headers=extra_headers)

    def upload_pipeline(
        self, file_name: str, tags: str | list[str] | None = None, extra_headers: dict[str, str] | None = None
    ) -> tuple[str, str]:
        named = {"tags": tags if isinstance(tags, str) else ",".join(tags)} if tags else {}
        with open(file_name, "rb") as content:
            answer = self._answered(
                "post", self._config["upload_url"], data=named, headers=extra_headers, files={"content": content}
            )
        package, version = answer.text.split("/")
        return package, version

    def _answered(self, method: str, url: str, **content: Any) -> requests.Response:
        self._refresh_creds()
        response = requests.request(method, url, auth=self._get_auth(), timeout=self.timeout_s, **content)
        response.raise_for_status()
        return response


class Registry:
    """One repository, by kfp's own client. Raises UserError in words for all that it raises.

    A request that brings no byte for `timeout_s` is broken off, and made again for some time.
    """

    def __init__(self, host: str, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        match = re.fullmatch(HOST, host.rstrip("/"))
        if not match:
            raise ConfigError(
                f"{host!r} is not a repository of pipelines",
                expected="https://REGION-kfp.pkg.dev/PROJECT/REPOSITORY, of Artifact Registry, with the format KFP",
                fix="give --registry, or set VERTEX_TEMPLATE_REGISTRY; terraform/ makes one",
            )
        self.host, self.place = match[0], Place(match["project"], match["location"])
        self.repository = match["repository"]
        self._client = PromptClient(self.host, credentials_for(self.host), timeout_s)

    def upload(self, file: Path, tag: str) -> str:
        """The version that the file now is. `tag` goes with it."""
        _, version = self._call(lambda: self._client.upload_pipeline(str(file), tags=[tag]))
        return str(version).strip()

    def download(self, name: str, version: str) -> bytes:
        """The file of a version (sha256:...) or of a tag."""
        by = {"version": version} if version.startswith(DIGEST) else {"tag": version}
        with tempfile.TemporaryDirectory(prefix="vlmpipe-template-") as scratch:
            file = str(Path(scratch, "pipeline.yaml"))
            self._call(lambda: self._client.download_pipeline(name, file_name=file, **by))
            return Path(file).read_bytes()

    def version_of(self, name: str, tag: str) -> str:
        """The version that a tag names; empty where there is no such tag."""
        try:
            found = self._call(lambda: self._client.get_tag(name, tag))
        except UserError as error:
            if isinstance(error.__cause__, exceptions.NotFound):
                return ""
            raise
        return str(found["version"]).rpartition("/")[2]

    def put_tag(self, name: str, tag: str, version: str) -> str:
        """Let the tag name this version; what was done: new, moved, or there."""
        live = self.version_of(name, tag)
        if live == version:
            return "there"
        if not live:
            try:
                self._call(lambda: self._client.create_tag(name, version, tag))
                return "new"
            except UserError as error:  # made meanwhile, maybe by our own request whose answer was lost
                if not isinstance(error.__cause__, exceptions.Conflict):
                    raise
        self._call(lambda: self._client.update_tag(name, version, tag))
        return "moved"

    def _call(self, call: Callable[[], Answer]) -> Answer:
        def translated() -> Answer:
            try:
                return call()
            except HTTPError as error:
                raise exceptions.from_http_response(error.response) from error

        try:
            return retrying(translated)
        except exceptions.GoogleAPICallError as error:
            raise self._api_error(error) from error
        except (RequestException, TransportError) as error:
            raise self._unreachable(reason_of(error)) from error
        except GoogleAuthError as error:
            raise no_credentials(error) from error

    def _api_error(self, error: exceptions.GoogleAPICallError) -> UserError:
        said, status, project = (
            " ".join(error.message.split())[:LONGEST_MESSAGE_CHARS],
            int(error.code or 0),
            self.place.project,
        )
        here = f"--location={self.place.location} --project={project}"
        if status == 401:
            return no_credentials(error)
        if status == 403 and error.reason == "SERVICE_DISABLED":
            return UserError(
                f"the Artifact Registry API is not enabled in project {project}: {said}",
                fix=f"gcloud services enable artifactregistry.googleapis.com --project {project}",
                code=ExitCode.UNAVAILABLE,
            )
        if status == 403:
            return UserError(
                f"no permission for {self.host}, or there is no such project: {said}",
                expected="roles/artifactregistry.writer on the repository to publish, .reader to start from a template",
                fix=f"gcloud artifacts repositories add-iam-policy-binding {self.repository} {here} "
                "--member=user:YOUR_ACCOUNT --role=roles/artifactregistry.writer",
                code=ExitCode.NO_PERMISSION,
            )
        if status == 404:
            return UserError(
                f"not found in {self.host}: {said}",
                expected="a repository of the format KFP, and in it a pipeline of that name with that version or tag",
                fix=f"gcloud artifacts tags list --repository={self.repository} {here} --package=NAME\n"
                f"or make the repository: gcloud artifacts repositories create {self.repository} {here} "
                "--repository-format=kfp",
                code=ExitCode.NOT_FOUND,
            )
        if status in (409, 429):
            return UserError(
                f"{self.host} cannot do it now: {said}",
                fix="somebody publishes the same just now, or a quota is used up: do it again, nothing comes out twice",
                code=ExitCode.UNAVAILABLE,
            )
        if 400 <= status < 500:
            return ConfigError(f"{self.host} refuses it: {said}", expected="what the message names")
        return self._unreachable(f"{status} {said}")

    def _unreachable(self, why: str) -> UserError:
        return UserError(
            f"{self.host} does not answer: {why}",
            expected="a network that reaches it, and a region that exists",
            fix="check network, proxy (HTTPS_PROXY) and the region, then do it again: nothing comes out twice",
            code=ExitCode.UNAVAILABLE,
        )
