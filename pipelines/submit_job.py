"""`vlmpipe submit --only train` and `--job-spec FILE`: a custom job without a pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.components.runtime.parameters import compiled_settings
from vlmpipe.components.runtime.prepared_data import point_to_features
from vlmpipe.components.runtime.resolve import resolve
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.labels import require_labels
from vlmpipe.job_spec.build import job_settings, job_spec
from vlmpipe.job_spec.check import check_jobs
from vlmpipe.job_spec.file import SpecFile, read_spec_file
from vlmpipe.job_spec.parse import parse_job_spec
from vlmpipe.planner.plan import plan_run
from vlmpipe.planner.spending.approval import Spending, fail_on_error, reasons_to_confirm, require_approval, spending_of
from vlmpipe.platforms.base import JobRequest, Jobs, Platform, Run, SentJob
from vlmpipe.platforms.jobs.packages import packaged, upload
from vlmpipe.platforms.table import DEFAULT, platform_of
from vlmpipe.runs.submitted import RunRecord, job_id_at
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.data.prepare.fingerprint import find_prepared
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.outage import answering_soon

_IN_NAME = re.compile(r"projects/([^/]+)/locations/([^/]+)(/customJobs/.*)?")


@dataclass(frozen=True)
class SubmittedJob:
    """The request that was sent, or with --dry-run would be. `sent` is None when nothing was sent."""

    request: JobRequest
    run_uri: str
    spending: Spending
    question: str  # the reason to confirm; empty for a job that needs none
    service: str  # for people
    endpoint: str
    sent: SentJob | None
    warnings: tuple[str, ...] = ()

    @property
    def started(self) -> Run | None:
        return self.sent.run if self.sent else None

    def as_json(self) -> dict[str, object]:
        return {
            "sent": bool(self.sent),
            "resource_name": self.sent.resource_name if self.sent else None,
            "console_url": self.sent.console_url if self.sent else None,
            "run_uri": self.run_uri or None,
            "endpoint": self.endpoint,
            "notes": list(self.warnings),
            "request": self.request.as_dict(),
            "plan": {"state": self.spending.state, "usd": self.spending.usd, "needs_a_yes": self.question or None},
        }

    def lines(self) -> list[str]:
        table = {"results": self.run_uri}
        if self.sent:
            first = [f"custom job {self.sent.name} is started on {self.service}"]
            table |= {"job": self.sent.resource_name, "console": self.sent.console_url}
            table |= {"to follow": f"vlmpipe status {self.sent.name} --watch"}
        else:
            first = [f"Nothing was sent. Without --dry-run, to {self.endpoint}:"]
            first += json.dumps(self.request.as_dict(), indent=2, ensure_ascii=False).splitlines()
            table |= {"asks": f"{self.question}; --yes answers"} if self.question else {}
        notes = [f"  warning: {text}" for text in self.warnings]
        return [*first, *notes, *(f"  {name:<9} {value}" for name, value in table.items() if value)]


def submit_training(
    config: RunConfig,
    *,
    target: str = DEFAULT,
    source: Sequence[str],
    run_id: str,
    force: bool,
    yes: bool,
    dry_run: bool,
    ask: Callable[[str], bool] | None,
) -> SubmittedJob:
    """Start the training job of `config` alone, on data that is prepared. Arguments as `submit_run`.

    Before the job, `run.json`, `plan.json` and `prepared.json` are written into the run's folder, as the pipeline's
    steps would. Nothing is exported, evaluated or registered: the pipeline with the same --run-id does that.

    Raises UserError: ConfigError for what one job cannot do, exit 66 for data that is not prepared.
    """
    platform = platform_of(target)
    config, packages = packaged(config)
    platform.check(config)
    platform.check_files(config)
    if config.stages or config.sweep:
        parts = "stages" if config.stages else "a sweep"
        raise ConfigError(f"--only train is given for a run file with {parts}", fix="submit the pipeline")
    if config.cluster.capacity_fallback:
        raise ConfigError(
            "--only train sends one job, and cluster.capacity_fallback needs a step that sends the next one",
            fix="add cluster.capacity_fallback=[], or submit the pipeline",
        )
    jobs, root_uri = jobs_of_run(platform, config), platform.root_uri(config)
    run_id = run_id or job_id_at(config, datetime.now())
    run_uri = RunPaths(run_id=run_id, root_uri=root_uri).run_uri
    spending = _of_training(config)
    fail_on_error(spending, force=force)
    check_jobs(config, run_uri)
    limit_usd = config.plan.confirm_above_usd
    if not dry_run:
        require_ready(platform, jobs, config, force=force)
    approved = require_approval(spending, confirm_above_usd=limit_usd, force=force, yes=yes, dry_run=dry_run, ask=ask)
    if not dry_run:
        upload(packages)
        compiled = compiled_settings(config, target, root_uri)
        resolved = resolve(json.dumps(config.to_dict()), compiled, run_id=run_id)
        config = resolved.config
        _point_to_data(f"{run_uri}/run.json")
    request = _training_job(config, jobs, run_uri)
    sent = None if dry_run else request.send(approved)
    if sent:
        record_job(sent, target, run_uri, spending.usd, source)
    question = reasons_to_confirm(spending, limit_usd)
    return SubmittedJob(request, run_uri, spending, question, platform.title, jobs.endpoint, sent)


def jobs_of_run(platform: Platform, config: RunConfig) -> Jobs:
    """Jobs where the run file's go."""
    gcp = config.gcp
    return platform.jobs(gcp.project, gcp.location, gcp.service_account)


