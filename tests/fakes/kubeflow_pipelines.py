"""A small, strict stand-in for the API of Kubeflow Pipelines 2: experiments, runs, recurring runs and pipelines.

A request's body must have the fields of kfp's own API types and no others, a run's pipeline must be one that kfp's own
types read, and its parameters must be the pipeline's. What the fake does not know is answered 501, never guessed.

    with FakePipelines() as pipelines:
        Client(host=pipelines.endpoint)
        pipelines.move(run_id, "FAILED", tasks=[...])
"""

from __future__ import annotations

import functools
import json
import re
import uuid
from datetime import UTC, datetime
from email import message_from_bytes
from types import SimpleNamespace
from typing import Any

import kfp.client.client
import kfp_server_api
import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from vlmpipe.rehearsal.http_server import Handler, LocalServer

RUNS = re.compile(r"/apis/v2beta1/runs(?:/(?P<id>[^/:]+)(?P<verb>:terminate)?)?")
RECURRING = re.compile(r"/apis/v2beta1/recurringruns(?:/(?P<id>[^/:]+)(?P<verb>:enable|:disable)?)?")
PIPELINES = re.compile(r"/apis/v2beta1/pipelines(?:/(?P<id>[^/:]+)(?P<versions>/versions)?)?")
UPLOAD_VERSION = "/apis/v2beta1/pipelines/upload_version"
EXPERIMENTS = "/apis/v2beta1/experiments"
NEVER = "1970-01-01T00:00:00Z"  # when a run ends that is not over, as the service says
PAGE_SIZE = 2  # at most, whatever is asked: so that tests turn pages
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)")
SIX_FIELDS = re.compile(r"(\S+ ){5}[0-6*?,/-]+")  # seconds first; weekdays from 0 to 6
GIVEN_FOR_A_SCHEDULE = {"recurring_run_id", "status", "created_at", "updated_at", "error", "namespace"}
GIVEN_BY_THE_SERVICE = {
    "run_id", "state", "created_at", "finished_at", "run_details", "error", "state_history", "scheduled_at",
    "plugins_output",
}  # fmt: skip
GIVEN_FOR_AN_EXPERIMENT = {"experiment_id", "created_at", "storage_state", "last_run_created_at"}
GIVEN_FOR_A_PIPELINE = {"pipeline_id", "created_at", "error"}
LONGEST_TAG = 63
# kfp's client reads each pipeline that it sends by PyYAML's own scanner, which takes ten times as long as libyaml's.
READING = {"safe_load_all": functools.partial(yaml.load_all, Loader=yaml.CSafeLoader)}
kfp.client.client.yaml = SimpleNamespace(**{**vars(yaml), **READING})
STATES = set(kfp_server_api.V2beta1RuntimeState.allowable_values) - {"RUNTIME_STATE_UNSPECIFIED"}


class Refused(Exception):
    """An answer that is not 200."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class FakePipelines(LocalServer):
    """State in memory. token: what requests must carry; multi_user: whether runs need a namespace."""

    def __init__(self, *, token: str = "", multi_user: bool = False) -> None:
        super().__init__(_Handler)
        self.token, self.multi_user = token, multi_user
        self.version = "2.17.0"
        self.experiments: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.recurring: dict[str, dict[str, Any]] = {}
        self.pipelines: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, dict[str, Any]] = {}
        self.faults: list[int] = []  # codes of the next answers; 0 for a right one
        self.retry_after_s = 0  # of answers that are errors; 0: not said
        self.late: dict[str, int] = {}  # by path: code that is answered once the work is done; 0: the answer is lost

    def move(self, run_id: str, state: str, *, error: str = "", tasks: list[dict[str, Any]] | None = None) -> None:
        """Bring a run to a state, as the service's controller does. Raises AssertionError for what it never says."""
        run = self.runs[run_id]
        for said in (state, *(task["state"] for task in tasks or () if "state" in task)):
            assert said in STATES, f"{said} is no RuntimeState: the words of PipelineTaskFinalStatus are others"
        known = kfp_server_api.V2beta1PipelineTaskDetail.attribute_map.values()
        unknown = {name for task in tasks or () for name in task} - set(known)
        assert not unknown, f"a task has no {min(unknown, default='')}"
        loses_loops = re.match(r"2\.1[0-6]\.", self.version) and has_loop_in_exit_handler(
            run.get("pipeline_spec") or {}
        )
        assert not (loses_loops and state == "SUCCEEDED"), "before 2.17 such a run fails (kubeflow/pipelines 12390)"
        run["state"] = state
        run["run_details"] = {"task_details": tasks or []}
        if error:
            run["error"] = {"code": 2, "message": error}
        if state in ("SUCCEEDED", "FAILED", "CANCELED"):
            run["finished_at"] = _now()


