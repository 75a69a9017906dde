"""Logs of a run on Kubeflow Pipelines: what the pods of its steps have printed, from the Kubernetes API.

Kubeflow's own API has no logs. Pods of a run have its id as a label, and the service tells which pod ran which task.
Needs a kubeconfig of the cluster, and a role that may get pods and their logs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import kfp_server_api
from kubernetes import client as k8s
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from vlmpipe.platforms.kubeflow.jobs.client import LIMIT, connection, has_no_log
from vlmpipe.platforms.kubeflow.runs.names import KubeflowRun
from vlmpipe.trainer.errors import ExitCode, UserError

RUN_LABEL, CONTAINER = "pipeline/runid", "main"


@dataclass(frozen=True)
class Line:
    """One line of a step's pod. time: RFC 3339."""

    time: str
    step: str
    pod: str
    text: str

    def line(self) -> str:
        return f"{self.time[:19]} [{self.step or self.pod}] {self.text}"


class PodLogs:
    """Reads lines that were not read before."""

    def __init__(self, run: KubeflowRun) -> None:
        self._client, namespace = connection()
        self._namespace, self._run = run.namespace or namespace, run
        self._core = k8s.CoreV1Api(self._client)
        self._last: dict[str, str] = {}  # time of each pod's last line

    def read(self, run: kfp_server_api.V2beta1Run, *, step: str = "", last: int = 0) -> list[Line]:
        """The new lines of all pods, oldest first; the last `last` of them, or all for 0. step: only this one's."""
        steps = steps_of_pods(run)
        lines = [
            line
            for pod in self._pods()
            if not step or steps.get(pod) == step
            for line in self._of_pod(pod, steps.get(pod, ""))
        ]
        lines.sort(key=lambda line: _moment(line.time))
        return lines[-last:] if last else lines

    def _pods(self) -> list[str]:
        with _translated():
            answer = self._core.list_namespaced_pod(
                self._namespace,
                label_selector=f"{RUN_LABEL}={self._run.run_id}",
                _preload_content=False,
                **LIMIT,
            )
        return [item["metadata"]["name"] for item in json.loads(answer.data)["items"]]

    def _of_pod(self, pod: str, step: str) -> Iterator[Line]:
        since = self._last.get(pod, "")
        text = ""
        with _translated(), contextlib.suppress(_NotStartedError):
            text = self._log(pod)
        for line in text.splitlines():
            time, _, words = line.partition(" ")
            if not since or _moment(time) > _moment(since):
                self._last[pod] = time
                yield Line(time, step, pod, words)

    def _log(self, pod: str) -> str:
        try:
            answer = self._core.read_namespaced_pod_log(
                pod, self._namespace, container=CONTAINER, timestamps=True, _preload_content=False, **LIMIT
            )
        except ApiException as error:
            if has_no_log(error):
                raise _NotStartedError from error
            raise
        return str(answer.data.decode("utf-8", "replace"))


class _NotStartedError(Exception):
    pass


def steps_of_pods(run: kfp_server_api.V2beta1Run) -> dict[str, str]:
    """The name of the task that each pod ran."""
    details = (run.run_details and run.run_details.task_details) or []
    named: Mapping[str, str] = {task.task_id: step_name(task.display_name) for task in details if task.task_id}
    pods = {}
    for task in details:
        children = [child.pod_name for child in task.child_tasks or () if child.pod_name]
        for pod in [task.pod_name, *children]:
            if pod:
                pods[pod] = step_name(task.display_name) or named.get(task.parent_task_id or "", "")
    return pods


def _moment(time: str) -> tuple[str, str]:
    """Compares as the times do: a fraction of a second may have any number of digits, also none."""
    seconds, _, fraction = time.removesuffix("Z").partition(".")
    return seconds, fraction.ljust(9, "0")


def step_name(display_name: object) -> str:
    """A step's name in the graph from its display name: "Base: sync checkpoint" is base-sync-checkpoint."""
    return str(display_name or "").lower().replace(": ", "-").replace(" ", "-")


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except HTTPError as error:
        raise UserError(f"the Kubernetes API does not answer: {error}", code=ExitCode.UNAVAILABLE) from error
    except ApiException as error:
        code = ExitCode.NO_PERMISSION if error.status in (401, 403) else ExitCode.UNAVAILABLE
        raise UserError(
            f"the logs of pods could not be read: {error.status} {error.reason}",
            expected="a kubeconfig of the run's cluster, and a role that may get pods and pods/log",
            code=code,
        ) from error
