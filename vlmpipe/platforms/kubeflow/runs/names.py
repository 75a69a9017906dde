"""Names of runs on Kubeflow Pipelines: those submitted from this folder, and links to the page of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vlmpipe.runs.submitted import submitted_record

_LINK = re.compile(r"(?P<endpoint>https?://[^#]+?)/?#/runs/details/(?P<run>[0-9a-f-]{36})/?")
_NAME = re.compile(r"[a-z][-a-z0-9]{0,127}")


@dataclass(frozen=True)
class KubeflowRun:
    """A run, and where it is. namespace: empty on a Kubeflow for one user. run_uri: empty where it is not known."""

    endpoint: str
    run_id: str
    name: str = ""
    namespace: str = ""
    run_uri: str = ""

    @property
    def link(self) -> str:
        """The run's page."""
        return f"{self.endpoint}/#/runs/details/{self.run_id}"

    @property
    def argument(self) -> str:
        """The run's name in a command typed in this folder."""
        return self.name if self.name and submitted_record(self.name) else self.link


def kubeflow_run(name: str) -> KubeflowRun | None:
    """The run on Kubeflow called `name`: submitted from this folder, or a link to its page. None for other names."""
    record = submitted_record(name) if _NAME.fullmatch(name) else {}
    match = _LINK.fullmatch(str(record.get("resource_name") or name))
    if not match:
        return None
    known = name if record else ""
    uri, namespace = str(record.get("run_uri") or ""), str(record.get("namespace") or "")
    return KubeflowRun(match["endpoint"], match["run"], known, namespace, uri)
