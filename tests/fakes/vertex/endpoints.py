"""Endpoints of the Vertex AI fake: models behind a traffic split, which answer raw predictions.

Rules are those that the messages of the API state (Endpoint, DeployedModel, DeployModelRequest, UndeployModelRequest).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from google.cloud.aiplatform_v1 import types as api
from google.cloud.aiplatform_v1beta1 import types as beta
from google.longrunning.operations_pb2 import Operation
from google.protobuf import empty_pb2, json_format
from google.rpc import status_pb2

from tests.fakes.chat_model import Refused, chat_completion
from tests.fakes.vertex.models import Models
from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.messages import as_dict, fields_of, parse, refuse_output_only
from vlmpipe.rehearsal.vertex.rules import check_display_name, check_encryption_key, check_labels

ENDPOINT_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?|[1-9][0-9]{0,8}")
OUTPUT_ONLY = {
    "name", "create_time", "update_time", "deployed_models", "model_deployment_monitoring_job",
    "dedicated_endpoint_dns", "satisfies_pzs", "satisfies_pzi",
}  # fmt: skip
OUTPUT_ONLY_OF_DEPLOYED = {"create_time", "model_version_id", "status", "private_endpoints"}
DEPLOYED_ID = re.compile(r"[0-9]{1,10}")
SHARED_MAX_BYTES, DEDICATED_MAX_BYTES = 1_500_000, 10_000_000
CUSTOM = re.compile(r"projects/[^/]+/locations/[^/]+/models/([^/@]+)@([0-9]+)")


class Endpoints:
    """State in memory. Each change is an operation that has ended when it is asked for the second time.

    Attributes:
        dedicated_host: where dedicated endpoints take requests.
        answers: what the model of a version answers, by its number.
        served_name: the name by which containers know their model.
        fail_next: what the next deployment's operation ends with; empty lets it pass.
        slow_next: how the next deployment ends once it is cancelled, before which it does not: "cancelled" or "done".
        refuses: HTTP status of all predictions; 0 answers them.
        sleeping: whether the last model of v1beta1 has min_replica_count 0, and `idle_s` its idle_scaledown_period.
        waking: how many predictions are refused while a replica starts.
    """

    def __init__(self, parent: str, models: Models, dedicated_host: str) -> None:
        self.dedicated_host = dedicated_host
        self.endpoints: dict[str, api.Endpoint] = {}
        self.answers: dict[str, Callable[[str], str]] = {}
        self.served_name = "digits"
        self.fail_next, self.slow_next, self.refuses = "", "", 0
        self.sleeping, self.idle_s, self.waking = False, None, 0
        self.predictions: list[str] = []  # versions, in the order of requests
        self._parent, self._models = parent, models
        self._operations: dict[str, Operation] = {}
        self._asked: set[str] = set()
        self._running: dict[str, Callable[[], None]] = {}  # what ends them

    def create(self, query: dict[str, str], body: bytes) -> dict[str, Any]:
        endpoint_id = query.get("endpointId", "")
        wanted = parse(api.Endpoint, body)
        refuse_output_only(wanted, OUTPUT_ONLY | {"traffic_split"})
        if not ENDPOINT_ID.fullmatch(endpoint_id):
            raise ApiError(400, f"endpoint_id: {endpoint_id!r} does not match {ENDPOINT_ID.pattern}")
        self._check(wanted)
        if endpoint_id in self.endpoints:
            raise ApiError(409, f"Endpoint {endpoint_id} already exists")
        wanted.name = f"{self._parent}/endpoints/{endpoint_id}"
        if wanted.dedicated_endpoint_enabled:
            wanted.dedicated_endpoint_dns = f"http://{self.dedicated_host}"
        self.endpoints[endpoint_id] = wanted
        return self._begun(endpoint_id, api.Endpoint(name=wanted.name))

    def get(self, endpoint_id: str) -> dict[str, Any]:
        return as_dict(self._known(endpoint_id))

    def delete(self, endpoint_id: str) -> dict[str, Any]:
        if self._known(endpoint_id).deployed_models:
            raise ApiError(400, f"The endpoint {endpoint_id} has deployed models")
        del self.endpoints[endpoint_id]
        return self._begun(endpoint_id, None)

    def update(self, endpoint_id: str, query: dict[str, str], body: bytes) -> dict[str, Any]:
        if query.get("updateMask") != "trafficSplit":
            raise ApiError(501, f"updateMask {query.get('updateMask')!r} is not known here")
        known = self._known(endpoint_id)
        split = dict(parse(api.Endpoint, body).traffic_split)
        self._check_split(known, split)
        known.traffic_split = split
        return as_dict(known)

    def deploy(self, endpoint_id: str, body: bytes, *, is_beta: bool = False) -> dict[str, Any]:
        if is_beta:
            body = self._as_v1(body)
        known, request = self._known(endpoint_id), parse(api.DeployModelRequest, body)
        model = request.deployed_model
        refuse_output_only(model, OUTPUT_ONLY_OF_DEPLOYED)
        if model.id and not DEPLOYED_ID.fullmatch(model.id):
            raise ApiError(400, f"deployed_model.id: {model.id!r} is not of 1 to 10 digits")
        match = CUSTOM.fullmatch(model.model)
        if not match:
            raise ApiError(400, f"deployed_model.model: {model.model!r} is no version of a model")
        container = self._models.version(match[1], match[2]).container_spec
        if container.invoke_route_prefix and not known.dedicated_endpoint_enabled:
            raise ApiError(400, "a model with invoke_route_prefix can only be deployed to a dedicated endpoint")
        resources = model.dedicated_resources
        if "dedicated_resources" not in fields_of(model) or not resources.machine_spec.machine_type:
            raise ApiError(400, "deployed_model.dedicated_resources: a machine type is required for custom models")
        lowest = 0 if is_beta and self.sleeping else 1
        if not lowest <= resources.min_replica_count <= (resources.max_replica_count or resources.min_replica_count):
            raise ApiError(400, "replica counts")
        if bool(resources.machine_spec.accelerator_type) != bool(resources.machine_spec.accelerator_count):
            raise ApiError(400, "accelerator_type and accelerator_count go together")
        split = dict(request.traffic_split)
        if split:
            self._check_split(known, split, new={"0"})
        if self.fail_next:
            said, self.fail_next = self.fail_next, ""
            return self._begun(endpoint_id, None, error=said)
        model.id = model.id or str(7000 + len(self._operations))
        model.model_version_id = match[2]

        def finish() -> None:
            known.deployed_models = [*known.deployed_models, model]
            if split:
                known.traffic_split = {model.id if one == "0" else one: share for one, share in split.items()}

        how, self.slow_next = self.slow_next, ""
        error = "The operation was cancelled." if how == "cancelled" else ""
        answer = (beta if is_beta else api).DeployModelResponse(deployed_model={"id": model.id})
        begun = self._begun(endpoint_id, answer, error=error)
        if how:
            self._running[begun["name"]] = finish if how == "done" else lambda: None
        else:
            finish()
        return begun

    def _as_v1(self, body: bytes) -> bytes:
        """A request of v1beta1, checked by the comments of its DedicatedResources, without what v1 does not have."""
        message = parse(beta.DeployModelRequest, body)
        resources = message.deployed_model.dedicated_resources
        initial, has_spec = resources.initial_replica_count, "scale_to_zero_spec" in fields_of(resources)
        self.sleeping = resources.min_replica_count == 0
        if self.sleeping and not 0 < initial <= resources.max_replica_count:
            raise ApiError(
                400, "initial_replica_count must be from 1 to max_replica_count where min_replica_count is 0"
            )
        if not self.sleeping and (initial or has_spec):
            raise ApiError(400, "initial_replica_count and scale_to_zero_spec are for min_replica_count 0")
        for name in fields_of(resources.scale_to_zero_spec):
            period = getattr(resources.scale_to_zero_spec, name)
            if not 300 <= period.total_seconds() <= 28800:
                raise ApiError(400, f"scale_to_zero_spec.{name}: not from 300 to 28800 seconds")
        self.idle_s = resources.scale_to_zero_spec.idle_scaledown_period.total_seconds() if has_spec else None
        resources.initial_replica_count = 0
        del resources.scale_to_zero_spec
        return json.dumps(as_dict(message)).encode()

    def undeploy(self, endpoint_id: str, body: bytes) -> dict[str, Any]:
        known, request = self._known(endpoint_id), parse(api.UndeployModelRequest, body)
        gone = request.deployed_model_id
        if not gone:
            raise ApiError(400, "Required field deployed_model_id is missing")
        left = [one for one in known.deployed_models if one.id != gone]
        if len(left) == len(known.deployed_models):
            raise ApiError(404, f"The deployed model does not exist: {gone}")
        split = dict(request.traffic_split) or dict(known.traffic_split)
        if left and split.get(gone):
            raise ApiError(400, f"The deployed model {gone} has traffic")
        if request.traffic_split:
            self._check_split(known, split)
        known.deployed_models = left
        known.traffic_split = {one: share for one, share in split.items() if left and one != gone}
        return self._begun(endpoint_id, api.UndeployModelResponse())

    def raw_predict(self, endpoint_id: str, body: bytes, host: str) -> tuple[dict[str, Any], dict[str, str]]:
        """The answer and its headers; models take turns by their shares. `host` is where the request arrived."""
        known = self._known(endpoint_id)
        dedicated = known.dedicated_endpoint_enabled
        if dedicated != (host == self.dedicated_host):
            raise ApiError(
                400, f"{endpoint_id} takes no requests at {host}: it is {'' if dedicated else 'not '}dedicated"
            )
        max_bytes = DEDICATED_MAX_BYTES if dedicated else SHARED_MAX_BYTES
        if len(body) > max_bytes:
            raise ApiError(400, f"The request size ({len(body)} bytes) exceeds {max_bytes / 1e6:.3f}MB limit.")
        if self.waking:
            self.waking -= 1
            raise ApiError(429, "no replica has started")
        if self.refuses:
            raise ApiError(self.refuses, "the endpoint takes no traffic")
        split = {one: share for one, share in known.traffic_split.items() if share}
        if not split:
            raise ApiError(400, f"Endpoint {endpoint_id} has no model with traffic")
        place = len(self.predictions) * 37 % 100  # 37 and 100 share no factor: every percent has its turn
        takers = [deployed_id for deployed_id, share in sorted(split.items()) for _ in range(share)]
        (model,) = (one for one in known.deployed_models if one.id == takers[place])
        self.predictions.append(model.model_version_id)
        try:
            answer = chat_completion(body, self.served_name, self.answers[model.model_version_id])
        except Refused as error:
            raise ApiError(error.status, error.message) from None
        return answer, {"X-Vertex-AI-Endpoint-Id": endpoint_id, "X-Vertex-AI-Deployed-Model-Id": model.id}

    def operation(self, name: str) -> dict[str, Any]:
        if name not in self._operations:
            raise ApiError(404, f"The operation does not exist: {name}")
        if name not in self._asked or name in self._running:
            self._asked.add(name)
            return {"name": name}
        return dict(json_format.MessageToDict(self._operations[name]))

    def cancel(self, name: str) -> dict[str, Any]:
        """operations.cancel: the service tries, and the operation may still end well."""
        if name not in self._operations:
            raise ApiError(404, f"The operation does not exist: {name}")
        self._running.pop(name, lambda: None)()
        return {}

    def _begun(self, endpoint_id: str, answer: Any, *, error: str = "") -> dict[str, Any]:
        name = f"{self._parent}/endpoints/{endpoint_id}/operations/{len(self._operations) + 1}"
        operation = Operation(name=name, done=True)
        if error:
            operation.error.CopyFrom(status_pb2.Status(code=9, message=error))
        else:
            operation.response.Pack(empty_pb2.Empty() if answer is None else type(answer).pb(answer))
        self._operations[name] = operation
        return {"name": name}

    def _known(self, endpoint_id: str) -> api.Endpoint:
        if endpoint_id not in self.endpoints:
            raise ApiError(404, f"The Endpoint does not exist: {endpoint_id}")
        return self.endpoints[endpoint_id]

    def _check(self, wanted: api.Endpoint) -> None:
        check_display_name(wanted.display_name)
        check_labels(wanted.labels)
        check_encryption_key(wanted, self._parent.rpartition("/")[2])
        timeout = wanted.client_connection_config.inference_timeout
        problems = {
            "only one of network, enable_private_service_connect and private_service_connect_config": len(
                fields_of(wanted) & {"network", "enable_private_service_connect", "private_service_connect_config"}
            )
            > 1,
            "client_connection_config.inference_timeout: at most an hour": bool(timeout)
            and timeout.total_seconds() > 3600,
        }
        for said, wrong in problems.items():
            if wrong:
                raise ApiError(400, said)

    @staticmethod
    def _check_split(known: api.Endpoint, split: dict[str, int], new: set[str] | None = None) -> None:
        if not split:
            return  # the endpoint is not to accept any traffic
        there = {one.id for one in known.deployed_models} | (new or set())
        if unknown := split.keys() - there:
            raise ApiError(400, f"traffic_split: no deployed models {sorted(unknown)}")
        if sum(split.values()) != 100 or any(share < 0 for share in split.values()):
            raise ApiError(400, f"traffic_split: {json.dumps(split)} does not add up to 100")