class _Handler(Handler):
    fake: FakePipelines

    def respond(self, body: bytes) -> None:
        try:
            with self.fake.lock:
                answer = self._answer(body)
        except Refused as refused:
            self._send(refused.code, {"error": refused.message, "code": 3, "message": refused.message})
        else:
            code = self.fake.late.get(self.path_and_query()[0], 200) if self.command == "POST" else 200
            self.close_connection = not code
            if code:
                self._send(code, answer)

    def _send(self, code: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code >= 400 and self.fake.retry_after_s:
            self.send_header("Retry-After", str(self.fake.retry_after_s))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, body: bytes) -> Any:
        fake = self.fake
        if fake.faults and (code := fake.faults.pop(0)):
            raise Refused(code, "the service is not well")
        if fake.token and self.headers.get("Authorization") != f"Bearer {fake.token}":
            raise Refused(401, "Request header error: there is no user identity header.")
        path, query = self.path_and_query()
        if (self.command, path) == ("GET", "/apis/v2beta1/healthz"):
            # Its build comes, too, which the API's own description leaves out (backend/src/apiserver/main.go).
            return {"commit_sha": "0" * 40, "tag_name": fake.version, "multi_user": fake.multi_user}
        if path == EXPERIMENTS:
            return self._experiments(body, query)
        if match := RUNS.fullmatch(path):
            return self._runs(match, body)
        if (self.command, path) == ("POST", UPLOAD_VERSION):
            return self._upload_version(body, query)
        if match := PIPELINES.fullmatch(path):
            return self._pipelines(match, body, query)
        if match := RECURRING.fullmatch(path):
            return self._recurring(match, body, query)
        raise Refused(501, f"this stand-in does not know {self.command} {path}")

    def _pipelines(self, match: re.Match[str], body: bytes, query: dict[str, str]) -> Any:
        fake = self.fake
        if match["versions"] and self.command == "GET":
            first = int(query.get("page_token") or 0)
            last = first + min(PAGE_SIZE, int(query["page_size"]))
            found = [one for one in fake.versions.values() if one["pipeline_id"] == match["id"]]
            return {"pipeline_versions": found[first:last], "next_page_token": str(last) if last < len(found) else ""}
        if match["id"] or (self.command == "GET" and not query.get("filter")):
            raise Refused(501, f"this stand-in does not know {self.command} {match.string}")
        if self.command == "GET":
            wanted = json.loads(query["filter"])["predicates"][0]
            if (wanted["operation"], wanted["key"]) != ("EQUALS", "display_name"):
                raise Refused(501, f"this stand-in does not know the filter {wanted}")
            place = query.get("namespace", "")
            named = [one for one in fake.pipelines.values() if one["display_name"] == wanted["stringValue"]]
            return {"pipelines": [one for one in named if one.get("namespace", "") == place]}
        content = checked(body, kfp_server_api.V2beta1Pipeline, GIVEN_FOR_A_PIPELINE)
        if not content.get("name"):
            raise Refused(400, "Invalid input error: pipeline's name cannot be empty")
        if any(len(text) > LONGEST_TAG for pair in (content.get("tags") or {}).items() for text in pair):
            raise Refused(400, f"Invalid input error: a tag has more than {LONGEST_TAG} characters")
        if any(one["name"] == content["name"] for one in fake.pipelines.values()):
            raise Refused(409, "Already exist error: the name of the pipeline is taken")
        made = {**content, "pipeline_id": str(uuid.uuid4()), "created_at": _now()}
        fake.pipelines[made["pipeline_id"]] = made
        return made

    def _upload_version(self, body: bytes, query: dict[str, str]) -> Any:
        fake = self.fake
        if query.get("pipelineid") not in fake.pipelines:
            raise Refused(404, f"Pipeline {query.get('pipelineid')} not found")
        mail = b"Content-Type: " + self.headers["Content-Type"].encode() + b"\r\n\r\n" + body
        (part,) = message_from_bytes(mail).get_payload()
        if part.get_param("name", header="content-disposition") != "uploadfile":
            raise Refused(400, "Failed to find the file in the form")
        documents = list(yaml.load_all(part.get_payload(decode=True), Loader=yaml.CSafeLoader))
        try:
            json_format.ParseDict(documents[0], pipeline_spec_pb2.PipelineSpec())
        except json_format.ParseError as error:
            raise Refused(400, f"Invalid input error: pipeline spec is invalid: {error}") from error
        if not query.get("name"):
            raise Refused(400, "Invalid input error: pipeline version's name cannot be empty")
        known = [one for one in fake.versions.values() if one["pipeline_id"] == query["pipelineid"]]
        if any(one["display_name"] == query.get("name") for one in known):
            raise Refused(409, "Already exist error: the name of the pipeline version is taken")
        made = {
            "pipeline_id": query["pipelineid"],
            "pipeline_version_id": str(uuid.uuid4()),
            "display_name": query["name"],
            "created_at": _now(),
            "pipeline_spec": documents[0],
        }
        fake.versions[made["pipeline_version_id"]] = made
        return made

    def _recurring(self, match: re.Match[str], body: bytes, query: dict[str, str]) -> Any:
        fake, number = self.fake, match["id"]
        if number is None and self.command == "GET":
            if fake.multi_user and not query.get("namespace"):
                raise Refused(400, "Invalid input error: a namespace is missing")
            first = int(query.get("page_token") or 0)
            last = first + min(PAGE_SIZE, int(query["page_size"]))
            found = list(fake.recurring.values())
            return {"recurringRuns": found[first:last], "next_page_token": str(last) if last < len(found) else ""}
        if number is None and self.command == "POST":
            return self._schedule(checked(body, kfp_server_api.V2beta1RecurringRun, GIVEN_FOR_A_SCHEDULE))
        if number not in fake.recurring:
            raise Refused(404, f"Recurring run {number} not found")
        if match["verb"] and self.command == "POST":
            fake.recurring[number]["status"] = {":enable": "ENABLED", ":disable": "DISABLED"}[match["verb"]]
            return {}
        if self.command == "DELETE" and not match["verb"]:
            del fake.recurring[number]
            return {}
        if self.command != "GET" or match["verb"]:
            raise Refused(501, f"this stand-in does not know {self.command} of a recurring run")
        return fake.recurring[number]

    def _schedule(self, content: dict[str, Any]) -> dict[str, Any]:
        self._check_pipeline(content)
        trigger = content.get("trigger") or {}
        if trigger.keys() != {"cron_schedule"}:
            raise Refused(501, f"this stand-in knows triggers with a cron schedule alone, not {sorted(trigger)}")
        times = dict(trigger["cron_schedule"])
        if unknown := set(times) - set(kfp_server_api.V2beta1CronSchedule.attribute_map.values()):
            raise Refused(400, f"unknown field {min(unknown)!r} in V2beta1CronSchedule")
        cron = times.pop("cron", "")
        if not SIX_FIELDS.fullmatch(cron):
            raise Refused(400, f"Invalid input error: Schedule cron is not a valid cron expression: {cron!r}")
        for name, time in times.items():
            if time is not None and not MOMENT.fullmatch(time):
                raise Refused(400, f"{name}: {time!r} is no time of RFC 3339")
        if not re.fullmatch(r"\d{1,9}", str(content.get("max_concurrency", 0))):
            raise Refused(400, "max_concurrency: invalid value for int64")
        if not 1 <= int(content.get("max_concurrency", 0)) <= 10:
            raise Refused(400, "Invalid input error: Max concurrency of the recurring run must be between 1 and 10")
        if content.get("mode") not in ("ENABLE", "DISABLE"):
            raise Refused(400, "Invalid input error: Unrecognized recurring run mode")
        made = {**content, "recurring_run_id": str(uuid.uuid4()), "created_at": _now()}
        made["status"] = {"ENABLE": "ENABLED", "DISABLE": "DISABLED"}[made.pop("mode")]
        self.fake.recurring[made["recurring_run_id"]] = made
        return made

    def _experiments(self, body: bytes, query: dict[str, str]) -> Any:
        fake = self.fake
        if self.command == "GET":
            if fake.multi_user and not query.get("namespace"):
                raise Refused(400, "Invalid input error: a namespace is missing")
            wanted = json.loads(query["filter"])["predicates"][0]
            if (wanted["operation"], wanted["key"]) != (1, "name") and wanted["key"] != "display_name":
                raise Refused(501, f"this stand-in does not know the filter {wanted}")
            name = wanted.get("stringValue") or wanted.get("string_value")
            return {"experiments": [one for one in fake.experiments.values() if one["display_name"] == name]}
        content = checked(body, kfp_server_api.V2beta1Experiment, GIVEN_FOR_AN_EXPERIMENT)
        if fake.multi_user and not content.get("namespace"):
            raise Refused(400, "Invalid input error: experiment's namespace is missing")
        if not content.get("display_name"):
            raise Refused(400, "Invalid input error: experiment has empty name")
        place = content.get("namespace", "")
        if any(
            (one["display_name"], one.get("namespace", "")) == (content["display_name"], place)
            for one in fake.experiments.values()
        ):
            raise Refused(409, "Already exist error: the name of the experiment is taken")
        made = {"experiment_id": str(uuid.uuid4()), **content, "created_at": _now()}
        fake.experiments[made["experiment_id"]] = made
        return made

    def _runs(self, match: re.Match[str], body: bytes) -> Any:
        fake, run_id = self.fake, match["id"]
        if run_id is None:
            if self.command != "POST":
                raise Refused(501, "this stand-in lists no runs")
            return self._create(checked(body, kfp_server_api.V2beta1Run, GIVEN_BY_THE_SERVICE))
        if run_id not in fake.runs:
            raise Refused(404, f"Run {run_id} not found")
        run = fake.runs[run_id]
        if match["verb"] and self.command == "POST":
            if run["state"] not in ("PENDING", "RUNNING", "PAUSED"):
                raise Refused(400, f"Failed to terminate run {run_id}: it is {run['state']}")
            run["state"] = "CANCELING"
            return {}
        if self.command != "GET" or match["verb"]:
            raise Refused(501, f"this stand-in does not know {self.command} of a run")
        return run

    def _create(self, content: dict[str, Any]) -> dict[str, Any]:
        self._check_pipeline(content)
        run_id = str(uuid.uuid4())
        run = {"run_id": run_id, "state": "PENDING", "created_at": _now(), "finished_at": NEVER, **content}
        self.fake.runs[run_id] = run
        return run

    def _check_pipeline(self, content: dict[str, Any]) -> None:
        if content.get("experiment_id") not in self.fake.experiments:
            raise Refused(404, f"Experiment {content.get('experiment_id')} not found")
        if not content.get("display_name"):
            raise Refused(400, "Invalid input error: The run name is empty")
        spec = content.get("pipeline_spec") or {}
        try:
            pipeline = json_format.ParseDict(spec.get("pipeline_spec") or spec, pipeline_spec_pb2.PipelineSpec())
        except json_format.ParseError as error:
            raise Refused(400, f"Invalid input error: pipeline spec is invalid: {error}") from error
        runtime = content.get("runtime_config") or {}
        if unknown := set(runtime) - set(kfp_server_api.V2beta1RuntimeConfig.attribute_map.values()):
            raise Refused(400, f"unknown field {min(unknown)!r} in V2beta1RuntimeConfig")
        given = runtime.get("parameters") or {}
        if unknown := set(given) - set(pipeline.root.input_definitions.parameters):
            raise Refused(400, f"Invalid input error: parameter {min(unknown)} is not part of the pipeline")


