"""Checks of a run file's jobs, of its settings for each platform, and of its schedule."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from vlmpipe.config.run_config import RunConfig
from vlmpipe.pipelines.checks.finding import Finding
from vlmpipe.planner.cost.cron import require_starts
from vlmpipe.platforms.table import PLATFORMS, fits_priced_machines, platform_of
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from vlmpipe.job_spec.rules import Violation

# A longest wait, a restart, an image by tag: `vlmpipe.config.run_config.warnings` has them in the run file's terms.
RUN_FILE_WARNINGS = ("VP405", "VP407", "VP603")


def look_at_jobs(config: RunConfig) -> Iterator[Finding]:
    """A finding for each error, with priced machines also for warnings; what several jobs share is reported once."""
    from vlmpipe.job_spec.build import job_spec, jobs_of, step_of
    from vlmpipe.job_spec.check import job_violations, unknown_gpu_code

    paths = RunPaths(run_id=config.name, root_uri=config.output.root_uri)
    reported: set[str] = set()
    for job in jobs_of(config):
        subject = f"job {step_of(job)}"
        violations = [
            job_violation
            for job_violation in job_violations(config, job, paths.run_uri)
            if _concerns(config, job_violation)
        ]
        new = [violation for violation in violations if violation.text() not in reported]
        reported |= {violation.text() for violation in new}
        for violation in new:
            state: Literal["failed", "warning"] = "failed" if violation.severity == "error" else "warning"
            yield Finding(subject, state, violation.text(), ExitCode.CONFIG if state == "failed" else ExitCode.OK)
        if not any(violation.severity == "error" for violation in violations):
            replicas = ", ".join(str(pool["replica_count"]) for pool in job_spec(config, job, "")["worker_pool_specs"])
            yield Finding(subject, "ok", f"a valid CustomJob; replicas by pool: {replicas}")
        if unknown := unknown_gpu_code(config, job):
            yield Finding(subject, "unchecked", unknown)


def _concerns(config: RunConfig, violation: Violation) -> bool:
    """Return whether to report it: warnings about machines of a service do not concern a run file for a laptop."""
    if violation.severity == "error":
        return True
    return violation.code not in RUN_FILE_WARNINGS and fits_priced_machines(config)


def look_at_schedule(config: RunConfig) -> Iterator[Finding]:
    """Yield findings about a schedule that starts nothing; runs can still be started by hand."""
    try:
        require_starts(config.schedule, datetime.now(UTC))
    except ConfigError as error:
        yield Finding("schedule", "warning", error.text())


def look_at_platforms(config: RunConfig) -> Iterator[Finding]:
    """Yield what each platform says of the run file, and what its records could not hold."""
    for name in PLATFORMS:
        platform = platform_of(name)
        look = platform.look(config)
        if look is None:
            continue
        yield Finding(name, look.state, look.text)
        if platform.max_step_bytes and not list(platform.missing(config)):
            from vlmpipe.pipelines.step_metadata import check_step_metadata

            try:
                check_step_metadata(config, platform)
            except ConfigError as error:
                yield Finding(name, "failed", error.text(), ExitCode.CONFIG)
