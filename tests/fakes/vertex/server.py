"""Fake of Vertex AI: the rehearsal's server, and what it does not need: models, metadata, templates, tuning."""

from __future__ import annotations

import re
from email.message import Message
from urllib.parse import unquote

from tests.fakes.vertex.custom_jobs import ScriptedCustomJobs
from tests.fakes.vertex.metadata import PATH as METADATA
from tests.fakes.vertex.metadata import MetadataStore
from tests.fakes.vertex.models import Models
from tests.fakes.vertex.templates import API, FILES, Templates
from tests.fakes.vertex.tuning_jobs import TuningJobs
from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.messages import Json
from vlmpipe.rehearsal.vertex.server import Fault as Fault
from vlmpipe.rehearsal.vertex.server import VertexServer

MODELS = re.compile(
    r"/v1/(projects/[^/]+/locations/[^/]+)/models(?:/([^/:@]+)(@[^/:@]+)?)?(?::([a-zA-Z]+)|/(operations/[0-9]+))?"
)


class FakeVertex(VertexServer):
    """Everything of Vertex AI and of the template registry that vlmpipe calls."""

    known_query = VertexServer.known_query | {"contextId", "metadataStoreId", "tagId"}

    def __init__(self, project: str = "test-project", location: str = "us-central1") -> None:
        super().__init__(project, location, ScriptedCustomJobs)
        self.custom_jobs: ScriptedCustomJobs
        self.tuning_jobs = TuningJobs(self.parent)
        self.collections["hyperparameterTuningJobs"] = self.tuning_jobs.answer
        self.templates = Templates(project, location)
        self.models = Models(self.parent)
        self.metadata = MetadataStore(self.parent)

    def answer(self, method: str, path: str, query: dict[str, str], headers: Message, body: bytes) -> Json | bytes:
        if (host := headers.get("Host", "")) in (FILES, API):
            return self.templates.answer(method, host, path, query, headers, body)
        if match := METADATA.fullmatch(path):
            self.require_parent(match[1])
            return self.metadata.answer(method, match, query, body)
        if match := MODELS.fullmatch(unquote(path)):
            return self._models(method, match, query, body)
        return super().answer(method, path, query, headers, body)

    def _models(self, method: str, match: re.Match[str], query: dict[str, str], body: bytes) -> Json:
        parent, model_id, version, verb, operation = match.groups()
        self.require_parent(parent)
        version = (version or "").removeprefix("@")
        if (method, model_id, verb) == ("POST", None, "upload"):
            return self.models.upload(body)
        if (method, verb) == ("GET", None) and model_id and operation:
            return self.models.operation(f"{parent}/models/{model_id}/{operation}")
        if (method, verb) == ("GET", None) and model_id:
            return self.models.get(model_id, version)
        if (method, verb, version) == ("GET", "listVersions", "") and model_id:
            return self.models.list_versions(model_id, query)
        if (method, verb) == ("POST", "mergeVersionAliases") and model_id:
            return self.models.merge_aliases(model_id, version, body)
        raise ApiError(501, f"no such route in this fake: {method} {match[0]}")
