"""Fake of Cloud Run's API and of the services that it makes: strict by `rules`, in memory, on one port."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from google.cloud.run_v2 import types as api
from google.iam.v1 import policy_pb2
from google.longrunning.operations_pb2 import Operation
from google.protobuf import json_format
from google.rpc import status_pb2

from tests.fakes.chat_model import Refused, chat_completion
from tests.fakes.cloud_run.rules import LABEL, problems, traffic_problems
from vlmpipe.rehearsal.http_server import ApiError, Handler, LocalServer
from vlmpipe.rehearsal.vertex.messages import Json, as_dict, parse, refuse_output_only
from vlmpipe.rehearsal.vertex.server import error_body

SERVICES = re.compile(r"/v2/(projects/[^/]+/locations/([^/]+))/services(?:/([^/:]+))?(:getIamPolicy)?")
OPERATIONS = re.compile(r"/v2/(projects/[^/]+/locations/[^/]+/operations/[^/:]+)")
SERVICE_ID = re.compile(r"[a-z]([a-z0-9-]{0,47}[a-z0-9])?")  # P: fewer than 50 characters, no hyphen at the end
OUTPUT_ONLY = {
    "uid", "generation", "create_time", "update_time", "creator", "last_modifier", "urls", "observed_generation",
    "terminal_condition", "conditions", "latest_ready_revision", "latest_created_revision", "traffic_statuses", "uri",
    "reconciling",
}  # fmt: skip
MASKS = {"template", "scaling", "traffic", "annotations", "labels"}
MAX_BYTES = 32 * 2**20  # D, quotas: of a request by HTTP/1


@dataclass
class _Kept:
    service: api.Service
    revisions: dict[str, api.RevisionTemplate] = field(default_factory=dict)
    etag: int = 0
    ready: str = ""


class FakeCloudRun(LocalServer):
    """The API and the services.

    Attributes:
        answers: what a revision answers, by its place among those of all services, from 1 on.
        served_name: the name by which containers know their model.
        fail_next: why the next revision does not become ready; empty lets it.
        refuses: HTTP status of answers of services; 0 answers.
        waking: how many questions are refused while an instance starts.
        policy: members of roles/run.invoker.
        asked: the revisions that were asked, in order.
    """

    def __init__(self, location: str = "us-central1") -> None:
        super().__init__(_Handler)
        self.location, self.parent = location, f"projects/test-project/locations/{location}"
        self.services: dict[str, _Kept] = {}
        self.answers: dict[int, Callable[[str], str]] = {}
        self.served_name, self.fail_next, self.refuses, self.waking = "digits", "", 0, 0
        self.policy: list[str] = []
        self.asked: list[str] = []
        self.made: list[str] = []  # revisions, in order
        self._operations: dict[str, Operation] = {}

    # ---- the API

    def create(self, query: dict[str, str], body: bytes) -> Json:
        service_id, service = query.get("serviceId", ""), parse(api.Service, body)
        if not SERVICE_ID.fullmatch(service_id):
            raise ApiError(400, f"service_id: {service_id!r} does not match {SERVICE_ID.pattern}")
        if service_id in self.services:
            raise ApiError(409, f"Resource '{service_id}' already exists.")
        refuse_output_only(service, OUTPUT_ONLY)
        service.name = f"{self.parent}/services/{service_id}"
        kept = _Kept(service)
        self._check(service_id, service, kept)
        self.services[service_id] = kept
        return self._reconciled(kept, self._rolled_out(service_id, kept))

    def update(self, service_id: str, query: dict[str, str], body: bytes) -> Json:
        kept, changed = self._known(service_id), parse(api.Service, body)
        masks = set(filter(None, query.get("updateMask", "").split(",")))
        if not masks or masks - MASKS:
            raise ApiError(400, f"updateMask: {sorted(masks - MASKS)} are not known here, or none is given")
        refuse_output_only(changed, OUTPUT_ONLY)
        if changed.etag and changed.etag != f'"{kept.etag}"':
            raise ApiError(409, "the service was changed in between", reason="ABORTED")
        wanted = api.Service(kept.service)
        for mask in masks:
            setattr(wanted, mask, getattr(changed, mask))
        self._check(service_id, wanted, kept)
        kept.service = wanted
        error = self._rolled_out(service_id, kept) if "template" in masks else ""
        return self._reconciled(kept, error)

    def delete(self, service_id: str) -> Json:
        kept = self._known(service_id)
        del self.services[service_id]
        return self._reconciled(kept, "")

    def get(self, service_id: str) -> Json:
        return as_dict(self._shown(self._known(service_id)))

    def iam_policy(self, service_id: str) -> Json:
        self._known(service_id)
        bindings = [policy_pb2.Binding(role="roles/run.invoker", members=self.policy)] if self.policy else []
        return dict(json_format.MessageToDict(policy_pb2.Policy(bindings=bindings)))

    def operation(self, name: str) -> Json:
        if name not in self._operations:
            raise ApiError(404, f"Operation {name} not found")
        return dict(json_format.MessageToDict(self._operations[name]))

    def traffic(self, service_id: str) -> dict[int, int]:
        """Shares of the revisions that have any, by their place among all that were made, from 1 on."""
        if service_id not in self.services:
            return {}
        kept, shares = self.services[service_id], dict[int, int]()
        for target in kept.service.traffic:
            place = self.made.index(target.revision or kept.ready) + 1
            shares[place] = shares.get(place, 0) + target.percent
        return {place: share for place, share in shares.items() if share}

    def _check(self, service_id: str, service: api.Service, kept: _Kept) -> None:
        for problem in problems(service, self.location):
            raise ApiError(400, problem)
        revision = service.template.revision
        if not LABEL.fullmatch(revision) or not revision.startswith(f"{service_id}-"):
            raise ApiError(400, f"template.revision: {revision} is no label that begins with {service_id}-")
        if revision in kept.revisions and kept.revisions[revision] != service.template:
            raise ApiError(409, f"Revision named '{revision}' with different configuration already exists.")
        for problem in traffic_problems(service_id, list(service.traffic), {*kept.revisions}):
            raise ApiError(400, problem)

    def _rolled_out(self, service_id: str, kept: _Kept) -> str:
        """Make the template's revision. Returns why it is not ready; empty where it is."""
        revision = kept.service.template.revision
        why, self.fail_next = self.fail_next, ""
        if revision not in kept.revisions:
            kept.revisions[revision] = api.RevisionTemplate(kept.service.template)
            self.made.append(revision)
        if not why:
            kept.ready = revision
        return why

    def _reconciled(self, kept: _Kept, error: str) -> Json:
        kept.etag += 1
        name = f"{self.parent}/operations/{len(self._operations) + 1}"
        operation = Operation(name=name, done=True)
        if error:
            operation.error.CopyFrom(status_pb2.Status(code=9, message=error))
        else:
            operation.response.Pack(api.Service.pb(self._shown(kept)))
        self._operations[name] = operation
        return {"name": name}

    def _shown(self, kept: _Kept) -> api.Service:
        shown = api.Service(kept.service)
        shown.etag, shown.uri = f'"{kept.etag}"', f"{self.endpoint}/services/{kept.service.name.rpartition('/')[2]}"
        if kept.ready:
            shown.latest_ready_revision = f"{kept.service.name}/revisions/{kept.ready}"
        shown.traffic_statuses = [
            api.TrafficTargetStatus(
                type_=target.type_,
                revision=target.revision,
                percent=target.percent,
                tag=target.tag,
                uri=f"{shown.uri}/tags/{target.tag}" if target.tag and kept.ready else "",
            )
            for target in kept.service.traffic
        ]
        return shown

    def _known(self, service_id: str) -> _Kept:
        if service_id not in self.services:
            raise ApiError(404, f"Resource '{service_id}' of kind 'SERVICE' does not exist.")
        return self.services[service_id]

    # ---- the services

    def chat(self, service_id: str, tag: str, body: bytes) -> Json:
        kept = self._known(service_id)
        if len(body) > MAX_BYTES:
            raise ApiError(413, "Request Entity Too Large")
        targets = [target for target in kept.service.traffic if target.tag == tag]
        if not targets:
            raise ApiError(404, f"there is no tag {tag}")
        if self.waking:
            self.waking -= 1
            raise ApiError(503, "no instance has started")
        if self.refuses:
            raise ApiError(self.refuses, "The request was not authenticated.")
        revision = targets[0].revision or kept.ready
        self.asked.append(revision)
        try:
            return chat_completion(body, self.served_name, self.answers[self.made.index(revision) + 1])
        except Refused as error:
            raise ApiError(error.status, error.message) from None

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> Json:
        query.pop("$alt", None)
        if match := re.fullmatch(r"/services/([^/]+)/tags/([^/]+)/v1/chat/completions", path):
            return self.chat(match[1], match[2], body)
        if match := OPERATIONS.fullmatch(path):
            return self.operation(match[1])
        match = SERVICES.fullmatch(path)
        if not match or match[1] != self.parent:
            raise ApiError(404, f"nothing at {path}")
        service_id = match[3] or ""
        if method == "GET" and match[4]:
            return self.iam_policy(service_id)
        if method == "POST" and not service_id:
            return self.create(query, body)
        if method == "GET" and service_id:
            return self.get(service_id)
        if method == "PATCH" and service_id:
            return self.update(service_id, query, body)
        if method == "DELETE" and service_id:
            return self.delete(service_id)
        raise ApiError(501, f"no such route in this fake: {method} {path}")


class _Handler(Handler):
    fake: Any

    def respond(self, body: bytes) -> None:
        path, query = self.path_and_query()
        try:
            with self.fake.lock:
                code, content = 200, self.fake.answer(self.command, path, query, body)
        except ApiError as error:
            code, content = error.code, error_body(error)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send(code, {"Content-Type": "application/json", "Content-Length": str(len(data))})
        self.wfile.write(data)
