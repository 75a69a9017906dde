"""Status of a TrainJob and its pods, as pure functions of the Kubernetes API's JSON.

Conditions: Complete, Failed and Suspended, of which the first two are final (kubeflow/trainer, trainjob_types.go and
pkg/controller/trainjob_controller.go).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vlmpipe.platforms.jobs.job_failure import PERMANENT, rank_of_code
from vlmpipe.platforms.kubeflow.jobs.manifest import NODE

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
DEADLINE_EXCEEDED = "DeadlineExceeded"
OUT_OF_MEMORY = "OOMKilled"
# Reasons that keep a container from starting until the image or the settings are corrected.
STUCK = (
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
    "CreateContainerError", "RunContainerError",
)  # fmt: skip

Phase = Literal["created", "suspended", "running", "complete", "failed", "deleting"]
Json = Mapping[str, Any]


class Unreachable(Exception):
    """The API did not answer, or not now: worth another try."""


class NoSuchObject(Exception):
    """There is no TrainJob or pod of that name."""


class AlreadyThere(Exception):
    """There is a TrainJob of that name."""


@dataclass(frozen=True)
class JobState:
    """State of a TrainJob; `why` is the text of its condition, reason first."""

    phase: Phase
    reason: str = ""
    why: str = ""

    @property
    def over(self) -> bool:
        return self.phase in ("complete", "failed")


@dataclass(frozen=True)
class Ended:
    """How a node's container ended, also before a restart."""

    pod: str
    code: int
    reason: str = ""

    @property
    def permanent(self) -> bool:
        """Return whether the next start would fail in the same way."""
        return self.code in PERMANENT


@dataclass(frozen=True)
class Node:
    """One pod. `waits` is why its container does not run yet, `restarts` how often it was restarted."""

    pod: str
    rank: int
    started: bool
    restarts: int = 0
    waits: str = ""
    stuck: bool = False
    ended: tuple[Ended, ...] = ()


def job_state(job: Json) -> JobState:
    """The state of a TrainJob by its conditions; one that is being deleted is "deleting" whatever they are."""
    conditions = {
        condition["type"]: condition
        for condition in job.get("status", {}).get("conditions", ())
        if condition["status"] == "True"
    }
    phases: tuple[tuple[str, Phase], ...] = (("Failed", "failed"), ("Complete", "complete"), ("Suspended", "suspended"))
    if job["metadata"].get("deletionTimestamp"):
        return JobState("deleting")
    for kind, phase in phases:
        if kind in conditions:
            return JobState(phase, conditions[kind].get("reason", ""), _reason_and_message(conditions[kind]))
    active = any(status.get("active") or status.get("ready") for status in job.get("status", {}).get("jobsStatus", ()))
    return JobState("running" if active else "created")


def nodes_of(pods: Iterable[Json]) -> list[Node]:
    """The nodes by rank; of a rank whose pod was replaced, the newest pod last."""
    return sorted((_node(pod) for pod in pods), key=lambda node: node.rank)


def cause(ended: Iterable[Ended]) -> Ended | None:
    """The most informative end: one that names a cause before a kill before "error"; of equals, the first."""
    return min((end for end in ended if end.code), key=lambda end: rank_of_code(end.code), default=None)


def _node(pod: Json) -> Node:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    rank = int(pod["metadata"].get("labels", {}).get(INDEX_LABEL, 0))
    container: Json = next(
        (
            container_status
            for container_status in status.get("containerStatuses", ())
            if container_status["name"] == NODE
        ),
        {},
    )
    state = container.get("state", {})
    ends = [ended["terminated"] for ended in (container.get("lastState", {}), state) if ended.get("terminated")]
    waiting = state.get("waiting", {})
    return Node(
        pod=name,
        rank=rank,
        started="running" in state or bool(ends),
        restarts=int(container.get("restartCount", 0)),
        waits=_why_not_running(status, waiting),
        stuck=waiting.get("reason") in STUCK,
        ended=tuple(Ended(name, int(end["exitCode"]), end.get("reason", "")) for end in ends),
    )


def _why_not_running(status: Json, waiting: Json) -> str:
    """Why the container does not run: its own reason, else that of the pod, which is not scheduled or was evicted."""
    if waiting and waiting.get("reason") not in ("ContainerCreating", "PodInitializing"):
        return _reason_and_message(waiting)
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _reason_and_message(condition)
    return _reason_and_message(status) if status.get("phase") == "Failed" and status.get("reason") else ""


def _reason_and_message(content: Json) -> str:
    return ": ".join(filter(None, (content.get("reason", ""), content.get("message", ""))))
