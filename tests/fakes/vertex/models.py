"""The model registry of the Vertex AI fake: uploads as operations, versions, aliases.

Rules are those that the messages of the API state (Model, UploadModelRequest, MergeVersionAliasesRequest, v1).
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

from google.cloud.aiplatform_v1 import types as api
from google.longrunning.operations_pb2 import Operation
from google.protobuf import json_format
from google.rpc import status_pb2

from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.messages import as_dict, fields_of, parse, refuse_output_only
from vlmpipe.rehearsal.vertex.rules import check_display_name, check_encryption_key, check_labels, check_variables

MODEL_ID = re.compile(r"[a-z_][a-z0-9_-]{0,62}")
ALIAS = re.compile(r"[a-z][a-zA-Z0-9-]{0,126}[a-z0-9]")
IMAGE = re.compile(r"([a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)/\S+")
ARTIFACTS = re.compile(r"gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]/.+")
OUTPUT_ONLY = {
    "name", "version_id", "version_create_time", "version_update_time", "create_time", "update_time", "deployed_models",
    "training_pipeline", "supported_export_formats", "supported_deployment_resources_types", "original_model_info",
    "supported_input_storage_formats", "supported_output_storage_formats", "model_source_info", "metadata_artifact",
    "satisfies_pzs", "satisfies_pzi",
}  # fmt: skip
PAGE = 2  # small, so that paging is met


class Models:
    """State in memory. An upload is an operation that ends when somebody asks for it the second time.

    Attributes:
        fail_next: what the next upload's operation ends with instead of a version; empty lets it pass.
    """

    def __init__(self, parent: str) -> None:
        self.models: dict[str, list[api.Model]] = {}  # by id, in the order of their versions
        self.fail_next = ""
        self._parent = parent
        self._operations: dict[str, Operation] = {}
        self._asked: set[str] = set()

    def upload(self, body: bytes) -> dict[str, Any]:
        request = parse(api.UploadModelRequest, body)
        self._check(request)
        model_id = self._target(request)
        name = f"{self._parent}/models/{model_id}/operations/{len(self._operations) + 1}"
        operation = Operation(name=name, done=True)
        if self.fail_next:
            operation.error.CopyFrom(status_pb2.Status(code=9, message=self.fail_next))
            self.fail_next = ""
        else:
            made = self._add(model_id, request.model)
            answer = api.UploadModelResponse(
                model=f"{self._parent}/models/{model_id}", model_version_id=made.version_id
            )
            operation.response.Pack(api.UploadModelResponse.pb(answer))
        self._operations[name] = operation
        return {"name": name}

    def operation(self, name: str) -> dict[str, Any]:
        if name not in self._operations:
            raise ApiError(404, f"The operation does not exist: {name}")
        if name not in self._asked:
            self._asked.add(name)
            return {"name": name}
        return dict(json_format.MessageToDict(self._operations[name]))

    def get(self, model_id: str, version: str) -> dict[str, Any]:
        return as_dict(self._known(model_id, version or "default"))

    def version(self, model_id: str, version: str) -> api.Model:
        """One version. Raises ApiError (404) for an unknown one."""
        return self._known(model_id, version)

    def list_versions(self, model_id: str, query: dict[str, str]) -> dict[str, Any]:
        if unknown := query.keys() - {"pageToken", "$alt"}:
            raise ApiError(501, f"a query that this fake does not know: {sorted(unknown)}")
        found = list(reversed(self._versions(model_id)))  # the service promises no order
        start = int(query.get("pageToken") or 0)
        answer: dict[str, Any] = {"models": [as_dict(one) for one in found[start : start + PAGE]]}
        if start + PAGE < len(found):
            answer["nextPageToken"] = str(start + PAGE)
        return answer

    def merge_aliases(self, model_id: str, version: str, body: bytes) -> dict[str, Any]:
        request = parse(api.MergeVersionAliasesRequest, body)
        if not version.isdigit():
            raise ApiError(400, f"name: a version ID must be explicitly included, found {version!r}")
        if not request.version_aliases:
            raise ApiError(400, "Required field version_aliases is missing")
        target = self._known(model_id, version)
        for given in request.version_aliases:
            alias = given.removeprefix("-")
            if not ALIAS.fullmatch(alias):
                raise ApiError(400, f"version_aliases: {alias!r} does not match {ALIAS.pattern}")
            if given == "-default":
                raise ApiError(400, "the default alias can be moved, not removed")
            if given.startswith("-"):
                target.version_aliases = [one for one in target.version_aliases if one != alias]
            else:
                self._move(model_id, alias, target)
        return as_dict(target)

    def _target(self, request: api.UploadModelRequest) -> str:
        """The id of the model that gets the version."""
        if request.parent_model:
            prefix = f"{self._parent}/models/"
            if request.model_id or not request.parent_model.startswith(prefix):
                raise ApiError(400, f"parent_model {request.parent_model!r}, model_id {request.model_id!r}")
            model_id = request.parent_model.removeprefix(prefix)
            self._versions(model_id)
            return model_id
        if request.model_id and not MODEL_ID.fullmatch(request.model_id):
            raise ApiError(400, f"model_id: {request.model_id!r} does not match {MODEL_ID.pattern}")
        if request.model_id in self.models:
            raise ApiError(409, f"Model {request.model_id} already exists")
        return request.model_id or str(1000 + len(self.models))

    def _add(self, model_id: str, model: api.Model) -> api.Model:
        before = self.models.setdefault(model_id, [])
        made = api.Model(model)
        made.name, made.version_id = f"{self._parent}/models/{model_id}", str(len(before) + 1)
        made.create_time = made.version_create_time = dt.datetime.now(dt.UTC)
        wanted, made.version_aliases = list(model.version_aliases), []
        before.append(made)
        for alias in [*wanted, *(["default"] if len(before) == 1 else [])]:
            self._move(model_id, alias, made)
        return made

    def _move(self, model_id: str, alias: str, target: api.Model) -> None:
        """An alias names one version."""
        for one in self.models[model_id]:
            one.version_aliases = [name for name in one.version_aliases if name != alias]
        target.version_aliases = [*target.version_aliases, alias]

    def _versions(self, model_id: str) -> list[api.Model]:
        if model_id not in self.models:
            raise ApiError(404, f"The Model does not exist: {model_id}")
        return self.models[model_id]

    def _known(self, model_id: str, version: str) -> api.Model:
        for one in self._versions(model_id):
            if version == one.version_id or version in one.version_aliases:
                return one
        raise ApiError(404, f"The Model does not exist: {model_id}@{version}")

    def _check(self, request: api.UploadModelRequest) -> None:
        model, container = request.model, request.model.container_spec
        refuse_output_only(model, OUTPUT_ONLY)
        check_display_name(model.display_name)
        check_labels(model.labels)
        check_encryption_key(model, self._parent.rpartition("/")[2])
        check_variables(container.env, "container_spec")
        problems = {
            "model.container_spec: required for a custom model": "container_spec" not in fields_of(model),
            f"image_uri: {container.image_uri!r} is not in a registry of Google": not IMAGE.fullmatch(
                container.image_uri
            ),
            f"artifact_uri: {model.artifact_uri!r}": not ARTIFACTS.fullmatch(model.artifact_uri),
            "version_aliases": not all(ALIAS.fullmatch(alias) for alias in model.version_aliases),
            "ports: from 1 to 65535": not all(0 < port.container_port < 65536 for port in container.ports),
            "routes start with a slash": not all(
                not route or route.startswith("/") for route in (container.predict_route, container.health_route)
            ),
            "only one of predict_route and invoke_route_prefix": bool(
                container.predict_route and container.invoke_route_prefix
            ),
            "invoke_route_prefix: /* is the only supported value": container.invoke_route_prefix not in ("", "/*"),
            "deployment_timeout: limit is 2 hours": not 0 <= container.deployment_timeout.total_seconds() <= 7200,
            "shared_memory_size_mb: not negative": container.shared_memory_size_mb < 0,
            "a probe's timeout_seconds: at least its period_seconds": not all(
                0 <= probe.period_seconds <= max(probe.timeout_seconds, 1)
                for probe in (container.startup_probe, container.health_probe, container.liveness_probe)
            ),
        }
        for said, wrong in problems.items():
            if wrong:
                raise ApiError(400, said)
