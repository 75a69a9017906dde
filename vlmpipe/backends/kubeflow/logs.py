"""Follows the logs of a TrainJob's nodes: the chief's lines, and errors of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from vlmpipe.backends.error_line import ErrorLines
from vlmpipe.backends.kubeflow.status import Node, NoSuchObject


class Logs(Protocol):
    """Where the lines come from; see `vlmpipe.backends.kubeflow.client.Jobs.log`."""

    def log(self, pod: str, *, since: str = "", previous: bool = False) -> list[str]: ...


@dataclass
class _Read:
    """How far one pod's log was read."""

    restarts: int = 0
    last: str = ""  # time of the last line; texts of that form and zone are in the order of their times
    error: str = ""
    lines: ErrorLines = field(default_factory=ErrorLines)


class NodeLog:
    """Reads each pod's log on from where it was. Polled, not followed: a connection of days breaks, silently."""

    def __init__(self, logs: Logs, say: Callable[[str], None]) -> None:
        self._logs, self._say = logs, say
        self._read: dict[str, _Read] = {}

    def read(self, node: Node) -> None:
        """Take what the node has printed since. Raises Unreachable, UserError."""
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
            lines = self._logs.log(node.pod, since=so_far.last, previous=previous)
        except NoSuchObject:  # the pod has gone, and its log with it
            return
        for line in lines:
            time, _, text = line.partition(" ")
            if _later(so_far.last, time):
                so_far.last = time
                so_far.error = so_far.lines.read(text, so_far.error)
                if node.rank == 0:
                    self._say(f"[{node.pod}] {text}")


def _later(last: str, time: str) -> bool:
    """Whether `time` is after `last`: RFC 3339 in UTC, with up to nine digits behind the second, trailing zeros cut."""
    return _sortable(time) > _sortable(last)


def _sortable(time: str) -> tuple[str, str]:
    second, _, fraction = time.removesuffix("Z").partition(".")
    return second, fraction.ljust(9, "0")
