"""`vlmpipe submit --only probe`: custom jobs that try each machine of a run for minutes, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from vlmpipe.config.run_config import RunConfig
from vlmpipe.google_cloud.bucket_checks import require_buckets
from vlmpipe.google_cloud.client import Place, endpoint, job_client
from vlmpipe.job_spec.build import job_settings
from vlmpipe.job_spec.check import check_job_spec
from vlmpipe.job_spec.forms import CustomJobSpec
from vlmpipe.job_spec.probe import ProbedMachine, probe_spec, probed_machines
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.pipelines.submit_job import SubmittedJob, record_job
from vlmpipe.planner.spending.approval import Approved, Spending, reasons_to_confirm, require_approval
from vlmpipe.planner.spending.probe import plan_line, probe_plan, probe_spending
from vlmpipe.platforms.jobs.packages import for_vertex, upload
from vlmpipe.platforms.vertex.jobs.custom_job import JobSubmission
from vlmpipe.platforms.vertex.requirements import require_vertex
from vlmpipe.platforms.vertex.submit import require_own_project
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
    config, packages = for_vertex(config)
    require_vertex(config)
    root_uri = config.bucket_root_uri
    run_id = run_id or f"probe-{job_id_at(config, datetime.now())}"
    paths = RunPaths(run_id=run_id, root_uri=root_uri)
    machines = probed_machines(config)
    specs = [probe_spec(machine, paths.run_uri) for machine in machines]
    submissions = [_submission(machine, spec) for machine, spec in zip(machines, specs, strict=True)]
    spending, limit_usd = probe_spending(config, machines), config.plan.confirm_above_usd
    if not dry_run:
        require_own_project(config)
        if not force:
            require_buckets(config)
    approved = require_approval(spending, confirm_above_usd=limit_usd, force=force, yes=yes, dry_run=dry_run, ask=ask)
    if not dry_run:
        upload(packages)
        write_record(open_storage(paths.run_uri), "run.json", config.to_run_json(paths), indent=1)
        for machine in machines:
            probe_plan(machine, root_uri).write(paths.run_uri)
    question = reasons_to_confirm(spending, limit_usd)
    jobs: list[SubmittedJob] = []
    for machine, submission in zip(machines, submissions, strict=True):
        name = "" if dry_run else _send(submission, jobs, approved)
        alone, where = probe_spending(config, [machine]), endpoint(submission.place.location)
        jobs.append(SubmittedJob(submission, paths.run_uri, alone, question, where, name))
        if name:
            record_job(name, paths.run_uri, alone.usd, source)
    return SubmittedProbe(tuple(jobs), tuple(machine.step for machine in machines), spending, paths.run_uri)


def _submission(machine: ProbedMachine, spec: CustomJobSpec) -> JobSubmission:
    config = machine.config
    settings = job_settings(config, machine.job)
    return JobSubmission.of(
        Place.of(config),
        check_job_spec(spec, region=config.gcp.location if config.gcp.project else ""),
        display_name=f"{config.name}-{machine.step}",
        labels={**settings["labels"], STEP_LABEL: machine.step},
        encryption_key=settings.get("encryption_spec_key_name", ""),
    )


def _send(submission: JobSubmission, before: Sequence[SubmittedJob], approved: Approved) -> str:
    """Send one of the jobs; its name. Where it is refused, those before it run on, and the error names them."""
    try:
        return submission.send(job_client(submission.place.location), approved).name
    except UserError as error:
        started = ", ".join(job.resource_name for job in before)
        problem = f"{error.found}\n  started before it: {started}" if started else error.found
        raise UserError(problem, expected=error.expected, fix=error.fix, code=error.code) from error
