"""Status of a TrainJob and its pods, as pure functions of the Kubernetes API's JSON.

Conditions: Complete, Failed and Suspended, of which the first two are final (kubeflow/trainer, trainjob_types.go and
pkg/controller/trainjob_controller.go).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vlmpipe.backends.kubeflow.manifest import NODE
from vlmpipe.backends.local.restart_policy import PERMANENT
from vlmpipe.backends.local.supervisor import rank_of_code

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
DEADLINE_EXCEEDED = "DeadlineExceeded"
OUT_OF_MEMORY = "OOMKilled"
# Reasons for which a container does not start, and which pass only when somebody changes something.
STUCK = (
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
    "CreateContainerError", "RunContainerError",
)  # fmt: skip

Phase = Literal["created", "suspended", "running", "complete", "failed", "deleting"]
Json = Mapping[str, Any]


class Unreachable(Exception):
    """Nobody answered, or not now: worth another try."""


class NoSuchObject(Exception):
    """There is no TrainJob or pod of that name."""


class AlreadyThere(Exception):
    """There is a TrainJob of that name."""


@dataclass(frozen=True)
class JobState:
    """How a TrainJob stands; `why` is what its condition says, reason first."""

    phase: Phase
    reason: str = ""
    why: str = ""

    @property
    def over(self) -> bool:
        return self.phase in ("complete", "failed")


@dataclass(frozen=True)
class Ended:
    """How a node's container ended, or did once before it was started again."""

    pod: str
    code: int
    reason: str = ""

    @property
    def permanent(self) -> bool:
        """Whether the next start would meet the same."""
        return self.code in PERMANENT


@dataclass(frozen=True)
class Node:
    """One pod. `waits` is why its container does not run yet, `restarts` how often it was started again."""

    pod: str
    rank: int
    started: bool
    restarts: int = 0
    waits: str = ""
    stuck: bool = False
    ended: tuple[Ended, ...] = ()


def job_state(job: Json) -> JobState:
    """The state that a TrainJob's conditions mean. One that is being deleted is that, whatever they say."""
    conditions = {one["type"]: one for one in job.get("status", {}).get("conditions", ()) if one["status"] == "True"}
    phases: tuple[tuple[str, Phase], ...] = (("Failed", "failed"), ("Complete", "complete"), ("Suspended", "suspended"))
    found: JobState | None = None
    for kind, phase in phases:
        if kind in conditions:
            reason, message = conditions[kind].get("reason", ""), conditions[kind].get("message", "")
            found = JobState(phase, reason, ": ".join(filter(None, (reason, message))))
            break
    if job["metadata"].get("deletionTimestamp"):
        return JobState("deleting")
    if found:
        return found
    active = any(one.get("active") or one.get("ready") for one in job.get("status", {}).get("jobsStatus", ()))
    return JobState("running" if active else "created")


def nodes_of(pods: Iterable[Json]) -> list[Node]:
    """The nodes by rank; of a rank whose pod was replaced, the newest pod last."""
    return sorted((_node(pod) for pod in pods), key=lambda node: node.rank)


def cause(ended: Iterable[Ended]) -> Ended | None:
    """The end that tells most: one that names a cause before a kill before "error"; of equals, the first."""
    return min((one for one in ended if one.code), key=lambda one: rank_of_code(one.code), default=None)


def _node(pod: Json) -> Node:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    rank = int(pod["metadata"].get("labels", {}).get(INDEX_LABEL, 0))
    container: Json = next((one for one in status.get("containerStatuses", ()) if one["name"] == NODE), {})
    state = container.get("state", {})
    ends = [one["terminated"] for one in (container.get("lastState", {}), state) if one.get("terminated")]
    waiting = state.get("waiting", {})
    return Node(
        pod=name,
        rank=rank,
        started="running" in state or bool(ends),
        restarts=int(container.get("restartCount", 0)),
        waits=_words(waiting) or _unscheduled(status) or _evicted(status),
        stuck=waiting.get("reason") in STUCK,
        ended=tuple(Ended(name, int(one["exitCode"]), one.get("reason", "")) for one in ends),
    )


def _words(waiting: Json) -> str:
    if not waiting or waiting.get("reason") in ("ContainerCreating", "PodInitializing"):
        return ""
    return ": ".join(filter(None, (waiting.get("reason", ""), waiting.get("message", ""))))


def _unscheduled(status: Json) -> str:
    for one in status.get("conditions", ()):
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return ": ".join(filter(None, (one.get("reason", ""), one.get("message", ""))))
    return ""


def _evicted(status: Json) -> str:
    if status.get("phase") == "Failed" and status.get("reason"):  # of the pod itself: evicted, node lost, preempted
        return ": ".join(filter(None, (status["reason"], status.get("message", ""))))
    return ""
