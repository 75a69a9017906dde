"""A small, strict stand-in for Vertex AI: pipeline jobs, schedules, custom jobs and logs, over REST.

It parses each request into the API's own message, and the pipeline in it into kfp's, and refuses what either does not
know. It checks what the documentation says that the real service checks: names, types of parameters, forms of URIs.
Requests outside of this are answered 501.

    with VertexServer("my-project", "us-central1") as server:
        os.environ["VLMPIPE_VERTEX_ENDPOINT"] = server.endpoint
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from email.message import Message

from google.cloud.aiplatform_v1.types import PipelineJob
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from vlmpipe.rehearsal.http_server import ApiError, Handler, LocalServer
from vlmpipe.rehearsal.vertex.custom_jobs import CustomJobs
from vlmpipe.rehearsal.vertex.messages import INVALID, Call, Json, as_dict, fields_of, parse, refuse_output_only
from vlmpipe.rehearsal.vertex.rules import (
    check_account_and_network,
    check_display_name,
    check_encryption_key,
    check_labels,
    check_private_connect,
)
from vlmpipe.rehearsal.vertex.schedules import Schedules
from vlmpipe.rehearsal.vertex.scripted_runs import ScriptedRuns

STATUS = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "ALREADY_EXISTS",
    429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE",
}  # fmt: skip
JOB_ID = re.compile(r"[a-z][-a-z0-9]{0,126}")  # "less than 128 characters"
SCHEMAS = ("2.0.0", "2.1.0")  # that RuntimeConfig's comments name
BILLING_LABEL = "vertex-ai-pipelines-run-billing-id"  # reserved: a value of the user's is overridden
OUTPUT_ONLY = {
    "name", "create_time", "start_time", "end_time", "update_time", "state", "job_detail", "error", "template_metadata",
    "schedule_name",
}  # fmt: skip
TEMPLATE = re.compile(r"https://[a-z0-9-]+-kfp\.pkg\.dev/[^/]+/[^/]+/[^/]+/sha256:[0-9a-f]{64}")
RESOURCE = re.compile(r"/v1/(projects/[^/]+/locations/[^/]+)/([a-zA-Z]+)(?:/([^/:]+))?(?::([a-zA-Z]+))?")


class VertexServer(LocalServer):
    """One project in one location, with its state in memory."""

    known_query = frozenset({"pipelineJobId", "$alt", "filter", "pageToken", "updateMask"})

    def __init__(
        self,
        project: str,
        location: str,
        *,
        jobs: type[CustomJobs] = CustomJobs,
        handler: type[Handler] | None = None,
    ) -> None:
        super().__init__(handler or VertexHandler)
        self.parent = f"projects/{project}/locations/{location}"
        self.parents = {self.parent}  # that requests may name; custom jobs may be in another region
        self.jobs: dict[str, PipelineJob] = {}
        self.schedules = Schedules(self.parent, lambda job: check_job(job, location))
        self.custom_jobs = jobs(self.parent)
        self.runs = ScriptedRuns(project, self.custom_jobs)
        self.collections: dict[str, Callable[[Call], Json]] = {
            "pipelineJobs": self._pipeline_jobs,
            "schedules": self.schedules.answer,
            "customJobs": self.custom_jobs.answer,
        }

    def answer(self, method: str, path: str, query: dict[str, str], headers: Message, body: bytes) -> Json | bytes:
        """The answer to a request. Raises ApiError for what the real service refuses."""
        if unknown := query.keys() - self.known_query:
            raise ApiError(400, f"{INVALID} Unknown name {sorted(unknown)}: Cannot bind query parameter.")
        if method == "POST" and path == "/v2/entries:list":
            return self.runs.list_entries(body)
        match = RESOURCE.fullmatch(path)
        if not match or match[2] not in self.collections:
            raise ApiError(501, f"no such route in this fake: {method} {path}")
        self.require_parent(match[1])
        parent, collection, number, verb = match.groups(default="")
        return self.collections[collection](Call(method, parent, collection, number, verb, query, body))

    def _pipeline_jobs(self, call: Call) -> Json:
        return call.route(
            {
                ("POST", False, ""): lambda: as_dict(
                    self.create(call.parent, call.query.get("pipelineJobId", ""), call.body)
                ),
                ("GET", True, ""): lambda: as_dict(self._advanced(self._known(call.name))),
                ("POST", True, "cancel"): lambda: self.runs.cancel(self._known(call.name), call),
            }
        )

    def create(self, parent: str, job_id: str, body: bytes) -> PipelineJob:
        """pipelineJobs.create. Raises ApiError for what the real service refuses."""
        if not JOB_ID.fullmatch(job_id):
            raise ApiError(400, f"pipeline_job_id: {job_id!r} does not match {JOB_ID.pattern}")
        job = parse(PipelineJob, body)
        check_job(job, parent.rpartition("/")[2])
        name = f"{parent}/pipelineJobs/{job_id}"
        if name in self.jobs:
            raise ApiError(409, f"PipelineJob {name} already exists")
        job.name = name
        job.labels = {**job.labels, BILLING_LABEL: str(7000 + len(self.jobs))}
        self.runs.begin(job)
        self.jobs[name] = job
        return job

    def _advanced(self, job: PipelineJob) -> PipelineJob:
        self.runs.advance(job)
        return job

    def _known(self, name: str) -> PipelineJob:
        if name not in self.jobs:
            raise ApiError(404, f"The PipelineJob does not exist: {name}")
        return self.jobs[name]

    def require_parent(self, parent: str) -> None:
        """Raise ApiError for another project or location."""
        if parent.split("/")[1] != self.parent.split("/")[1]:
            # The real service does not tell strangers which projects exist.
            raise ApiError(403, f"Permission denied on resource {parent} (or it may not exist).")
        if parent not in self.parents:
            raise ApiError(404, f"The location {parent} does not exist")


def check_job(job: PipelineJob, location: str) -> None:
    """Raise ApiError for what the real service refuses in a pipeline job."""
    refuse_output_only(job, OUTPUT_ONLY)
    check_display_name(job.display_name)
    for field in ("pipeline_spec", "runtime_config"):
        if field not in fields_of(job):
            raise ApiError(400, f"Required field {field} is missing")
    output = job.runtime_config.gcs_output_directory
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/.*)?", output):
        raise ApiError(400, f"runtime_config.gcs_output_directory: not a gs:// path: {output!r}")
    if job.runtime_config.parameters:
        raise ApiError(400, "runtime_config.parameters: deprecated, for schema 2.0.0 or lower")
    check_labels(job.labels)
    check_account_and_network(job.service_account, job.network)
    check_encryption_key(job, location)
    check_private_connect(job.psc_interface_config)
    if job.template_uri and not TEMPLATE.fullmatch(job.template_uri):
        # With a tag it looks up the version as its own agent, or fails (googleapis/python-aiplatform, issue 2181).
        raise ApiError(500, f"template_uri {job.template_uri}: no version")
    if job.network and job.psc_interface_config.network_attachment:
        raise ApiError(400, "network and psc_interface_config are both set")
    _check_parameters(job, _pipeline_spec(job))


def _pipeline_spec(job: PipelineJob) -> pipeline_spec_pb2.PipelineSpec:
    spec = pipeline_spec_pb2.PipelineSpec()
    try:
        json_format.ParseDict(json_format.MessageToDict(PipelineJob.pb(job).pipeline_spec), spec)
    except json_format.ParseError as error:
        raise ApiError(400, f"pipeline_spec: {error}") from None
    if spec.schema_version not in SCHEMAS:
        raise ApiError(400, f"pipeline_spec: schema version {spec.schema_version!r} is none of {SCHEMAS}")
    if not spec.root.dag.tasks:
        raise ApiError(400, "pipeline_spec: the root has no tasks")
    return spec


def _check_parameters(job: PipelineJob, spec: pipeline_spec_pb2.PipelineSpec) -> None:
    known = spec.root.input_definitions.parameters
    parameters = json_format.MessageToDict(PipelineJob.pb(job).runtime_config).get("parameterValues", {})
    kinds = pipeline_spec_pb2.ParameterType
    fits = {
        kinds.STRING: lambda value: isinstance(value, str),
        kinds.NUMBER_INTEGER: lambda value: _is_number(value) and float(value).is_integer(),
        kinds.NUMBER_DOUBLE: _is_number,
        kinds.BOOLEAN: lambda value: isinstance(value, bool),
        kinds.LIST: lambda value: isinstance(value, list),
        kinds.STRUCT: lambda value: isinstance(value, dict),
    }
    for name, value in parameters.items():
        if name not in known:
            raise ApiError(400, f"The pipeline parameter {name} is not found in the pipeline job input definitions.")
        kind = known[name].parameter_type
        if not fits[kind](value):
            raise ApiError(400, f"Parameter {name} is {value!r}, not a {kinds.ParameterTypeEnum.Name(kind)}")
    optional = {
        name for name, parameter in known.items() if parameter.is_optional or parameter.HasField("default_value")
    }
    if missing := known.keys() - optional - parameters.keys():
        raise ApiError(400, f"Parameters without a value: {sorted(missing)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class VertexHandler(Handler):
    """Answers the requests of one connection."""

    fake: VertexServer

    def respond(self, body: bytes) -> None:
        self.send_answer(*self.answer(body))

    def answer(self, body: bytes) -> tuple[int, Json | bytes]:
        """Carry the request out; status and answer."""
        try:
            path, query = self.path_and_query()
            with self.fake.lock:
                return 200, self.fake.answer(self.command, path, query, self.headers, body)
        except ApiError as error:
            return error.code, error_body(error)

    def send_answer(self, code: int, answer: Json | bytes) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        kind = "text/plain" if isinstance(answer, bytes) else "application/json"
        self.send(code, {"Content-Type": kind, "Content-Length": str(len(data))})
        self.wfile.write(data)


def error_body(error: ApiError) -> Json:
    """The error in the API's form."""
    content: Json = {"code": error.code, "message": error.message, "status": STATUS[error.code]}
    if error.reason:
        info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": error.reason}
        content["details"] = [{**info, "domain": "googleapis.com"}]
    return {"error": content}
