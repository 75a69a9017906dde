"""Follows the logs of a TrainJob's nodes: the chief's lines, and errors of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vlmpipe.platforms.jobs.job_failure import ErrorLines
from vlmpipe.platforms.kubeflow.jobs.status import Node, NoSuchObject

if TYPE_CHECKING:
    from vlmpipe.platforms.kubeflow.jobs.client import Jobs


def say(line: str) -> None:
    """Print a line of the step's own log."""
    print(line, flush=True)


@dataclass
class _Read:
    """How far one pod's log was read."""

    restarts: int = 0
    last: str = ""  # time of the last line; texts of that form and zone are in the order of their times
    error: str = ""
    lines: ErrorLines = field(default_factory=ErrorLines)


class NodeLog:
    """Reads new lines of each pod's log. It polls: a connection that follows a log for days breaks silently."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._read: dict[str, _Read] = {}

    def read(self, node: Node) -> None:
        """Read lines that the node has printed since. Raises Unreachable, UserError."""
        if not node.started:
            return
        so_far = self._read.setdefault(node.pod, _Read())
        if node.restarts > so_far.restarts:
            so_far.restarts = node.restarts
            self._take(node, so_far, previous=True)
        self._take(node, so_far, previous=False)

    def last_error(self, pod: str) -> str:
        """The last error sentence that the pod printed; empty if none."""
        return self._read[pod].error if pod in self._read else ""

    def _take(self, node: Node, so_far: _Read, *, previous: bool) -> None:
        try:
            lines = self._jobs.log(node.pod, since=so_far.last, previous=previous)
        except NoSuchObject:  # the pod has gone, and its log with it
            return
        for line in lines:
            time, _, text = line.partition(" ")
            if _sortable(time) > _sortable(so_far.last):
                so_far.last = time
                so_far.error = so_far.lines.read(text, so_far.error)
                if node.rank == 0:
                    say(f"[{node.pod}] {text}")


def _sortable(time: str) -> tuple[str, str]:
    """A time as a sort key: RFC 3339 in UTC, with up to nine digits of the second, trailing zeros cut."""
    second, _, fraction = time.removesuffix("Z").partition(".")
    return second, fraction.ljust(9, "0")
