"""A small, strict stand-in for Vertex AI: jobs, schedules, models, templates, experiments and logs, over REST.

vertex_grpc.py is a door to it for clients that speak gRPC.

It parses what it is sent into the API's own message, and the pipeline in it into kfp's, and refuses what either does
not know. It checks what the real service does, as far as its documentation says: names, types of parameters, forms of
URIs. Whatever it does not know is answered 501, never guessed. Fault rules break chosen requests on purpose.

    with FakeVertex(project="my-project") as server:
        monkeypatch.setenv("VLMPIPE_VERTEX_ENDPOINT", server.endpoint)
        server.faults.append(Fault("drop_after", method="POST"))
"""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from google.cloud.aiplatform_v1.types import PipelineJob
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from vlmpipe.rehearsal.vertex.courses import Courses
from vlmpipe.rehearsal.vertex.jobs import JobFloor
from vlmpipe.rehearsal.vertex.metadata import PATH as METADATA
from vlmpipe.rehearsal.vertex.metadata import MetadataShelf
from vlmpipe.rehearsal.vertex.models import ModelShelf
from vlmpipe.rehearsal.vertex.schedules import ScheduleBook
from vlmpipe.rehearsal.vertex.templates import API, FILES, TemplateShelf
from vlmpipe.rehearsal.vertex.tuning import TuningFloor

