"""`vlmpipe submit --target kubeflow`: compile a run file and start it on Kubeflow Pipelines."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from datetime import datetime

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.spending.approval import (
    Spending,
    dollars,
    fail_on_error,
    on_own_machines,
    reasons_to_confirm,
    require_approval,
    spending_of,
)
from vlmpipe.planner.sweep import plan_config
from vlmpipe.platforms.base import Order
from vlmpipe.platforms.compiled import FOLDER, Compiled
from vlmpipe.platforms.kubeflow.requirements import require_kubeflow, require_reached_files, root_uri_of
from vlmpipe.platforms.kubeflow.run import RunOnKubeflow
from vlmpipe.platforms.kubeflow.runs.names import KubeflowRun
from vlmpipe.runs.submitted import RunRecord, job_id_at
from vlmpipe.trainer.config.job import require_run_id
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.outage import answering_soon

ENDPOINT_VARIABLE = "KF_PIPELINES_ENDPOINT"  # kfp's own


@dataclass(frozen=True)
class SubmittedToKubeflow:
    """The run that was started, or with --dry-run would be; `run` is then None."""

    name: str
    endpoint: str
    compiled: Compiled
    spending: Spending
    parameters: dict[str, str]
    run_uri: str
    question: str  # the reason to confirm; empty for a run that needs none
    run: KubeflowRun | None = None
    note: str = ""

    @property
    def started(self) -> RunOnKubeflow | None:
        return RunOnKubeflow(self.run) if self.run else None

    def as_json(self) -> dict[str, object]:
        return {
            "sent": self.run is not None,
            "resource_name": self.run.link if self.run else None,
            "run_uri": self.run_uri,
            "pipeline": str(self.compiled.path),
            "endpoint": self.endpoint,
            "request": {"display_name": self.name, "parameters": self.parameters},
            "plan": {
                "state": self.spending.state,
                "usd": self.spending.usd,
                "hours": self.spending.hours,
                "machines": self.spending.machines,
                "needs_a_yes": self.question or None,
            },
            "notes": [self.note] if self.note else [],
        }

    def lines(self) -> list[str]:
        cost = "cost not known" if self.spending.usd is None else f"at most {dollars(self.spending.usd)}"
        table = {
            "plan": f"{self.spending.state}, {cost} on {self.spending.machines}",
            "pipeline": f"{self.compiled.path} ({self.compiled.steps} steps, {self.compiled.jobs} jobs)",
            "results": self.run_uri,
        }
        if self.run:
            first = f"{self.name} is started on Kubeflow"
            table |= {"page": self.run.link, "to follow": f"vlmpipe status {self.name} --watch"}
        else:
            first = f"Nothing was sent. Without --dry-run, to {self.endpoint} with {self.parameters}"
            table |= {"asks": f"{self.question}; --yes answers"} if self.question else {}
        note = [f"  note: {self.note}"] if self.note else []
        return [first, *note, *(f"  {name:<9} {value}" for name, value in table.items())]


def endpoint_of(config: RunConfig) -> str:
    """Address of Kubeflow Pipelines. Raises ConfigError without one."""
    result = config.kubeflow.endpoint or os.environ.get(ENDPOINT_VARIABLE, "")
    if not result:
        raise ConfigError(
            f"kubeflow.endpoint and {ENDPOINT_VARIABLE} are empty",
            expected="the address of Kubeflow Pipelines, such as https://kubeflow.example.org/pipeline",
            fix="add kubeflow.endpoint=ADDRESS; kubectl port-forward svc/ml-pipeline 8888 gives http://localhost:8888",
        )
    return result if "://" in result else f"https://{result}"


def submit_to_kubeflow(order: Order) -> SubmittedToKubeflow:
    """Start a run on Kubeflow Pipelines. The pipeline is written to build/pipelines/<name>.kubeflow.yaml.

    Asks for a confirmation unless plan.machine.usd_per_hour says what the user's own machines cost, and that is little.
    """
    config = order.config
    require_kubeflow(config)
    require_reached_files(config)
    if order.run_id:
        require_run_id(order.run_id)
    endpoint = endpoint_of(config)
    spending = on_own_machines(config, spending_of(config, plan_config(config)))
    limit_usd = config.plan.confirm_above_usd
    question = reasons_to_confirm(spending, limit_usd)
    fail_on_error(spending, force=order.force)
    compiled = order.compile(config, FOLDER / f"{config.name}.kubeflow.yaml")
    name = job_id_at(config, datetime.now())
    parameters = {"run_id": order.run_id or name}  # named here, so that its folder is known
    run_uri = join_uri(root_uri_of(config), "runs", parameters["run_id"])
    result = SubmittedToKubeflow(name, endpoint, compiled, spending, parameters, run_uri, question)
    if order.dry_run:
        return result
    from vlmpipe.platforms.kubeflow.runs.client import KubeflowRuns
    from vlmpipe.platforms.kubeflow.runs.version import require_version

    section = config.kubeflow
    with answering_soon():
        runs = KubeflowRuns(endpoint, section.namespace)
        note = require_version(runs.api, compiled.path)
    approved = require_approval(
        spending, confirm_above_usd=limit_usd, force=order.force, yes=order.yes, dry_run=False, ask=order.ask
    )
    run = runs.start(compiled.path, approved, name=name, experiment=section.experiment, parameters=parameters)
    record = RunRecord(
        run.link,
        run_uri,
        datetime.now().timestamp(),
        spending.usd,
        tuple(order.source),
        namespace=section.namespace,
        subcommand=config.subcommand,
        service="kubeflow",
    )
    record.write(name)
    run = KubeflowRun(run.endpoint, run.run_id, name, section.namespace, run_uri)
    return dataclasses.replace(result, run=run, note=note)
