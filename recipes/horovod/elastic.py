"""Runs a program in a changing number of Horovod processes on this node: elastic.py --least 2 PROGRAM ...

Horovod gives a host up when one of its processes is lost. Here each process counts as a host, so that a loss costs only
itself; another process takes its place some seconds later, under a name that Horovod has not given up.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
from typing import Any

from horovod.runner.common.util import safe_shell_exec
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.settings import ElasticSettings
from horovod.runner.gloo_run import launch_gloo_elastic
from horovod.runner.http.http_server import RendezvousServer

USAGE = 64  # exit code of a run file that has to be changed
LOOPBACK = "lo"


class Processes(HostDiscovery):
    """The names of the processes that run or may be started. Methods are called from several threads."""

    def __init__(self, count: int, replace_after_s: float) -> None:
        self._names = (f"process-{number}" for number in itertools.count())
        self._live = [next(self._names) for _ in range(count)]
        self._lost_s: list[float] = []  # when those were lost that have no successor yet
        self._replace_after_s, self._lock = replace_after_s, threading.Lock()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        with self._lock:
            while self._lost_s and time.monotonic() - self._lost_s[0] > self._replace_after_s:
                self._lost_s.pop(0)
                self._live.append(next(self._names))
            return dict.fromkeys(self._live, 1)

    def run(self, command: str, slot: Any, events: list[threading.Event]) -> tuple[int, float]:
        """Start a process and wait for its end. Returns its exit code, and when that was."""
        print(f"elastic: {slot.hostname} starts", flush=True)
        code = safe_shell_exec.execute(command, index=slot.rank, events=events)
        if code:
            print(f"elastic: {slot.hostname} ended with {code}", flush=True)
            with self._lock:
                if slot.hostname in self._live:
                    self._live.remove(slot.hostname)
                    self._lost_s.append(time.monotonic())
        return code, time.time()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--least", type=int, required=True, help="processes with which training continues")
    parser.add_argument("--replace-after-s", type=float, default=30.0, help="after which a lost one is replaced")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if int(os.environ.get("NNODES", "1")) > 1:
        print("elastic.py: starts processes on one node only: set cluster.replica_count to 1", flush=True)
        return USAGE
    count = int(os.environ["NPROC_PER_NODE"])
    processes = Processes(count, given.replace_after_s)
    settings = ElasticSettings(
        processes, given.least, count, num_proc=count, elastic_timeout=600, reset_limit=None, verbose=0
    )
    try:
        launch_gloo_elastic(
            given.program, processes.run, settings, dict(os.environ), lambda driver: {LOOPBACK}, RendezvousServer(0),
            sys.executable,
        )  # fmt: skip
    except RuntimeError as error:
        print(f"elastic: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
