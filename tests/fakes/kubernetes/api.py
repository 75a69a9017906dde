"""A small, strict stand-in for a Kubernetes API with Kubeflow Trainer: TrainJobs, their pods and logs, over HTTP.

A TrainJob is checked by the API's own types and the rules behind them (train_job_rules.py); whatever the fake does not
know is answered 501, never guessed.

    with FakeKubernetes() as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path)))
        cluster.runs.append(Course([Scene(...)]))       # of the next TrainJob; without one its nodes run here
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.fakes.kubernetes import inference_services as kserve
from tests.fakes.kubernetes.pods import Life, life_of
from tests.fakes.kubernetes.train_job_rules import (
    denials,
    fields_named,
    pod_violations,
    unknown_fields,
    violations,
)
from vlmpipe.rehearsal.http_server import HttpServer

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
USER, TOKEN = "system:serviceaccount:team:pipeline-runner", "a-token"
ALL_VERBS = frozenset(
    {"create trainjobs", "get trainjobs", "delete trainjobs", "list pods", "get pods", "get pods/log", "get workflows"}
    | {f"{verb} {kserve.PLURAL}" for verb in ("create", "get", "update", "delete")}
)
JOBS = re.compile(rf"/apis/{GROUP}/{VERSION}/namespaces/(?P<namespace>[^/]+)/{PLURAL}(/(?P<name>[^/]+))?")
SERVICES = re.compile(
    rf"/apis/{kserve.GROUP}/{kserve.VERSION}/namespaces/(?P<namespace>[^/]+)/{kserve.PLURAL}(/(?P<name>[^/]+))?"
)
ARGO = "argoproj.io"
WORKFLOWS = re.compile(rf"/apis/{ARGO}/v1alpha1/namespaces/(?P<namespace>[^/]+)/workflows/(?P<name>[^/]+)")
PODS = re.compile(r"/api/v1/namespaces/(?P<namespace>[^/]+)/pods(/(?P<name>[^/]+)(?P<log>/log)?)?")
RUN_SELECTOR = re.compile(r"pipeline/runid=([0-9a-f-]{36})")
SELECTOR = re.compile(r"jobset\.sigs\.k8s\.io/jobset-name=([^,]+),jobset\.sigs\.k8s\.io/replicatedjob-name=node")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
REASONS = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "AlreadyExists",
           422: "Invalid", 500: "InternalError", 501: "NotImplemented", 503: "ServiceUnavailable"}  # fmt: skip


class Refused(Exception):
    """An answer that is not 200; `plain` is one that is no Status object."""

    def __init__(self, code: int, message: str, *, name: str = "", plain: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.name, self.plain = code, message, name, plain


class FakeKubernetes(HttpServer):
    """The server: one namespace, state in memory, one lock around each request."""

    def __init__(self, namespace: str = "team") -> None:
        super().__init__(_handler_class(self))
        self.namespace = namespace
        self.installed = True  # whether there is a CRD of TrainJobs
        self.runtimes = {"torch-distributed"}
        self.secrets: dict[str, dict[str, str]] = {}
        self.claims: set[str] | None = None  # PersistentVolumeClaims of the namespace; None for all that are named
        self.lacks: set[str] = set()  # fields that an older Trainer does not have, by their last names
        self.allowed = set(ALL_VERBS)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.lives: dict[str, Life] = {}
        self.runs: list[Life] = []
        self.inference_services = kserve.InferenceServices()
        self.step_pods: dict[str, dict[str, Any]] = {}  # pods of pipeline steps, with their owner
        # Of runs of Kubeflow Pipelines: their pods, and the lines of each with their times; None before it has started.
        self.run_pods: dict[str, dict[str, list[tuple[str, str]] | None]] = {}
        self.faults: list[tuple[str, int]] = []  # code of a method's next answer; 0: cut off after the work is done
        self.workflows: dict[str, str] = {}  # phases of pipeline runs; "" before the first one
        self.deletions_take = 0  # GETs for which a deleted TrainJob is still there
        self.requests: list[str] = []
        self.lock = threading.Lock()
        self._leaving: dict[str, int] = {}

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for life in self.lives.values():
            life.end()

    def kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig that leads here."""
        server = {"server": self.endpoint}
        context = {"cluster": "fake", "user": "runner", "namespace": self.namespace}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": server}],
            "users": [{"name": "runner", "user": {"token": TOKEN}}],
            "contexts": [{"name": "fake", "context": context}],
        }
        path = folder / "kubeconfig.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    def take_fault(self, method: str) -> int | None:
        found = next((one for one in self.faults if one[0] == method), None)
        if found:
            self.faults.remove(found)
        return found and found[1]

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> Any:
        """The answer's content: an object as JSON, or the text of a log. Raises Refused."""
        if match := JOBS.fullmatch(path):
            self._require(match["namespace"], {"POST": "create", "GET": "get", "DELETE": "delete"}, method, "trainjobs")
            if not self.installed:
                raise Refused(404, "404 page not found\n", plain=True)
            if method == "POST" and not match["name"]:
                return self._create(query, json.loads(body))
            if method in ("GET", "DELETE") and match["name"]:
                _only(query, {"propagationPolicy"} if method == "DELETE" else set())
                if query.get("propagationPolicy", "Background") not in ("Background", "Foreground", "Orphan"):
                    raise Refused(422, f"propagationPolicy: Unsupported value: {query['propagationPolicy']!r}")
                return self._get(match["name"]) if method == "GET" else self._delete(match["name"])
        if match := SERVICES.fullmatch(path):
            verbs = {"POST": "create", "GET": "get", "PUT": "update", "DELETE": "delete"}
            self._require(match["namespace"], verbs, method, kserve.PLURAL)
            if not self.installed:
                raise Refused(404, "404 page not found\n", plain=True)
            return self._inference_service(method, match["name"], query, body)
        if match := WORKFLOWS.fullmatch(path):
            self._require(match["namespace"], {"GET": "get"}, method, "workflows")
            if match["name"] not in self.workflows:
                raise Refused(404, f'workflows.{ARGO} "{match["name"]}" not found', name=match["name"])
            phase = self.workflows[match["name"]]
            return {
                "kind": "Workflow",
                "metadata": {"name": match["name"]},
                "status": {"phase": phase} if phase else {},
            }
        if match := PODS.fullmatch(path):
            verb = "get" if match["name"] else "list"
            self._require(match["namespace"], {"GET": verb}, method, f"pods{match['log'] or ''}")
            if match["log"]:
                return self._log(match["name"], query)
            return self._step_pod(match["name"], query) if match["name"] else self._pods(query)
        raise Refused(501, f"{method} {path} is not known here")

    def _inference_service(self, method: str, name: str | None, query: dict[str, str], body: bytes) -> Any:
        known = self.inference_services
        if method != "POST" and name not in known.services:
            raise Refused(404, f'{kserve.PLURAL}.{kserve.GROUP} "{name}" not found', name=str(name))
        if method in ("POST", "PUT"):
            content = json.loads(body)
            if query != {"fieldValidation": "Strict"}:
                raise Refused(501, "ask for fieldValidation=Strict")
            self._require_own(content, f"{kserve.GROUP}/{kserve.VERSION}", "InferenceService")
            if method == "PUT" and content["metadata"].get("name") != name:
                raise Refused(400, "the name of the object does not match the name on the URL")
            if method == "PUT" and not content["metadata"].get("resourceVersion"):
                raise Refused(422, "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update")
            if found := known.problems(content):
                raise Refused(400, f"strict decoding error: {', '.join(found)}")
            if found := known.violations(content):
                raise Refused(422, f"InferenceService is invalid: {', '.join(found)}")
            if found := known.denials(content):
                raise Refused(403, f'admission webhook "inferenceservice.kserve" denied the request: {found}')
        if method == "POST":
            if content["metadata"].get("resourceVersion"):
                raise Refused(500, "resourceVersion should not be set on objects to be created")
            if content["metadata"]["name"] in known.services:
                raise Refused(409, "already exists", name=content["metadata"]["name"])
            return known.create(content)
        assert name
        if method == "PUT":
            if content["metadata"].get("resourceVersion") != known.services[name]["metadata"]["resourceVersion"]:
                raise Refused(409, "the object has been modified", name=name)
            uid = known.services[name]["metadata"]["uid"]
            if content["metadata"].get("uid", uid) != uid:
                raise Refused(409, f"Precondition failed: UID in object meta: {uid}", name=name)
            return known.replace(name, content)
        _only(query, set())
        return known.get(name) if method == "GET" else known.delete(name)

    def _require_own(self, content: dict[str, Any], version: str, kind: str) -> None:
        """An object of this kind, for the namespace that was asked."""
        if (content.get("apiVersion"), content.get("kind")) != (version, kind):
            raise Refused(400, "the API version or kind in the data does not match the expected one")
        if content["metadata"].get("namespace", self.namespace) != self.namespace:
            raise Refused(400, "the namespace of the provided object does not match the namespace sent on the request")

    def _require(self, namespace: str, verbs: dict[str, str], method: str, what: str) -> None:
        if method not in verbs:
            raise Refused(501, f"{method} of {what} is not known here")
        verb, group = verbs[method], {"trainjobs": GROUP, kserve.PLURAL: kserve.GROUP, "workflows": ARGO}.get(what, "")
        if f"{verb} {what}" not in self.allowed or namespace != self.namespace:
            text = f'{what}{group and "." + group} is forbidden: User "{USER}" cannot {verb} resource "{what}" in API '
            raise Refused(403, f'{text}group "{group}" in the namespace "{namespace}"')

    def _create(self, query: dict[str, str], job: dict[str, Any]) -> dict[str, Any]:
        _only(query, {"fieldValidation"})
        if query.get("fieldValidation", "Warn") not in ("Ignore", "Warn", "Strict"):
            raise Refused(422, f"fieldValidation: Unsupported value: {query['fieldValidation']!r}")
        if found := [*unknown_fields(job), *fields_named(job["spec"], self.lacks, "spec")]:
            if query.get("fieldValidation") == "Strict":
                fields = ", ".join(f'unknown field "{one}"' for one in found)
                raise Refused(400, f"TrainJob in version {VERSION!r} cannot be handled: strict decoding: {fields}")
            raise Refused(501, f"{found} would be dropped in silence: ask for fieldValidation=Strict")
        self._require_own(job, f"{GROUP}/{VERSION}", "TrainJob")
        name = job["metadata"]["name"]
        if found := violations(job):
            raise Refused(422, f'TrainJob.{GROUP} "{name}" is invalid: {"; ".join(found)}')
        if found := denials(job, self.runtimes):
            text = f'admission webhook "validator.trainjob.{GROUP}" denied the request: {"; ".join(found)}'
            raise Refused(403, text)
        if found := pod_violations(job):
            raise Refused(422, "; ".join(found))
        if name in self.jobs:
            raise Refused(409, f'{PLURAL}.{GROUP} "{name}" already exists', name=name)
        self.jobs[name] = job | {"metadata": job["metadata"] | {"namespace": self.namespace, "uid": f"uid-{name}"}}
        self.lives[name] = self.runs.pop(0) if self.runs else life_of(job, self.secrets, self.claims)
        return self.jobs[name]

    def _get(self, name: str) -> dict[str, Any]:
        job = self._there(name)
        if name in self._leaving:
            self._leaving[name] -= 1
            if self._leaving[name] <= 0:
                self._gone(name)
            return job | {"metadata": job["metadata"] | {"deletionTimestamp": "2026-11-22T20:00:00Z"}}
        if not self.lives[name].look():
            self._gone(name)
            job = self._there(name)
        status = self.lives[name].status()
        return job | ({"status": status} if status else {})

    def _delete(self, name: str) -> dict[str, Any]:
        job = self._there(name)
        self.lives[name].end()
        if self.deletions_take:
            self._leaving[name] = self.deletions_take
            return job
        self._gone(name)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _gone(self, name: str) -> None:
        del self.jobs[name], self.lives[name]
        self._leaving.pop(name, None)

    def _there(self, name: str) -> dict[str, Any]:
        if name not in self.jobs:
            raise Refused(404, f'{PLURAL}.{GROUP} "{name}" not found', name=name)
        return self.jobs[name]

    def _step_pod(self, name: str, query: dict[str, str]) -> dict[str, Any]:
        _only(query, set())
        if name not in self.step_pods:
            raise Refused(404, f'pods "{name}" not found', name=name)
        metadata = {"name": name, "ownerReferences": [self.step_pods[name]]}
        return {"kind": "Pod", "apiVersion": "v1", "metadata": metadata}

    def _pods(self, query: dict[str, str]) -> dict[str, Any]:
        _only(query, {"labelSelector"})
        if match := RUN_SELECTOR.fullmatch(query.get("labelSelector", "")):
            items = [{"metadata": {"name": name}} for name in self.run_pods.get(match[1], {})]
            return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
        match = SELECTOR.fullmatch(query.get("labelSelector", ""))
        if not match:
            raise Refused(501, f"labelSelector {query.get('labelSelector')!r} is not known here")
        items = self.lives[match[1]].pods() if match[1] in self.lives else []
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}

    def _log(self, name: str, query: dict[str, str]) -> str:
        _only(query, {"container", "timestamps", "sinceTime", "previous"})
        for parameter in ("timestamps", "previous"):
            if query.get(parameter, "true") not in BOOLS:
                raise Refused(400, f"{parameter}: invalid value {query[parameter]!r} for a bool")
        if not TIME.fullmatch(query.get("sinceTime", "2026-11-22T20:00:00Z")):
            raise Refused(400, f"sinceTime: {query['sinceTime']!r} is no time of RFC 3339")
        of_steps = {pod: lines for pods in self.run_pods.values() for pod, lines in pods.items()}
        if name in of_steps:
            if query.get("container") != "main":
                raise Refused(400, f"container {query.get('container')} is not valid for pod {name}")
            lines = of_steps[name]
            if lines is None:
                raise Refused(400, f'container "main" in pod "{name}" is waiting to start: ContainerCreating')
            return "".join(f"{time} {line}\n" for time, line in lines)
        if query.get("container") != "node" or query.get("timestamps") != "true":
            raise Refused(400, f"container {query.get('container')} is not valid for pod {name}")
        previous = query.get("previous") == "true"
        for life in self.lives.values():
            if name in [one["metadata"]["name"] for one in life.pods()]:
                lines = life.log(name, previous)
                if lines is None:
                    raise Refused(400, f'previous terminated container "node" in pod "{name}" not found')
                since = query.get("sinceTime", "")[: len("2026-11-22T20:00:00")]  # the API counts whole seconds
                return "".join(f"{time} {line}\n" for time, line in lines if time >= since)
        raise Refused(404, f'pods "{name}" not found', name=name)


# What Go's strconv.ParseBool takes; the generated Python client writes True.
BOOLS = ("1", "t", "T", "TRUE", "true", "True", "0", "f", "F", "FALSE", "false", "False")


def _only(query: dict[str, str], known: set[str]) -> None:
    if unknown := set(query) - known:
        raise Refused(501, f"query parameters {sorted(unknown)} are not known here")


def _handler_class(cluster: FakeKubernetes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            split = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with cluster.lock:
                cluster.requests.append(f"{self.command} {self.path}")
                fault = cluster.take_fault(self.command)
                try:
                    if fault:
                        raise Refused(fault, "fault rule")
                    if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                        raise Refused(401, "Unauthorized")
                    code, content = 200, cluster.answer(self.command, split.path, dict(parse_qsl(split.query)), body)
                except Refused as error:
                    code, content = error.code, _status(error)
            if fault == 0:
                self.close_connection = True
                self.connection.close()
                return
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(content, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = do_PUT = do_PATCH = _serve

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def _status(error: Refused) -> Any:
    if error.plain:
        return error.message
    details = {"name": error.name, "group": GROUP, "kind": PLURAL} if error.name else {}
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**status, "message": error.message, "reason": REASONS[error.code], "code": error.code, "details": details}
