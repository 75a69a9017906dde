"""Watches a TrainJob from creation to end; resumes an earlier watch, shows progress, stops on request."""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from vlmpipe.platforms.jobs.finished_program import FinishedProgram
from vlmpipe.platforms.jobs.job_failure import failure, meaning
from vlmpipe.platforms.jobs.signals import handling
from vlmpipe.platforms.kubeflow.jobs.logs import NodeLog, say
from vlmpipe.platforms.kubeflow.jobs.status import (
    DEADLINE_EXCEEDED,
    OUT_OF_MEMORY,
    AlreadyThere,
    Ended,
    JobState,
    Node,
    NoSuchObject,
    Unreachable,
    cause,
    job_state,
    nodes_of,
)
from vlmpipe.trainer.errors import ExitCode, UserError

if TYPE_CHECKING:
    from vlmpipe.platforms.kubeflow.jobs.client import Jobs

FIRST_POLL_S, LONGEST_POLL_S = 0.5, 10.0
FIRST_CONTACT_S = 60.0  # for an API that does not answer at all
PATIENCE_S = 900.0  # for one that answered before: a control plane is updated in that time
NO_SETTINGS = "CreateContainerConfigError"  # a kubelet's reason for a missing secret or key, and for a refused user
STUCK_S = 600.0  # for an image that cannot be pulled: registries have short failures
GONE_S = 900.0  # for a job that is being deleted
T = TypeVar("T")


class Stopped(Exception):
    """The step was asked to end."""


