"""Calls to the Kubernetes API that a job step makes, with its errors translated."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from vlmpipe.platforms.kubeflow.jobs.manifest import GROUP, NODE, PLURAL, VERSION
from vlmpipe.platforms.kubeflow.jobs.status import AlreadyThere, NoSuchObject, Unreachable
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
LIMIT: dict[str, object] = {"_request_timeout": (10, 60)}  # seconds to connect, to read
POD_VARIABLE = "KFP_POD_NAME"
PASSING = (408, 429, 500, 502, 503, 504)
# What a kubelet and the API server say of a container that has not started, was cleared away, or is not in the pod; of
# any other bad request they answer 400 as well (kubernetes/kubernetes: pkg/kubelet/kubelet_pods.go,
# pkg/registry/core/pod/strategy.go).
NO_LOG = re.compile(
    r"is waiting to start|previous terminated container .* not found"
    r"|is not available|is terminated|is not valid for pod"
)


@dataclass(frozen=True)
class Kind:
    """A kind of object that an operator brings to a cluster, for error messages."""

    name: str
    api: str
    product: str  # that serves it
    release: str  # of the product, that it takes
    section: str  # of the run file
    docs: str


TRAIN_JOB = Kind(
    "TrainJob", f"{GROUP}/{VERSION}", "Kubeflow Trainer", "2.3 or newer", "kubeflow", "vlmpipe docs run-on-kubeflow"
)

WORKFLOW = Kind(
    "Workflow",
    "argoproj.io/v1alpha1",
    "Argo Workflows",
    "of Kubeflow Pipelines",
    "kubeflow",
    "vlmpipe docs run-on-kubeflow",
)
WORKFLOW_ENDS = ("Succeeded", "Failed", "Error")  # WorkflowPhase (argoproj/argo-workflows, workflow_types.go)


class Jobs:
    """TrainJobs, their pods and logs in this pod's namespace, as its service account.

    Outside of a cluster, cluster and namespace are those of the kubeconfig. Raises UserError (64) without either.
    """

    def __init__(self) -> None:
        self._client, self.namespace = connection()
        self._custom, self._core = client.CustomObjectsApi(self._client), client.CoreV1Api(self._client)
        self._place = {"group": GROUP, "version": VERSION, "plural": PLURAL, "namespace": self.namespace}

    def owner(self) -> dict[str, str] | None:
        """Owner reference to this step's workflow, so that deleting the workflow deletes the TrainJob.

        None outside of Kubeflow Pipelines, which names a step's pod in KFP_POD_NAME.
        """
        pod = os.environ.get(POD_VARIABLE)
        if not pod:
            return None
        with translated_errors("read the pod of the step that makes"):
            answer = self._core.read_namespaced_pod(pod, self.namespace, _preload_content=False, **LIMIT)
        owners = json.loads(answer.data)["metadata"].get("ownerReferences", ())
        fields = ("apiVersion", "kind", "name", "uid")
        return next(({key: owner[key] for key in fields} for owner in owners if owner["kind"] == "Workflow"), None)

    def create(self, body: dict[str, object]) -> None:
        """Create a TrainJob, with strict validation: otherwise an API server drops fields unknown to its version."""
        with translated_errors("create"):
            self._custom.create_namespaced_custom_object(**self._place, body=body, field_validation="Strict", **LIMIT)

    def get(self, name: str) -> dict[str, Any]:
        """The TrainJob. Raises NoSuchObject."""
        with translated_errors("get"):
            result: dict[str, object] = self._custom.get_namespaced_custom_object(**self._place, name=name, **LIMIT)
        return result

    def delete(self, name: str) -> None:
        """Request the deletion of the TrainJob, pods first. Does nothing where there is none."""
        with contextlib.suppress(NoSuchObject), translated_errors("delete"):
            self._custom.delete_namespaced_custom_object(
                **self._place, name=name, propagation_policy="Foreground", **LIMIT
            )

    def pods(self, name: str) -> list[dict[str, object]]:
        """The pods of the TrainJob's nodes, as the API's JSON."""
        selector = f"jobset.sigs.k8s.io/jobset-name={name},jobset.sigs.k8s.io/replicatedjob-name={NODE}"
        with translated_errors("list the pods of"):
            answer = self._core.list_namespaced_pod(
                self.namespace, label_selector=selector, _preload_content=False, **LIMIT
            )
        return list(json.loads(answer.data)["items"])

    def log(self, pod: str, *, since: str = "", previous: bool = False) -> list[str]:
        """The node's lines, each after its time (RFC 3339), from the second of `since` on. Raises NoSuchObject.

        Args:
            since: time of a line; empty for all lines.
            previous: of the container before the last restart.
        """
        query = [("container", NODE), ("timestamps", "true"), ("previous", "true" if previous else "false")]
        if since:
            query.append(("sinceTime", since))
        with translated_errors("read the log of"):
            # Not read_namespaced_pod_log: the generated method knows no sinceTime, only sinceSeconds.
            try:
                answer = self._client.call_api(
                    "/api/v1/namespaces/{namespace}/pods/{name}/log",
                    "GET",
                    path_params={"namespace": self.namespace, "name": pod},
                    query_params=query,
                    header_params={"Accept": "*/*"},
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                    _return_http_data_only=True,
                    **LIMIT,
                )
            except ApiException as error:
                if has_no_log(error):
                    raise NoSuchObject(_message(error)) from error
                raise
        return str(answer.data.decode("utf-8", "replace")).splitlines()


def is_workflow_over(name: str, namespace: str) -> bool:
    """Return whether the workflow of a pipeline run has ended; one that is gone was cleared away after its end.

    Raises UserError where the cluster does not say, also where this step may not read workflows.
    """
    api, _ = connection()
    try:
        with translated_errors("look at the workflow of another run, for", WORKFLOW):
            result = client.CustomObjectsApi(api).get_namespaced_custom_object(
                "argoproj.io", "v1alpha1", namespace, "workflows", name, **LIMIT
            )
    except NoSuchObject:
        return True
    except Unreachable as error:
        raise UserError(str(error), code=ExitCode.UNAVAILABLE) from error
    return str((result.get("status") or {}).get("phase")) in WORKFLOW_ENDS


def has_no_log(error: ApiException) -> bool:
    """Return whether the refused log is one that does not exist yet, or no longer."""
    return _is_of_object(error) or (error.status == 400 and bool(NO_LOG.search(_message(error))))


def connection() -> tuple[client.ApiClient, str]:
    """A client of the cluster, and the namespace: this pod's, or the kubeconfig's. Raises UserError without either."""
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
        namespace = NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except ConfigException:
        file = os.environ.get("KUBECONFIG") or "~/.kube/config"
        try:
            config.load_kube_config(config_file=file, client_configuration=settings)
            context = config.list_kube_config_contexts(config_file=file)[1]["context"]
        except ConfigException as error:
            raise ConfigError(
                f"no Kubernetes cluster to run jobs in: {error}",
                expected="this step in a pod of a cluster, or a kubeconfig that names one",
                fix="run a pipeline that is compiled with --target kubeflow on Kubeflow Pipelines",
            ) from error
        namespace = context.get("namespace") or "default"
    settings.retries = False  # callers decide
    return client.ApiClient(settings), namespace


@contextlib.contextmanager
def translated_errors(doing: str, kind: Kind = TRAIN_JOB) -> Iterator[None]:
    """Re-raise the client's errors in the block as UserErrors, Unreachable, NoSuchObject or AlreadyThere."""
    try:
        yield
    except HTTPError as error:
        raise Unreachable(f"the Kubernetes API does not answer: {error}") from error
    except ApiException as error:
        raise _refusal(error, doing, kind) from error


