"""Checks the job specs of a run file by the rules and the API's own types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.run_config import RunConfig
from vlmpipe.job_spec.build import NO_IMAGE, Job, capacity_options, job_spec, jobs_of, step_of, worker_pools
from vlmpipe.job_spec.rules import check_spec
from vlmpipe.job_spec.violation import Violation
from vlmpipe.trainer.distributed.cuda_builds import CPU, cuda_builds
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.types import custom_job as api


def job_violations(config: RunConfig, job: Job, run_uri: str) -> list[Violation]:
    """All violations of the job's spec. The region is checked if the run file names a project.

    Warnings are left out of a job that has neither project nor image: only this machine can run it.
    """
    options = capacity_options(config, job)
    violations = dict.fromkeys(
        violation for option in options for violation in _option_violations(option, job, run_uri)
    )
    may_be_sent = config.gcp.project or _image(config, job) != NO_IMAGE
    return [violation for violation in violations if may_be_sent or violation.severity == "error"]


def unknown_gpu_code(config: RunConfig, job: Job) -> str:
    """A sentence if it cannot be known whether the torch in a job's image has code for its GPUs, else empty."""
    gpu = worker_pools(config, job, "")[0]["machine_spec"].get("accelerator_type")
    image = _image(config, job)
    build = _torch_builds(config).get(image, "")
    if gpu is None or build == CPU or build in cuda_builds():
        return ""
    return (
        f"whether the torch in {image} has code for {gpu} is not known: cluster.torch_build tells of "
        "cluster.image_uri only"
    )


def _image(config: RunConfig, job: Job) -> str:
    """The image of the job's first pool."""
    node = worker_pools(config, job, "")[0]
    if "container_spec" in node:
        return node["container_spec"]["image_uri"]
    return node["python_package_spec"]["executor_image_uri"]


def check_job_spec(spec: Mapping[str, object], *, region: str = "") -> api.CustomJobSpec:
    """`spec` as the API's message.

    Raises ConfigError that lists all errors; warnings raise nothing.
    """
    _raise_errors({"the job's spec": _violations(spec, region)})
    from vlmpipe.job_spec.parse import parse_job_spec  # the API's client takes a second to import

    return parse_job_spec(spec)


def check_jobs(config: RunConfig, run_uri: str) -> None:
    """Check every job of the pipeline. Raises ConfigError that lists all errors."""
    violations = {}
    for job in jobs_of(config):
        for option in capacity_options(config, job):
            on = f" on {option.cluster.scheduling_strategy}" if option is not config else ""
            on += f" in {option.gcp.location}" if option.gcp.location != config.gcp.location else ""
            violations[f"job {step_of(job)}{on}"] = _option_violations(option, job, run_uri)
    _raise_errors(violations)


def _region(config: RunConfig) -> str:
    return config.gcp.location if config.gcp.project else ""


def _option_violations(config: RunConfig, job: Job, run_uri: str) -> list[Violation]:
    return _violations(job_spec(config, job, run_uri), _region(config), _torch_builds(config))


def _violations(
    spec: Mapping[str, object], region: str, torch_builds: Mapping[str, str] | None = None
) -> list[Violation]:
    return check_spec(spec, region=region, catalog=load_catalog(), torch_builds=torch_builds)


def _torch_builds(config: RunConfig) -> dict[str, str]:
    """The build of torch in the trainer image; of other images none is known."""
    return {config.cluster.image_uri or NO_IMAGE: config.cluster.torch_build}


def _raise_errors(violations: Mapping[str, list[Violation]]) -> None:
    """Raise one error for all violations. The same one in several jobs is reported once."""
    where: dict[Violation, list[str]] = {}
    for name, of_job in violations.items():
        for violation in of_job:
            if violation.severity == "error":
                where.setdefault(violation, []).append(name)
    if not where:
        return
    if len(where) == 1:
        ((error, names),) = where.items()
        sentence = f"{error.path} is {error.found} ({error.code}, {', '.join(names)})"
        raise ConfigError(sentence, expected=error.expected, fix=error.fix)
    lines = [f"  {error.text()} ({', '.join(names)})" for error, names in where.items()]
    raise ConfigError("\n".join([f"{len(where)} errors in the job specs", *lines]))