def has_loop_in_exit_handler(spec: dict[str, Any]) -> bool:
    """Whether a task with an iterator is below the tasks that an exit handler's own task waits for."""
    pipeline = spec.get("pipeline_spec") or spec
    tasks = pipeline.get("root", {}).get("dag", {}).get("tasks", {})
    handled = {name for task in tasks.values() if "triggerPolicy" in task for name in task.get("dependentTasks", ())}
    waiting = [tasks[name] for name in handled if name in tasks]
    while waiting:
        task = waiting.pop()
        if "parameterIterator" in task or "artifactIterator" in task:
            return True
        inner = pipeline.get("components", {}).get(task.get("componentRef", {}).get("name", ""), {})
        waiting += inner.get("dag", {}).get("tasks", {}).values()
    return False


def checked(body: bytes, kind: Any, not_given: set[str]) -> dict[str, Any]:
    """The body, if it has fields of this type only. not_given: those that the service itself sets."""
    content = json.loads(body)
    if unknown := set(content) - set(kind.attribute_map.values()):
        raise Refused(400, f"unknown field {min(unknown)!r} in {kind.__name__}")
    if given := {name for name in content if name in not_given and content[name]}:
        raise Refused(400, f"field {min(given)!r} is not for clients to set")
    return dict(content)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
