"""Settings of `deploy.cloud_run` that Cloud Run refuses, or that have no effect there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.config.sections.cloud_run import CloudRunGpu, load_cloud_run
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.config.validation_errors import Problem, show

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields

BUCKET = "gs://"
# Fields of deploy without effect on Cloud Run, and what applies there instead.
NOT_THERE = {
    "machine_type": "an instance has deploy.cloud_run.cpu and memory_gib",
    "idle_minutes": "Cloud Run itself decides when an idle instance goes",
    "shared_memory_size_mb": "Cloud Run mounts nothing at /dev/shm, and one GPU needs none",
}


def cloud_run_problems(config: RunFields) -> Iterator[Problem]:
    """Yield the problems of a run that deploys on Cloud Run."""
    deploy = config.deploy
    if deploy is None or deploy.cloud_run is None:
        return
    limits = load_cloud_run()
    for name, instead in NOT_THERE.items():
        if getattr(deploy, name) != DeployConfig.model_fields[name].default:
            text = f"found {show(getattr(deploy, name))} with deploy.cloud_run, where it has no effect: {instead}"
            yield Problem(f"deploy.{name}", f"{text}; expected it left out")
    if len(deploy.endpoint) > limits.max_name_chars:
        text = f"found {len(deploy.endpoint)} characters, expected at most {limits.max_name_chars}"
        yield Problem(
            "deploy.endpoint", f"{text}: Cloud Run has no longer names for services whose revisions have a tag"
        )
    for name in sorted(deploy.env.keys() & set(limits.reserved_variables)):
        yield Problem(f"deploy.env.{name}", "Cloud Run sets it itself; expected another name")
    if config.register_.serving:
        text = "found with register.serving, a container of Vertex AI; expected deploy.image_uri with vLLM"
        yield Problem("deploy.cloud_run", text)
    yield from _model_problems(config)
    if gpu := limits.gpus.get(deploy.accelerator_type):
        yield from _gpu_problems(deploy, gpu, config.gcp.location)
    else:
        text = f"found {show(deploy.accelerator_type)} with deploy.cloud_run, expected {' or '.join(limits.gpus)}"
        yield Problem("deploy.accelerator_type", f"{text}: Cloud Run has no other GPU")


def _model_problems(config: RunFields) -> Iterator[Problem]:
    """Files that no instance could mount: what is fetched at each start would lie in its memory."""
    model = config.model
    base = model.pretrained.weights if model.pretrained else ""
    if model.exports_adapter and not base.startswith(BUCKET):
        text = f"found {show(base)}, the base of an adapter on Cloud Run, where each start would fetch it into memory"
        yield Problem("model.pretrained.weights", f"{text}; expected gs://, or model.lora.export merged")


def _gpu_problems(deploy: DeployConfig, gpu: CloudRunGpu, region: str) -> Iterator[Problem]:
    assert deploy.cloud_run
    name = deploy.accelerator_type
    if deploy.accelerator_count != 1:
        text = f"found {deploy.accelerator_count} with deploy.cloud_run, expected 1: an instance has one GPU"
        yield Problem("deploy.accelerator_count", text)
    if region not in gpu.regions:
        text = f"found {region} with deploy.cloud_run, expected one of {', '.join(gpu.regions)}"
        yield Problem("gcp.location", f"{text}: Cloud Run has {name} there")
    cpu, memory_gib = deploy.cloud_run.size(gpu)
    if cpu not in gpu.cpus:
        expected = " or ".join(map(str, gpu.cpus))
        yield Problem("deploy.cloud_run.cpu", f"found {cpu}, expected {expected} with {name}")
        return
    most = gpu.cpus[cpu]
    if memory_gib < gpu.min_memory_gib or (most is not None and memory_gib > most):
        to = " or more" if most is None else f" to {most}" if most > gpu.min_memory_gib else ""
        text = f"found {memory_gib}, expected {gpu.min_memory_gib}{to} with {name} and {cpu} vCPUs"
        yield Problem("deploy.cloud_run.memory_gib", text)