def require_ready(platform: Platform, jobs: Jobs, config: RunConfig, *, force: bool) -> None:
    """Raise UserError unless jobs of `config` can be sent. With `force`, storage is not looked at."""
    jobs.connect()
    if not force:
        platform.check_storage(config)


def submit_spec(
    path: Path,
    *,
    target: str = DEFAULT,
    project: str,
    location: str,
    yes: bool,
    dry_run: bool,
    ask: Callable[[str], bool] | None,
) -> SubmittedJob:
    """Start the custom job of a spec that breaks no rule. What it costs is not planned, so it needs a confirmation.

    Args:
        path: a CustomJobSpec, a list of worker pools, or a CustomJob, whose display name, labels and key are taken.
        project: where it runs, as location; empty takes what a CustomJob's own name says.

    Raises ConfigError that lists the broken rules.
    """
    file = read_spec_file(path)
    project, location = _place(file, project, location)
    platform = platform_of(target)
    jobs = platform.jobs(project, location)
    violations = file.check(load_catalog(), location)
    if errors := [violation for violation in violations if violation.severity == "error"]:
        lines = [f"  {error.text()}" for error in errors]
        raise ConfigError(
            "\n".join([f"{path} has {len(errors)} errors", *lines]), fix=f"vlmpipe check --job-spec {path}"
        )
    around, spec = file.around, parse_job_spec(file.fields())
    request = jobs.request(
        spec,
        display_name=str(around.get("display_name") or path.stem),
        labels=_labels(around.get("labels") or {}),
        encryption_key=_key(around.get("encryption_spec")),
    )
    machines = " + ".join(f"{pool.replica_count} x {pool.machine_spec.machine_type}" for pool in spec.worker_pool_specs)
    term = spec.scheduling.strategy.name.lower() if spec.scheduling.strategy else "standard"
    spending = Spending(path.name, "green", (), None, None, machines, term, unknown="a job spec has no plan")
    if not dry_run:
        jobs.connect()
    approved = require_approval(spending, confirm_above_usd=0.0, force=False, yes=yes, dry_run=dry_run, ask=ask)
    sent = None if dry_run else request.send(approved)
    run_uri = spec.base_output_directory.output_uri_prefix
    if sent:
        record_job(sent, target, run_uri, None, ("--job-spec", str(path)))
    return SubmittedJob(
        request,
        run_uri,
        spending,
        reasons_to_confirm(spending, 0.0),
        platform.title,
        jobs.endpoint,
        sent,
        tuple(violation.text() for violation in violations),
    )


def _labels(labels_given: object) -> dict[str, str]:
    if not isinstance(labels_given, Mapping):
        raise ConfigError(f"labels is {labels_given!r}", expected="names with their values")
    labels = {str(name): str(value) for name, value in labels_given.items()}
    require_labels(labels)
    return labels


def _of_training(config: RunConfig) -> Spending:
    """The plan's spending, of the training job alone."""
    with answering_soon():
        plan = plan_run(config)
    spending = spending_of(config, plan)
    if plan.cost is None or plan.cost.usd is None:
        return replace(spending, serving_usd_per_month=0.0)
    train = next(step for step in plan.cost.steps if step.job == "train")
    if (ends := spending.usd_range) and train.usd is not None:
        beside = plan.cost.usd - train.usd
        ends = (ends[0] - beside, ends[1] - beside)
    left_out = ", ".join(plan.cost.missing) if plan.cost.is_lower_bound else ""
    return replace(
        spending, usd=train.usd, hours=train.hours, usd_range=ends, left_out=left_out, serving_usd_per_month=0.0
    )


def _point_to_data(run_json: str) -> None:
    """Write `prepared.json` for data, and features, that an earlier run left."""
    job = JobConfig.load(run_json)
    pointers = point_to_features(job, find_prepared(job))
    if pointers.features == "encode":
        raise UserError(
            "images of the run have no features yet, and only the pipeline encodes them",
            expected="features that an earlier run encoded",
            fix="submit the pipeline, or train without them: features.cache=off",
            code=ExitCode.NOT_FOUND,
        )
    pointers.write(open_storage(job.run.run_uri))


def _training_job(config: RunConfig, jobs: Jobs, run_uri: str) -> JobRequest:
    settings = job_settings(config, "train")
    return jobs.request(
        parse_job_spec(job_spec(config, "train", run_uri)),
        display_name=settings.display_name,
        labels=settings.labels,
        encryption_key=settings.encryption_spec_key_name,
    )


def _place(file: SpecFile, project: str, location: str) -> tuple[str, str]:
    """Project and region: those given, else what a CustomJob's own name says."""
    if file.is_of_a_search:
        raise ConfigError("the file is a hyperparameter tuning job", expected="a CustomJob, or its spec")
    match = _IN_NAME.fullmatch(str(file.around.get("name") or ""))
    if match and not (project and location):
        project, location = project or match[1], location or match[2]
    if not (project and location):
        raise ConfigError(
            f"{'--location' if project else '--project'} is missing",
            expected="--project and --location, or VERTEX_PROJECT_ID and VERTEX_LOCATION: a job spec names neither",
        )
    return project, location


def _key(encryption_spec: object) -> str:
    """The key's name, in either spelling."""
    names = encryption_spec if isinstance(encryption_spec, dict) else {}
    return str(names.get("kms_key_name") or names.get("kmsKeyName") or "")


def record_job(sent: SentJob, target: str, run_uri: str, usd: float | None, source: Sequence[str]) -> None:
    """Record the job, so that `vlmpipe status` and the others know it by its name."""
    now_s = datetime.now().timestamp()
    RunRecord(sent.resource_name, run_uri, now_s, usd, tuple(source), service=target).write(sent.name)
