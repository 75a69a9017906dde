"""Client for one Artifact Registry repository of published pipelines (format KFP)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from google.api_core import exceptions
from google.auth.exceptions import GoogleAuthError, TransportError
from google.auth.transport.requests import AuthorizedSession
from requests import Response
from requests.exceptions import RequestException

from vlmpipe.google_cloud.client import LONGEST_MESSAGE_CHARS, Place, credentials_for, no_credentials, reason_of
from vlmpipe.google_cloud.retries import REQUEST_TIMEOUT_S, Answer, retrying
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError

HOST = r"https://(?P<location>[a-z0-9-]+)-kfp\.pkg\.dev/(?P<project>[a-z0-9.:-]+)/(?P<repository>[a-z][a-z0-9-]*)"
API = "https://artifactregistry.googleapis.com/v1"
DIGEST = "sha256:"  # begins a version's name, and no tag's


class Registry:
    """One repository. A request that brings no byte for `timeout_s` is broken off, and repeated for some time.

    Raises UserError for every error of the service, of the network and of credentials.
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
        self.repository, self._timeout_s = match["repository"], timeout_s
        # A refused token is reported at once. One that has expired is refreshed before it is sent.
        self._session = AuthorizedSession(credentials_for(self.host), refresh_status_codes=())

    def upload(self, file: Path, tag: str) -> str:
        """Store the file with a tag. Returns its version."""

        def send() -> str:
            with file.open("rb") as content:
                return self._send("post", self.host, data={"tags": tag}, files={"content": content}).text

        return self._call(send).rpartition("/")[2].strip()

    def download(self, name: str, version: str) -> bytes:
        """The file of a version (sha256:...) or of a tag."""
        return self._call(lambda: self._send("get", f"{self.host}/{name}/{version}").content)

    def version_of(self, name: str, tag: str) -> str:
        """The version that a tag names; empty where there is no such tag."""
        try:
            result = self._call(lambda: self._send("get", f"{API}/{self._package(name)}/tags/{tag}").json())
        except UserError as error:
            if isinstance(error.__cause__, exceptions.NotFound):
                return ""
            raise
        return str(result["version"]).rpartition("/")[2]

    def put_tag(self, name: str, tag: str, version: str) -> str:
        """Let the tag name this version. Returns what was done: new, moved, or there."""
        live = self.version_of(name, tag)
        if live == version:
            return "there"
        tags, content = f"{API}/{self._package(name)}/tags", {"version": f"{self._package(name)}/versions/{version}"}
        if not live:
            try:
                self._call(lambda: self._send("post", tags, params={"tagId": tag}, json=content))
                return "new"
            except UserError as error:  # made meanwhile, maybe by our own request whose answer was lost
                if not isinstance(error.__cause__, exceptions.Conflict):
                    raise
        self._call(lambda: self._send("patch", f"{tags}/{tag}", params={"updateMask": "version"}, json=content))
        return "moved"

    def _package(self, name: str) -> str:
        return f"{self.place.parent}/repositories/{self.repository}/packages/{name}"

    def _send(self, method: str, url: str, **content: object) -> Response:
        answer = self._session.request(method, url, timeout=self._timeout_s, **content)
        if answer.status_code != 200:
            raise exceptions.from_http_response(answer)
        return answer

    def _call(self, call: Callable[[], Answer]) -> Answer:
        try:
            return retrying(call)
        except exceptions.GoogleAPICallError as error:
            raise self._api_error(error) from error
        except (RequestException, TransportError) as error:
            raise self._unreachable(reason_of(error)) from error
        except GoogleAuthError as error:
            raise no_credentials(error) from error

    def _api_error(self, error: exceptions.GoogleAPICallError) -> UserError:
        message, project = " ".join(error.message.split())[:LONGEST_MESSAGE_CHARS], self.place.project
        status = int(error.code or 0)
        here = f"--location={self.place.location} --project={project}"
        if status == 401:
            return no_credentials(error)
        if status == 403 and error.reason == "SERVICE_DISABLED":
            return UserError(
                f"the Artifact Registry API is not enabled in project {project}: {message}",
                fix=f"gcloud services enable artifactregistry.googleapis.com --project {project}",
                code=ExitCode.UNAVAILABLE,
            )
        if status == 403:
            return UserError(
                f"no permission for {self.host}, or there is no such project: {message}",
                expected="roles/artifactregistry.writer on the repository to publish, .reader to start from a template",
                fix=f"gcloud artifacts repositories add-iam-policy-binding {self.repository} {here} "
                "--member=user:YOUR_ACCOUNT --role=roles/artifactregistry.writer",
                code=ExitCode.NO_PERMISSION,
            )
        if status == 404:
            return UserError(
                f"not found in {self.host}: {message}",
                expected="a repository of the format KFP, and in it a pipeline of that name with that version or tag",
                fix=f"gcloud artifacts tags list --repository={self.repository} {here} --package=NAME\n"
                f"or make the repository: gcloud artifacts repositories create {self.repository} {here} "
                "--repository-format=kfp",
                code=ExitCode.NOT_FOUND,
            )
        if status in (409, 429):
            return UserError(
                f"{self.host} cannot do it now: {message}",
                fix="it is being published elsewhere, or a quota is used up: try again, nothing is published twice",
                code=ExitCode.UNAVAILABLE,
            )
        if 400 <= status < 500:
            return ConfigError(f"{self.host} refuses it: {message}", expected="what the message names")
        return self._unreachable(f"{status} {message}")

    def _unreachable(self, why: str) -> UserError:
        return UserError(
            f"{self.host} does not answer: {why}",
            expected="a network that reaches it, and a region that exists",
            fix="check network, proxy (HTTPS_PROXY) and the region, then try again: nothing is published twice",
            code=ExitCode.UNAVAILABLE,
        )