class Watch:
    """One TrainJob. `starting` is called before it is created; `program` tells whether a job runs on without reason.

    `wait` waits for some seconds, or raises Stopped: then the TrainJob is deleted.
    """

    def __init__(
        self,
        jobs: Jobs,
        body: dict[str, Any],
        *,
        wait: Callable[[float], None],
        starting: Callable[[], object],
        program: FinishedProgram,
    ) -> None:
        self._jobs, self._body, self._name = jobs, body, str(body["metadata"]["name"])
        self._wait, self._starting, self._program = wait, starting, program
        self._log = NodeLog(jobs)
        self._ended: dict[Ended, None] = {}  # in the order in which it was seen
        self._said: dict[str, str] = {}
        self._stuck_s: dict[str, float] = {}

    def run(self) -> None:
        """Return when the job is complete, or when its program is and the job does not end: then it is deleted.

        Raises UserError: with the exit code of the node that failed, PREEMPTED when the job was stopped or deleted,
        UNAVAILABLE when the API or an image cannot be had, NOT_FOUND without Kubeflow Trainer.
        """
        try:
            self._take_up()
            self._follow()
        except Stopped:
            self._end("asked to stop")
            raise UserError("stopped on request", fix="run again to continue", code=ExitCode.PREEMPTED) from None

    def _take_up(self) -> None:
        """Create the TrainJob, or find the one that this step created before it was started again."""
        self._patiently(
            lambda: self._jobs.pods(self._name), FIRST_CONTACT_S
        )  # shows that it is allowed before a job is created
        result = self._patiently(self._find, FIRST_CONTACT_S)
        if result and job_state(result).phase == "failed":
            say(f"TrainJob {self._name} failed before: it is deleted and created again")
            self._patiently(lambda: self._jobs.delete(self._name), PATIENCE_S)
            result = self._patiently(self._find, PATIENCE_S)
        deadline_s = time.monotonic() + GONE_S
        while result and job_state(result).phase in ("deleting", "failed"):
            if time.monotonic() >= deadline_s:
                raise UserError(
                    f"TrainJob {self._name} is still being deleted after {GONE_S:g} s",
                    fix=f"look at kubectl -n {self._jobs.namespace} describe trainjob {self._name}",
                    code=ExitCode.UNAVAILABLE,
                )
            self._wait(FIRST_POLL_S)
            result = self._patiently(self._find, PATIENCE_S)
        if result:
            say(f"TrainJob {self._name} is there already: it is watched")
            return
        # A step that is killed deletes nothing: what it leaves then goes with the run, when that is deleted.
        if owner := self._patiently(self._owner, PATIENCE_S):
            self._body["metadata"]["ownerReferences"] = [owner]
        self._starting()
        self._patiently(self._create, PATIENCE_S)
        spec = self._body["spec"]["trainer"]
        nodes = f"{spec['numNodes']} node{'s' if spec['numNodes'] > 1 else ''} x {spec['numProcPerNode']}"
        say(f"TrainJob {self._name} created in namespace {self._jobs.namespace}: {nodes}")

    def _find(self) -> dict[str, object] | None:
        with contextlib.suppress(NoSuchObject):
            return self._jobs.get(self._name)
        return None

    def _owner(self) -> dict[str, str] | None:
        with contextlib.suppress(NoSuchObject):
            return self._jobs.owner()
        return None

    def _create(self) -> None:
        with contextlib.suppress(AlreadyThere):  # the answer to an earlier try was lost
            self._jobs.create(self._body)

    def _follow(self) -> None:
        poll_s = FIRST_POLL_S
        while True:
            job = self._patiently(self._find, PATIENCE_S)
            state = job_state(job) if job else JobState("deleting")
            self._look_at_nodes(final=state.over)
            self._say_once("job", _sentence(state))
            if state.phase == "complete":
                return
            if state.phase == "failed":
                raise self._failure(state)
            if state.phase == "deleting":
                text = f"TrainJob {self._name} was deleted from outside"
                raise UserError(text, fix="run again to continue", code=ExitCode.PREEMPTED)
            if self._program.lingers():
                self._end(self._program.sentence())
                return
            if (ended := cause(self._ended)) and ended.permanent:  # Kubernetes would start it again all the same
                self._end(f"{ended.pod} ended with {ended.code}{meaning(ended.code)}")
                raise self._failure(state)
            self._wait(poll_s)
            poll_s = min(2 * poll_s, LONGEST_POLL_S)

    def _look_at_nodes(self, *, final: bool) -> None:
        try:
            nodes = nodes_of(self._jobs.pods(self._name))
            for node in nodes:
                self._ended.update(dict.fromkeys(node.ended))
                self._say_once(node.pod, node.waits and f"{node.pod} waits: {node.waits}")
                self._read_log(node)
        except (Unreachable, NoSuchObject):
            return  # the job's own state decides
        if not final:
            self._refuse_stuck(nodes)

    def _read_log(self, node: Node) -> None:
        try:
            self._log.read(node)
        except UserError as error:  # the job runs on without its log being read
            self._say_once("log", f"the log is not shown: {error.found}")

    def _refuse_stuck(self, nodes: list[Node]) -> None:
        now_s = time.monotonic()
        self._stuck_s = {node.pod: self._stuck_s.get(node.pod, now_s) for node in nodes if node.stuck}
        for node in nodes:
            if node.stuck and now_s - self._stuck_s[node.pod] >= STUCK_S:
                self._end(f"{node.pod} cannot start")
                raise UserError(
                    f"{node.pod} cannot start: {node.waits}",
                    expected="an image and settings with which the cluster can start the node",
                    fix=_to_start(node, self._jobs.namespace),
                    code=ExitCode.UNAVAILABLE,
                )

    def _failure(self, state: JobState) -> UserError:
        log = f"kubectl -n {self._jobs.namespace} logs --tail -1 -l jobset.sigs.k8s.io/jobset-name={self._name}"
        ended = cause(self._ended)
        if ended is None or state.reason == DEADLINE_EXCEEDED:
            result = f"TrainJob {self._name} failed: {state.why or 'its pods are gone and left no exit code'}"
            if state.reason == DEADLINE_EXCEEDED:
                result = f"the job ran longer than its timeout of {self._body['spec']['activeDeadlineSeconds']} s"
            return UserError(result, fix=f"read {log}", code=ExitCode.UNEXPECTED)
        reason = self._log.last_error(ended.pod)
        if ended.reason == OUT_OF_MEMORY:
            reason = (
                f"{ended.pod} was killed for lack of memory: raise kubeflow.memory_gib, or lower data.sequence_length"
            )
        return failure(ended.code, ended.pod, reason, log=log, restarts=0)

    def _end(self, why: str) -> None:
        try:
            self._jobs.delete(self._name)
        except (Unreachable, UserError) as error:
            say(f"{why}, but TrainJob {self._name} could not be deleted and is still running: {error}")
        else:
            say(f"{why}: TrainJob {self._name} is deleted")

    def _say_once(self, of: str, text: str) -> None:
        if text and self._said.get(of) != text:
            say(text)
        self._said[of] = text

    def _patiently(self, call: Callable[[], T], patience_s: float) -> T:
        deadline_s, wait_s = time.monotonic() + patience_s, FIRST_POLL_S
        while True:
            try:
                return call()
            except Unreachable as error:
                if time.monotonic() >= deadline_s:
                    raise UserError(
                        f"{error} (for {patience_s:g} s)",
                        expected="the API of the cluster in which this step runs",
                        fix="start the step again: it finds a job that was created",
                        code=ExitCode.UNAVAILABLE,
                    ) from None
                self._say_once("api", f"{error}; trying again")
            self._wait(wait_s)
            wait_s = min(2 * wait_s, LONGEST_POLL_S)


def _to_start(node: Node, namespace: str) -> str:
    """Return what lets a stuck node start."""
    if not node.waits.startswith(NO_SETTINGS):
        return "correct cluster.image_uri, or give the cluster access to that registry"
    if "secret" in node.waits.lower():
        return f"correct kubeflow.secret_env, or make that secret in namespace {namespace}"
    return (
        "correct that in the runtime (kubeflow.runtime), or take an image (cluster.image_uri) that the cluster starts"
    )


def _sentence(state: JobState) -> str:
    return {
        "created": "waiting for the nodes",
        "suspended": f"suspended: {state.why}",
        "running": "running",
        "complete": "complete",
    }.get(state.phase, "")


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[float], None]]:
    """A wait that SIGTERM and SIGINT cut short with Stopped, also when they came before it."""
    # SimpleQueue.put is reentrant. Event.set is not: the interrupted wait may hold the lock that it needs.
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()

    def wait(seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            asked.get(timeout=seconds)
            raise Stopped

    with handling((signal.SIGTERM, signal.SIGINT), lambda number, _: asked.put(number)):
        yield wait
