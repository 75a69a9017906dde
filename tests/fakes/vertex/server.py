"""Fake of Vertex AI: the rehearsal's server, and what it does not need: models, metadata, templates, tuning."""

from __future__ import annotations

import datetime as dt
import re
import socket
import struct
import threading
from dataclasses import dataclass
from email.message import Message
from typing import Literal
from urllib.parse import unquote

from google.cloud.aiplatform_v1.types import PipelineJob, PipelineTaskDetail

from tests.fakes.faulty_server import FaultyServer
from tests.fakes.vertex.custom_jobs import ScriptedCustomJobs
from tests.fakes.vertex.endpoints import Endpoints
from tests.fakes.vertex.metadata import PATH as METADATA
from tests.fakes.vertex.metadata import MetadataStore
from tests.fakes.vertex.models import Models
from tests.fakes.vertex.templates import API, FILES, Templates
from tests.fakes.vertex.tuning_jobs import TuningJobs
from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.messages import Json
from vlmpipe.rehearsal.vertex.server import VertexHandler, VertexServer, error_body

MODELS = re.compile(
    r"/v1/(projects/[^/]+/locations/[^/]+)/models(?:/([^/:@]+)(@[^/:@]+)?)?(?::([a-zA-Z]+)|/(operations/[0-9]+))?"
)
ENDPOINTS = re.compile(
    r"/v1(?:beta1)?/(projects/[^/]+/locations/[^/]+)/endpoints(?:/([^/:@]+))?(?::([a-zA-Z]+)|/(operations/[0-9]+)(:cancel)?)?"
)


@dataclass
class Fault:
    """Break the next `times` requests of this method.

    status: answer `code` and do nothing. drop_before: cut the connection, nothing done. drop_after: do it, then cut.
    reset: like drop_before, with a TCP reset.
    """

    action: Literal["status", "drop_before", "drop_after", "reset"]
    method: str = "POST"
    times: int = 1
    code: int = 503
    message: str = "fault rule"
    reason: str = ""  # of the ErrorInfo that the real service adds, such as SERVICE_DISABLED

    def matches(self, method: str, _path: str, _body: bytes) -> bool:
        return method == self.method


class FakeVertex(FaultyServer, VertexServer):
    """Everything of Vertex AI and of the template registry that vlmpipe calls."""

    known_query = VertexServer.known_query | {"contextId", "endpointId", "metadataStoreId", "tagId"}

    def __init__(self, project: str = "test-project", location: str = "us-central1") -> None:
        super().__init__(project, location, jobs=ScriptedCustomJobs, handler=_FaultyHandler)
        self.latency_s = 0.0  # before each answer
        self.custom_jobs: ScriptedCustomJobs
        self.tuning_jobs = TuningJobs(self.parent)
        self.collections["hyperparameterTuningJobs"] = self.tuning_jobs.answer
        self.templates = Templates(project, location)
        self.models = Models(self.parent)
        self.answer_headers: dict[str, str] = {}  # of the request that is being answered
        # Another name of this machine, so that the address of a request tells which kind of endpoint it is for.
        self.endpoints = Endpoints(
            self.parent, self.models, self.endpoint.removeprefix("http://").replace("127.0.0.1", "localhost")
        )
        self.metadata = MetadataStore(self.parent)

    def print(self, job: PipelineJob, task_name: str, *texts: str, replica: str = "workerpool0-0") -> None:
        """Log entries of the CustomJob of a task; of a job step those of the job that it started."""
        (task,) = (task for task in job.job_detail.task_details if task.task_name == task_name)
        job_id = re.findall(r"customJobs/([0-9]+)", str(PipelineTaskDetail.pb(task)))[-1]
        entries = self.runs.entries
        for text in texts:
            moment = job.create_time + dt.timedelta(seconds=len(entries))
            entries.append(
                {
                    "insertId": f"id{len(entries)}",
                    "timestamp": moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                    "resource": {"type": "ml_job", "labels": {"job_id": job_id, "task_name": replica}},
                    **({"jsonPayload": {"message": text}} if len(entries) % 2 else {"textPayload": text}),
                }
            )

    def answer(self, method: str, path: str, query: dict[str, str], headers: Message, body: bytes) -> Json | bytes:
        if (host := headers.get("Host", "")) in (FILES, API):
            return self.templates.answer(method, host, path, query, headers, body)
        if match := METADATA.fullmatch(path):
            self.require_parent(match[1])
            return self.metadata.answer(method, match, query, body)
        if match := MODELS.fullmatch(unquote(path)):
            return self._models(method, match, query, body)
        if match := ENDPOINTS.fullmatch(path):
            return self._endpoints(method, match, query, headers, body)
        return super().answer(method, path, query, headers, body)

    def _endpoints(
        self, method: str, match: re.Match[str], query: dict[str, str], headers: Message, body: bytes
    ) -> Json:
        parent, endpoint_id, verb, operation, cancel = match.groups()
        self.require_parent(parent)
        if (method, operation) == ("GET", None) and endpoint_id and not verb:
            return self.endpoints.get(endpoint_id)
        if method == "POST" and cancel:
            return self.endpoints.cancel(f"{parent}/endpoints/{endpoint_id}/{operation}")
        if method == "GET" and operation and not cancel:
            return self.endpoints.operation(f"{parent}/endpoints/{endpoint_id}/{operation}")
        if method == "POST" and not endpoint_id and not verb:
            return self.endpoints.create(query, body)
        is_beta = match[0].startswith("/v1beta1/")
        if (method, verb) == ("POST", "deployModel"):
            return self.endpoints.deploy(endpoint_id, body, is_beta=is_beta)
        if is_beta:
            raise ApiError(501, f"no such route of v1beta1 in this fake: {method} {match[0]}")
        if (method, verb) == ("POST", "undeployModel"):
            return self.endpoints.undeploy(endpoint_id, body)
        if (method, verb) == ("POST", "rawPredict"):
            answer, self.answer_headers = self.endpoints.raw_predict(endpoint_id, body, headers.get("Host", ""))
            return answer
        if method == "PATCH" and endpoint_id and not verb:
            return self.endpoints.update(endpoint_id, query, body)
        if method == "DELETE" and endpoint_id and not verb:
            return self.endpoints.delete(endpoint_id)
        raise ApiError(501, f"no such route in this fake: {method} {match[0]}")

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


class _FaultyHandler(VertexHandler):
    fake: FakeVertex

    def respond(self, body: bytes) -> None:
        threading.Event().wait(self.fake.latency_s)  # tests replace time.sleep
        fault = self.fake.take_fault(self.command, self.path, body)
        if fault and fault.action in ("drop_before", "reset"):
            self._cut(reset=fault.action == "reset")
        elif fault and fault.action == "status":
            self.send_answer(fault.code, error_body(ApiError(fault.code, fault.message, reason=fault.reason)))
        else:
            answer = self.answer(body)
            if fault and fault.action == "drop_after":
                self._cut(reset=False)
            else:
                self.send_answer(*answer)

    def send(self, code: int, headers: dict[str, str]) -> None:
        super().send(code, {**headers, **self.fake.answer_headers})
        self.fake.answer_headers = {}

    def _cut(self, *, reset: bool) -> None:
        if reset:  # closing with unsent time 0 sends RST instead of FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection = True
