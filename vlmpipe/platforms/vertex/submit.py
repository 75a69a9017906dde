"""`vlmpipe submit`: plan, compile, check credentials and buckets, confirm, send.

Everything that can fail comes before the confirmation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from vlmpipe.google_cloud.bucket_checks import require_buckets
from vlmpipe.google_cloud.client import endpoint, pipeline_client
from vlmpipe.planner.cost.quotas import quotas
from vlmpipe.planner.spending.approval import (
    Spending,
    dollars,
    fail_on_error,
    reasons_to_confirm,
    require_approval,
    spending_of,
)
from vlmpipe.planner.sweep import plan_config
from vlmpipe.platforms.base import Order
from vlmpipe.platforms.compiled import FOLDER, Compiled
from vlmpipe.platforms.jobs.packages import packaged, upload
from vlmpipe.platforms.vertex.pipeline_job import Submission, prepare, send
from vlmpipe.platforms.vertex.requirements import require_own_project, require_reached_files, require_vertex
from vlmpipe.platforms.vertex.run import RunOnVertex
from vlmpipe.platforms.vertex.runs.names import Address
from vlmpipe.runs.submitted import RunRecord, job_id_at

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class SubmittedToVertex:
    """The request that was sent, or with --dry-run would be. `resource_name` is empty when nothing was sent."""

    submission: Submission
    compiled: Compiled
    spending: Spending
    question: str  # the reason to confirm; empty for a run that needs none
    endpoint: str
    resource_name: str
    quotas: dict[str, int]  # the least limit of each that the jobs need
    notes: tuple[str, ...] = ()  # checks that were not possible before it was sent

    @property
    def started(self) -> RunOnVertex | None:
        if not self.resource_name:
            return None
        return RunOnVertex(Address(self.submission.place, self.submission.job_id))

    def as_json(self) -> dict[str, object]:
        spending = self.spending
        return {
            "sent": bool(self.resource_name),
            "resource_name": self.resource_name or None,
            "console_url": self.submission.console_url,
            "run_uri": self.submission.run_uri,
            "pipeline": str(self.compiled.path),
            "endpoint": self.endpoint,
            "notes": list(self.notes),
            "request": self.submission.as_dict(),
            "plan": {
                "state": spending.state,
                "usd": spending.usd,
                "hours": spending.hours,
                "machines": spending.machines,
                "term": spending.term,
                "needs_a_yes": self.question or None,
                "quotas": self.quotas,
            },
        }

    def lines(self) -> list[str]:
        submission = self.submission
        cost = "cost not known" if self.spending.usd is None else f"about {dollars(self.spending.usd)}"
        table = {
            "plan": f"{self.spending.state}, {cost} on {self.spending.machines}, {self.spending.term}",
            "pipeline": f"{self.compiled.path} ({self.compiled.steps} steps, {self.compiled.jobs} jobs)",
            "results": submission.run_uri,
        }
        if self.quotas:
            needed = ", ".join(f"{count} of {metric}" for metric, count in self.quotas.items())
            table |= {"quotas": f"{needed} in {submission.place.location}"}
        if submission.job.template_uri:
            table |= {"published": submission.job.template_uri}
        if self.resource_name:
            first = [f"{submission.job_id} is started on Vertex AI", *(f"  note: {note}" for note in self.notes)]
            table |= {"job": self.resource_name, "console": submission.console_url}
            table |= {"to follow": f"vlmpipe status {submission.job_id} --watch"}
        else:
            first = [f"Nothing was sent. Without --dry-run, to {self.endpoint}:"]
            first += json.dumps(submission.as_dict(), indent=2, ensure_ascii=False).splitlines()
            if self.question:
                table["asks"] = f"{self.question}; --yes answers"
        return [*first, *(f"  {name:<9} {value}" for name, value in table.items())]


def submit_to_vertex(order: Order) -> SubmittedToVertex:
    """Start a run on Vertex AI. The pipeline is written to build/pipelines/<name>.vertex.yaml.

    With `force`, jobs that Vertex AI would refuse are still not compiled.
    """
    config, run_id, force = order.config, order.run_id, order.force
    config, packages = packaged(config)
    require_vertex(config)
    require_reached_files(config)
    address = endpoint(config.gcp.location)
    spending = spending_of(config, plan_config(config))
    fail_on_error(spending, force=force)  # before compiling, which would name only the jobs' errors
    limit_usd = config.plan.confirm_above_usd
    if order.template:
        compiled, template_uri = order.template.compiled, order.template.address
    else:
        compiled, template_uri = order.compile(config, FOLDER / f"{config.name}.vertex.yaml"), ""
    job_id = job_id_at(config, datetime.now())
    submission = prepare(config, compiled.path, job_id=job_id, run_id=run_id, template_uri=template_uri)
    client, notes = None, list[str]()
    if not order.dry_run:
        require_own_project(config.gcp.project)
        client = pipeline_client(config.gcp.location)
        notes = [] if force else require_buckets(config)
    approved = require_approval(
        spending, confirm_above_usd=limit_usd, force=force, yes=order.yes, dry_run=order.dry_run, ask=order.ask
    )
    resource_name = ""
    if client:
        upload(packages)
        resource_name = send(submission, client, approved).name
        note = RunRecord(
            resource_name,
            submission.run_uri,
            datetime.now().timestamp(),
            spending.usd,
            tuple(order.source),
            subcommand=config.subcommand,
            service="vertex",
        )
        note.write(submission.job_id)  # `vlmpipe status` and the others then know the run by the name of its job
    question = reasons_to_confirm(spending, limit_usd)
    needed = quotas(config)
    return SubmittedToVertex(submission, compiled, spending, question, address, resource_name, needed, tuple(notes))
