"""What becomes of a TrainJob in the fake: a course that a test writes down, or its nodes as processes on localhost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from tests.fakes.kubernetes.train_job_rules import pod_patches
from vlmpipe.platforms.kubeflow.jobs.status import INDEX_LABEL

NODE = "node"
LINE_TIME = "2026-11-22T20:00:00.{:09d}Z"


@dataclass(frozen=True)
class Scene:
    """How a TrainJob stands for as long as one GET of it sees it; the last scene stays."""

    conditions: Sequence[tuple[str, str, str]] = ()  # type, reason, message
    pods: Sequence[Mapping[str, Any]] = ()  # as `pod` makes them
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)  # lines by pod; "pod previous" for the one before
    deleted: bool = False


def pod(rank: int = 0, *, state: Mapping[str, Any] | None = None, last: Mapping[str, Any] | None = None,
        restarts: int = 0, unscheduled: str = "") -> dict[str, Any]:  # fmt: skip
    """A node's pod with its container's `state` and `last` state: {"terminated": {"exitCode": 65}} and such."""
    status: dict[str, Any] = {"phase": "Running" if state and "running" in state else "Pending"}
    if unscheduled:
        status["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": unscheduled}
        ]
    else:
        container = {"name": NODE, "restartCount": restarts, "state": state or {}, "lastState": last or {}}
        status["containerStatuses"] = [container]
    return {"metadata": {"name": f"pod-{rank}", "labels": {INDEX_LABEL: str(rank)}}, "status": status}


def condition(kind: str, reason: str = "", message: str = "") -> dict[str, str]:
    return {
        "type": kind,
        "status": "True",
        "reason": reason or kind,
        "message": message,
        "lastTransitionTime": "2026-11-22T20:00:00Z",
    }


class Life(Protocol):
    """One TrainJob after its creation."""

    def look(self) -> bool:
        """The job is read: time goes on. False when somebody else has deleted it."""

    def status(self) -> dict[str, Any]: ...
    def pods(self) -> list[dict[str, Any]]: ...
    def log(self, name: str, previous: bool) -> list[tuple[str, str]] | None:
        """Lines with their times; None for a pod that is not there."""

    def end(self) -> None: ...


class Course:
    """A TrainJob that goes through scenes."""

    def __init__(self, scenes: Sequence[Scene]) -> None:
        self._scenes, self._at = list(scenes), -1

    @property
    def _now(self) -> Scene:
        return self._scenes[max(0, self._at)]

    def look(self) -> bool:
        self._at = min(self._at + 1, len(self._scenes) - 1)
        return not self._now.deleted

    def status(self) -> dict[str, Any]:
        conditions = [condition(*one) for one in self._now.conditions]
        return {"conditions": conditions} if conditions else {}

    def pods(self) -> list[dict[str, Any]]:
        return [dict(one) for one in self._now.pods]

    def log(self, name: str, previous: bool) -> list[tuple[str, str]] | None:
        lines = self._now.logs.get(f"{name} previous" if previous else name)
        start = 0 if previous else len(self._now.logs.get(f"{name} previous", ()))
        if lines is None:
            return None
        return [(LINE_TIME.format(start + number), line) for number, line in enumerate(lines)]

    def end(self) -> None:
        pass


def life_of(job: Mapping[str, Any], secrets: Mapping[str, Mapping[str, str]], claims: set[str] | None) -> Life:
    """Its nodes as processes, or pods that wait for what their namespace does not have.

    Nobody refuses such a job when it is made: a kubelet finds no secret, and the scheduler no claim.
    """
    trainer = job["spec"]["trainer"]
    for one in trainer.get("env", ()):
        where = one.get("valueFrom", {}).get("secretKeyRef")
        if where and where["key"] not in secrets.get(where["name"], {}):
            message = f'secret "{where["name"]}" not found'
            if where["name"] in secrets:
                message = f"couldn't find key {where['key']} in Secret {where['name']}"
            waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": message}}
            return Course([Scene(pods=[pod(rank, state=waiting) for rank in range(trainer["numNodes"])])])
    named = [volume.get("persistentVolumeClaim", {}).get("claimName") for patch in pod_patches(job["spec"])
             for volume in patch.get("volumes", ())]  # fmt: skip
    for claim in filter(None, named):
        if claims is not None and claim not in claims:
            why = f'0/3 nodes are available: persistentvolumeclaim "{claim}" not found.'
            return Course([Scene(pods=[pod(rank, unscheduled=why) for rank in range(trainer["numNodes"])])])
    return Processes(job, secrets)


class Processes:
    """A TrainJob whose nodes run here, with the variables that Trainer's torch runtime gives them.

    The job is complete when all have ended with 0, and failed when one has not (a runtime with backoffLimit 0).
    `secrets` are those of the namespace. A pod has nothing of this process's own variables for buckets.
    """

    def __init__(self, job: Mapping[str, Any], secrets: Mapping[str, Mapping[str, str]]) -> None:
        trainer = job["spec"]["trainer"]
        self._name, nodes = job["metadata"]["name"], trainer["numNodes"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [*trainer["command"], *trainer["args"]]
        command = [sys.executable if word == "python" else word for word in words]
        own = {one["name"]: _value(one, secrets) for one in trainer.get("env", ())}
        here = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self.environments = []
        self._processes, self._lines = [], [list[tuple[str, str]]() for _ in range(nodes)]
        for rank in range(nodes):
            pet = {
                "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(port),
            }  # fmt: skip
            self.environments.append(pet)
            process = subprocess.Popen(
                command,
                env={**here, "OMP_NUM_THREADS": "1", **own, **pet},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            self._processes.append(process)
            threading.Thread(target=self._read, args=(rank, process), daemon=True).start()

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        for line in process.stdout:
            second = datetime.fromtimestamp(int(time.time()), UTC).strftime("%Y-%m-%dT%H:%M:%S")
            self._lines[rank].append((f"{second}.{time.time_ns() % 10**9:09d}Z", line.rstrip("\n")))

    def look(self) -> bool:
        return True

    def status(self) -> dict[str, Any]:
        codes = [process.poll() for process in self._processes]
        if any(codes):
            return {"conditions": [condition("Failed", "JobsFailed", "jobset failed due to one or more job failures")]}
        if None not in codes:
            return {"conditions": [condition("Complete", "AllJobsCompleted", "jobset completed successfully")]}
        return {"jobsStatus": [{"name": NODE, "ready": 1, "succeeded": 0, "failed": 0, "active": 1, "suspended": 0}]}

    def pods(self) -> list[dict[str, Any]]:
        found = []
        for rank, process in enumerate(self._processes):
            code = process.poll()
            state = {"running": {}} if code is None else {"terminated": {"exitCode": code if code >= 0 else 128 - code}}
            found.append(pod(rank, state=state))
            found[-1]["metadata"]["name"] = f"{self._name}-{NODE}-0-{rank}-abcde"
        return found

    def log(self, name: str, previous: bool) -> list[tuple[str, str]] | None:
        rank = int(name.split("-")[-2])
        return None if previous else list(self._lines[rank])

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            process.wait(30)


def _value(variable: Mapping[str, Any], secrets: Mapping[str, Mapping[str, str]]) -> str:
    if "value" in variable:
        return str(variable["value"])
    where = variable["valueFrom"]["secretKeyRef"]
    return secrets[where["name"]][where["key"]]
