"""`vlmpipe submit --only probe`: custom jobs that try each machine of a run for minutes, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from vlmpipe.config.run_config import RunConfig
from vlmpipe.job_spec.build import job_settings
from vlmpipe.job_spec.check import check_job_spec
from vlmpipe.job_spec.forms import CustomJobSpec
from vlmpipe.job_spec.probe import ProbedMachine, probe_spec, probed_machines
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.pipelines.submit_job import SubmittedJob, jobs_of_run, record_job, require_ready
from vlmpipe.planner.spending.approval import Approved, Spending, reasons_to_confirm, require_approval
from vlmpipe.planner.spending.probe import plan_line, probe_plan, probe_spending
from vlmpipe.platforms.base import JobRequest, Jobs, SentJob
from vlmpipe.platforms.jobs.packages import packaged, upload
from vlmpipe.platforms.table import DEFAULT, platform_of
from vlmpipe.runs.submitted import job_id_at
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.preflight.probe import lines as result_lines
from vlmpipe.trainer.preflight.probe_plan import FOLDER
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record, write_record


@dataclass(frozen=True)
class SubmittedProbe:
    """The probes of one run file, each a custom job."""

    jobs: tuple[SubmittedJob, ...]
    steps: tuple[str, ...]  # of the jobs, in their order
    spending: Spending
    run_uri: str

    def as_json(self) -> dict[str, object]:
        return {
            "run_uri": self.run_uri,
            "plan": {"usd": self.spending.usd, "hours": self.spending.hours, "machines": self.spending.machines},
            "jobs": [job.as_json() for job in self.jobs],
        }

    def lines(self) -> list[str]:
        return [plan_line(self.spending), *(line for job in self.jobs for line in job.lines())]

    def results(self) -> list[dict[str, object]]:
        """Results of the probes in the run's folder; none of one that ended before it could measure."""
        store, records = open_storage(self.run_uri), []
        for step in self.steps:
            if store.stat(f"{FOLDER}/{step}.json"):
                records.append(read_record(store, f"{FOLDER}/{step}.json"))
        return records

    def result_lines(self) -> list[str]:
        """The measurements beside the plan, of each machine."""
        return [line for result in self.results() for line in ("", *result_lines(result))]


def submit_probe(
    config: RunConfig,
    *,
    target: str = DEFAULT,
    source: Sequence[str],
    run_id: str,
    force: bool,
    yes: bool,
    dry_run: bool,
    ask: Callable[[str], bool] | None,
) -> SubmittedProbe:
    """Start a probe of each machine of `config`. Arguments as `submit_run`. Nothing of the run's data is needed.

    Raises UserError: ConfigError for a spec that Vertex AI would refuse.
    """
    platform = platform_of(target)
    config, packages = packaged(config)
    platform.check(config)
    jobs, root_uri = jobs_of_run(platform, config), platform.root_uri(config)
    run_id = run_id or f"probe-{job_id_at(config, datetime.now())}"
    paths = RunPaths(run_id=run_id, root_uri=root_uri)
    machines = probed_machines(config)
    specs = [probe_spec(machine, paths.run_uri) for machine in machines]
    requests = [_request(jobs, machine, spec) for machine, spec in zip(machines, specs, strict=True)]
    spending, limit_usd = probe_spending(config, machines), config.plan.confirm_above_usd
    if not dry_run:
        require_ready(platform, jobs, config, force=force)
    approved = require_approval(spending, confirm_above_usd=limit_usd, force=force, yes=yes, dry_run=dry_run, ask=ask)
    if not dry_run:
        upload(packages)
        write_record(open_storage(paths.run_uri), "run.json", config.to_run_json(paths), indent=1)
        for machine in machines:
            probe_plan(machine, root_uri).write(paths.run_uri)
    question = reasons_to_confirm(spending, limit_usd)
    submitted: list[SubmittedJob] = []
    for machine, request in zip(machines, requests, strict=True):
        sent = None if dry_run else _send(request, submitted, approved)
        alone = probe_spending(config, [machine])
        submitted.append(SubmittedJob(request, paths.run_uri, alone, question, platform.title, jobs.endpoint, sent))
        if sent:
            record_job(sent, target, paths.run_uri, alone.usd, source)
    return SubmittedProbe(tuple(submitted), tuple(machine.step for machine in machines), spending, paths.run_uri)


def _request(jobs: Jobs, machine: ProbedMachine, spec: CustomJobSpec) -> JobRequest:
    config = machine.config
    settings = job_settings(config, machine.job)
    return jobs.request(
        check_job_spec(spec, region=config.gcp.location if config.gcp.project else ""),
        display_name=f"{config.name}-{machine.step}",
        labels={**settings.labels, STEP_LABEL: machine.step},
        encryption_key=settings.encryption_spec_key_name,
    )


def _send(request: JobRequest, before: Sequence[SubmittedJob], approved: Approved) -> SentJob:
    """Send one of the jobs. Where it is refused, those before it run on, and the error names them."""
    try:
        return request.send(approved)
    except UserError as error:
        started = ", ".join(job.sent.resource_name for job in before if job.sent)
        problem = f"{error.found}\n  started before it: {started}" if started else error.found
        raise UserError(problem, expected=error.expected, fix=error.fix, code=error.code) from error