STATUS = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "ALREADY_EXISTS",
    429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE",
}  # fmt: skip
JOB_ID = re.compile(r"[a-z][-a-z0-9]{0,127}")
LABEL_KEY, LABEL_VALUE = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")
NETWORK = re.compile(r"projects/[0-9]+/global/networks/[a-z][a-z0-9-]*")
SERVICE_ACCOUNT = re.compile(r"[a-z0-9-]+@[a-z0-9.-]+\.gserviceaccount\.com")
OUTPUT_ONLY = (
    "name",
    "create_time",
    "start_time",
    "end_time",
    "update_time",
    "state",
    "job_detail",
    "error",
    "template_metadata",
)
MOST_LABELS = 64
KNOWN_QUERY = {"pipelineJobId", "$alt", "filter", "pageToken", "updateMask", "contextId", "metadataStoreId", "tagId"}
TEMPLATE = re.compile(r"https://[a-z0-9-]+-kfp\.pkg\.dev/[^/]+/[^/]+/[^/]+/sha256:[0-9a-f]{64}")
TUNING_JOBS = re.compile(r"/v1/(projects/[^/]+/locations/[^/]+)/hyperparameterTuningJobs(/[^/:]+)?(:cancel)?")
MODELS = re.compile(
    r"/v1/(projects/[^/]+/locations/[^/]+)/models(?:/([^/:@]+)(@[^/:@]+)?)?(?::([a-zA-Z]+)|/(operations/[0-9]+))?"
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


class ApiError(Exception):
    """An answer that is not 200."""

    def __init__(self, code: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.reason = code, message, reason

    def body(self) -> dict[str, Any]:
        error: dict[str, Any] = {"code": self.code, "message": self.message, "status": STATUS[self.code]}
        if self.reason:
            info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": self.reason}
            error["details"] = [{**info, "domain": "googleapis.com"}]
        return {"error": error}


class FakeVertex:
    """The server: one project in one location, state in memory, one lock around each request's effect."""

    def __init__(self, project: str = "test-project", location: str = "us-central1") -> None:
        self.parent = f"projects/{project}/locations/{location}"
        self.jobs: dict[str, PipelineJob] = {}
        self.book = ScheduleBook(self.parent, _check, ApiError)
        self.floor = JobFloor(self.parent, ApiError)
        self.searches = TuningFloor(self.parent, ApiError)
        self.templates = TemplateShelf(project, location, ApiError)
        self.shelf = ModelShelf(self.parent, ApiError)
        self.metadata = MetadataShelf(self.parent, ApiError)
        self.courses = Courses(project, ApiError, self.floor)
        self.faults: list[Fault] = []
        self.latency_s = 0.0  # before each answer
        self.requests: list[str] = []  # "METHOD path?query" of every request that arrived
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_class(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> FakeVertex:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def take_fault(self, method: str) -> Fault | None:
        with self.lock:
            fault = next((fault for fault in self.faults if fault.times > 0 and fault.method == method), None)
            if fault:
                fault.times -= 1
            return fault

    def create(self, parent: str, job_id: str, body: bytes) -> PipelineJob:
        """pipelineJobs.create. Raises ApiError for what the real service refuses."""
        self.require_parent(parent)
        if not JOB_ID.fullmatch(job_id):
            raise ApiError(400, f"pipeline_job_id: {job_id!r} does not match {JOB_ID.pattern}")
        job = _parse(body)
        _check(job)
        name = f"{parent}/pipelineJobs/{job_id}"
        if name in self.jobs:
            raise ApiError(409, f"PipelineJob {name} already exists")
        job.name = name
        self.courses.begin(job)
        self.jobs[name] = job
        return job

    def get(self, name: str) -> PipelineJob:
        """pipelineJobs.get. The job has moved on since it was last asked for, if a test gave it moves."""
        job = self.known(name)
        self.courses.advance(job)
        return job

    def known(self, name: str) -> PipelineJob:
        """The job as it is."""
        self.require_parent(name.partition("/pipelineJobs/")[0])
        if name not in self.jobs:
            raise ApiError(404, f"The PipelineJob does not exist: {name}")
        return self.jobs[name]

    def require_parent(self, parent: str) -> None:
        if parent.split("/")[1] != self.parent.split("/")[1]:
            # The real service does not tell strangers which projects exist.
            raise ApiError(403, f"Permission denied on resource {parent} (or it may not exist).")
        if parent != self.parent:
            raise ApiError(404, f"The location {parent} does not exist")


def _parse(body: bytes) -> PipelineJob:
    job = PipelineJob()
    try:
        json_format.Parse(body, PipelineJob.pb(job))
    except json_format.ParseError as error:
        raise ApiError(400, f"Invalid JSON payload received. {error}") from None
    return job


def _check(job: PipelineJob) -> None:
    fields = {descriptor.name for descriptor, _ in PipelineJob.pb(job).ListFields()}
    if given := fields.intersection(OUTPUT_ONLY):
        raise ApiError(400, f"output-only fields are set: {sorted(given)}")
    for field in ("display_name", "pipeline_spec", "runtime_config"):
        if field not in fields:
            raise ApiError(400, f"Required field {field} is missing")
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/.*)?", job.runtime_config.gcs_output_directory):
        raise ApiError(400, f"runtime_config.gcs_output_directory: not a gs:// path: {_shown(job)}")
    if len(job.labels) > MOST_LABELS:
        raise ApiError(400, f"labels: {len(job.labels)} are more than {MOST_LABELS}")
    for key, value in job.labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            raise ApiError(400, f"labels: {key}={value} is not a label")
    for field, form in (("service_account", SERVICE_ACCOUNT), ("network", NETWORK)):
        if (value := getattr(job, field)) and not form.fullmatch(value):
            raise ApiError(400, f"{field}: {value!r} does not match {form.pattern}")
    if job.template_uri and not TEMPLATE.fullmatch(job.template_uri):
        # With a tag it looks up the version as its own agent, or fails (googleapis/python-aiplatform, issue 2181).
        raise ApiError(500, f"template_uri {job.template_uri}: no version")
    if job.network and job.psc_interface_config.network_attachment:
        raise ApiError(400, "network and psc_interface_config are both set")
    _check_parameters(job, _pipeline_spec(job))


def _shown(job: PipelineJob) -> str:
    return repr(job.runtime_config.gcs_output_directory)


def _pipeline_spec(job: PipelineJob) -> pipeline_spec_pb2.PipelineSpec:
    spec = pipeline_spec_pb2.PipelineSpec()
    try:
        json_format.ParseDict(json_format.MessageToDict(PipelineJob.pb(job).pipeline_spec), spec)
    except json_format.ParseError as error:
        raise ApiError(400, f"pipeline_spec: {error}") from None
    if not spec.root.dag.tasks:
        raise ApiError(400, "pipeline_spec: the root has no tasks")
    return spec


def _check_parameters(job: PipelineJob, spec: pipeline_spec_pb2.PipelineSpec) -> None:
    known = spec.root.input_definitions.parameters
    given = json_format.MessageToDict(PipelineJob.pb(job).runtime_config).get("parameterValues", {})
    kinds = pipeline_spec_pb2.ParameterType
    fits = {
        kinds.STRING: lambda value: isinstance(value, str),
        kinds.NUMBER_INTEGER: lambda value: _is_number(value) and float(value).is_integer(),
        kinds.NUMBER_DOUBLE: _is_number,
        kinds.BOOLEAN: lambda value: isinstance(value, bool),
        kinds.LIST: lambda value: isinstance(value, list),
        kinds.STRUCT: lambda value: isinstance(value, dict),
    }
    for name, value in given.items():
        if name not in known:
            raise ApiError(400, f"The pipeline parameter {name} is not found in the pipeline job input definitions.")
        kind = known[name].parameter_type
        if not fits[kind](value):
            raise ApiError(400, f"Parameter {name} is {value!r}, not a {kinds.ParameterTypeEnum.Name(kind)}")
    optional = {name for name, one in known.items() if one.is_optional or one.HasField("default_value")}
    if missing := known.keys() - optional - given.keys():
        raise ApiError(400, f"Parameters without a value: {sorted(missing)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_dict(job: PipelineJob) -> dict[str, Any]:
    return dict(json_format.MessageToDict(PipelineJob.pb(job)))


def _handler_class(server: FakeVertex) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        fake = server

    return Handler


class _Handler(BaseHTTPRequestHandler):
    fake: FakeVertex
    protocol_version = "HTTP/1.1"  # keep-alive, as the real service
    disable_nagle_algorithm = True  # else each answer waits 40 ms for the client's delayed ACK

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.fake.requests.append(f"{self.command} {self.path}")
        threading.Event().wait(self.fake.latency_s)  # tests replace time.sleep
        fault = self.fake.take_fault(self.command)
        if fault and fault.action in ("drop_before", "reset"):
            self._cut(reset=fault.action == "reset")
            return
        code = 200
        try:
            if fault and fault.action == "status":
                raise ApiError(fault.code, fault.message, fault.reason)
            with self.fake.lock:
                answer = self._route(body)
        except ApiError as error:
            code, answer = error.code, error.body()
        if fault and fault.action == "drop_after":
            self._cut(reset=False)
            return
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(answer, bytes) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _serve

    def _route(self, body: bytes) -> dict[str, Any] | bytes:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        if unknown := query.keys() - KNOWN_QUERY:
            raise ApiError(
                400, f"Invalid JSON payload received. Unknown name {sorted(unknown)}: Cannot bind query parameter."
            )
        if (host := self.headers.get("Host", "")) in (FILES, API):
            return self.fake.templates.answer(self.command, host, url.path, query, self.headers, body)
        if self.command == "POST" and url.path == "/v2/entries:list":
            return self.fake.courses.list_entries(body)
        match = re.fullmatch(r"/v1/(projects/[^/]+/locations/[^/]+/pipelineJobs/[^/:]+):cancel", url.path)
        if match and self.command == "POST":
            return self.fake.courses.cancel(self.fake.known(match[1]), body)
        match = re.fullmatch(r"/v1/(projects/[^/]+/locations/[^/]+)/pipelineJobs(/[^/:]+)?", url.path)
        if match and self.command == "POST" and not match[2]:
            return _as_dict(self.fake.create(match[1], query.get("pipelineJobId", ""), body))
        if match and self.command == "GET" and match[2]:
            return _as_dict(self.fake.get(f"{match[1]}/pipelineJobs{match[2]}"))
        match = re.fullmatch(r"/v1/(projects/[^/]+/locations/[^/]+)/schedules(/[^/:]+)?(:[a-z]+)?", url.path)
        if match:
            return self._schedules(match[1], match[2] and f"{match[1]}/schedules{match[2]}", match[3], query, body)
        match = re.fullmatch(
            r"/v1/(projects/[^/]+/locations/[^/]+)/hyperparameterTuningJobs(/[^/:]+)?(:cancel)?", url.path
        )
        if match:
            self.fake.require_parent(match[1])
            return self.fake.searches.answer(self.command, (match[2] or "")[1:], match[3], query, body)
        match = re.fullmatch(r"/v1/(projects/[^/]+/locations/[^/]+)/(customJobs)(/[^/:]+)?(:cancel)?", url.path)
        if match:
            self.fake.require_parent(match[1])
            return self.fake.floor.answer(self.command, match[2], (match[3] or "")[1:], match[4], query, body)
        if match := METADATA.fullmatch(url.path):
            self.fake.require_parent(match[1])
            return self.fake.metadata.answer(self.command, match, query, body)
        if match := MODELS.fullmatch(unquote(url.path)):
            return self._models(match, query, body)
        raise ApiError(501, f"no such route in this fake: {self.command} {url.path}")

    def _models(self, match: re.Match[str], query: dict[str, str], body: bytes) -> dict[str, Any]:
        parent, model_id, version, verb, operation = match.groups()
        self.fake.require_parent(parent)
        shelf, version = self.fake.shelf, (version or "").removeprefix("@")
        if (self.command, model_id, verb) == ("POST", None, "upload"):
            return shelf.upload(body)
        if (self.command, verb) == ("GET", None) and model_id and operation:
            return shelf.operation(f"{parent}/models/{model_id}/{operation}")
        if (self.command, verb) == ("GET", None) and model_id:
            return shelf.get(model_id, version)
        if (self.command, verb, version) == ("GET", "listVersions", "") and model_id:
            return shelf.list_versions(model_id, query)
        if (self.command, verb) == ("POST", "mergeVersionAliases") and model_id:
            return shelf.merge_aliases(model_id, version, body)
        raise ApiError(501, f"no such route in this fake: {self.command} {self.path}")

    def _schedules(
        self, parent: str, name: str | None, verb: str | None, query: dict[str, str], body: bytes
    ) -> dict[str, Any]:
        self.fake.require_parent(parent)
        book = self.fake.book
        routes: dict[tuple[str, bool, str | None], Callable[[], dict[str, Any]]] = {
            ("POST", False, None): lambda: book.create(parent, body),
            ("GET", False, None): lambda: book.list(query),
            ("GET", True, None): lambda: book.get(str(name)),
            ("PATCH", True, None): lambda: book.update(str(name), query.get("updateMask", ""), body),
            ("DELETE", True, None): lambda: book.delete(str(name)),
            ("POST", True, ":pause"): lambda: book.pause(str(name), body),
            ("POST", True, ":resume"): lambda: book.resume(str(name), body),
        }
        if (route := routes.get((self.command, name is not None, verb))) is None:
            raise ApiError(501, f"no such route in this fake: {self.command} {self.path}")
        return route()

    def _cut(self, *, reset: bool) -> None:
        if reset:  # closing with unsent time 0 sends RST instead of FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are kept in `FakeVertex.requests`; printing them would drown the tests' output."""
