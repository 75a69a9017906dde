"""A run on Kubeflow Pipelines, as commands ask for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.platforms.base import LogLine
from vlmpipe.platforms.kubeflow.runs.names import KubeflowRun
from vlmpipe.runs.watch import SERVICE_POLL_S

if TYPE_CHECKING:
    from vlmpipe.platforms.kubeflow.runs.client import KubeflowRuns
    from vlmpipe.platforms.kubeflow.runs.logs import PodLogs
    from vlmpipe.platforms.kubeflow.runs.status import KubeflowStatus
    from vlmpipe.runs.diagnosis import Diagnosis


@dataclass(frozen=True)
class RunOnKubeflow:
    """A run of Kubeflow Pipelines. Its logs are those of its pods, in Kubernetes."""

    run: KubeflowRun

    asks, asks_for_logs = "Kubeflow", "Kubernetes"

    @property
    def argument(self) -> str:
        return self.run.argument

    def reader(self) -> Callable[[], KubeflowStatus]:
        from vlmpipe.platforms.kubeflow.runs.status import status_of

        runs = self._runs()
        return lambda: status_of(self.run, runs.get(self.run))

    def logs(self, *, step: str, last: int, follow: bool) -> Iterator[LogLine]:
        from vlmpipe.platforms.kubeflow.runs.logs import PodLogs

        return self._lines(self._runs(), PodLogs(self.run), step, last, follow)

    def _lines(self, runs: KubeflowRuns, pods: PodLogs, step: str, last: int, follow: bool) -> Iterator[LogLine]:
        from vlmpipe.platforms.kubeflow.runs.client import OVER

        while True:
            result = runs.get(self.run)
            for line in pods.read(result, step=step, last=last):
                yield LogLine(line.line(), line.time, line.step, line.pod, line.text)
            if not follow or result.state in OVER:
                return
            last = 0
            time.sleep(SERVICE_POLL_S)

    def cancel(self) -> bool:
        return self._runs().cancel(self.run)

    def diagnose(self) -> Diagnosis:
        from vlmpipe.platforms.kubeflow.runs.diagnose import diagnose_kubeflow

        return diagnose_kubeflow(self.run)

    def _runs(self) -> KubeflowRuns:
        from vlmpipe.platforms.kubeflow.runs.client import KubeflowRuns

        return KubeflowRuns(self.run.endpoint, self.run.namespace)