def _refusal(error: ApiException, doing: str, kind: Kind) -> Exception:
    message = _message(error)
    if error.status in PASSING:
        return Unreachable(f"the Kubernetes API answers {error.status}: {message}")
    if error.status == 409:
        return AlreadyThere(message)
    if _is_of_object(error):
        return NoSuchObject(message)
    if error.status == 404:  # a path that the server does not have: no such kind of object
        return UserError(
            f"this cluster has no {kind.name}s: {kind.api} is not served",
            expected=f"{kind.product} {kind.release}",
            fix=f"have it installed; see {kind.docs}",
            code=ExitCode.NOT_FOUND,
        )
    if error.status == 403 and "admission webhook" not in message:
        return UserError(
            f"not allowed to {doing} a {kind.name}: {message}",
            expected=f"the role vlmpipe-jobs of {kind.docs}, bound to the service account of the pipeline's steps",
            fix="kubectl apply it, or ask who administers the cluster",
            code=ExitCode.NO_PERMISSION,
        )
    if error.status == 401:
        return UserError(f"the Kubernetes API takes no credentials of this pod: {message}", code=ExitCode.NO_PERMISSION)
    old = "unknown field" in message
    return ConfigError(
        f"the cluster refuses the {kind.name}: {message}",
        expected=f"{kind.product} {kind.release}" if old else f"a {kind.name} that its rules allow",
        fix=f"have {kind.product} updated" if old else f"correct the section {kind.section} of the run file",
    )


def _is_of_object(error: ApiException) -> bool:
    """Return whether an object is missing, and not a path that the server does not have."""
    return error.status == 404 and bool((_status(error).get("details") or {}).get("name"))


def _message(error: ApiException) -> str:
    return str(_status(error).get("message") or error.body or error.reason or "").strip()[:1000]


def _status(error: ApiException) -> dict[str, Any]:
    try:
        content = json.loads(error.body or "")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
