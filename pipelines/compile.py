"""Compiles a run file to a checked pipeline file."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import json_format
from kfp.compiler.pipeline_spec_builder import extract_comments_from_pipeline_spec
from kfp.dsl.base_component import BaseComponent
from kfp.pipeline_spec import pipeline_spec_pb2

from vlmpipe.backends.vertex.pipeline_yaml import dump_documents
from vlmpipe.config.sections.stages import naming_stage
from vlmpipe.config.sections.sweep import SweepConfig, variants_of
from vlmpipe.job_spec.build import check_job_spec, check_jobs, sweep_job_spec
from vlmpipe.pipelines.checks.readiness import unready
from vlmpipe.pipelines.step_metadata import check_step_metadata
from vlmpipe.pipelines.targets import TARGETS, TargetName
from vlmpipe.pipelines.training import build
from vlmpipe.trainer.errors import os_errors
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.local import LocalStorage

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.validation_errors import Problem

FOLDER = Path("build/pipelines")
LARGEST_FILE_BYTES = 10 << 20  # what Artifact Registry takes


@dataclass(frozen=True)
class Compiled:
    """A compiled pipeline: its file, and the checked counts of steps and jobs."""

    path: Path
    name: str
    steps: int
    jobs: int
    unused: tuple[Problem, ...] = ()  # settings of the run file without effect on the target
    unready: tuple[Problem, ...] = ()  # those with which no run there can start


def compile_pipeline(config: RunConfig, target: TargetName, path: Path) -> Compiled:
    """Write the pipeline of `config` for `target` to `path` (YAML, the same bytes every time) and check it.

    Nothing is written unless all checks pass: the file is one document, with a second one of Kubernetes settings only
    for Kubeflow, because Vertex AI refuses it; and each job's spec is one that Vertex AI would take.

    Raises ConfigError for a run file that lacks what the target needs or makes a bad job, UserError when `path` cannot
    be written.
    """
    pipeline = build(config, target)
    for run in config.stage_runs().values():
        check_jobs(run, join_uri(run.root_uri(target), "runs", run.name))
    if target == "vertex":
        check_step_metadata(config)
    if config.sweep:
        check_sweep_jobs(config, config.sweep, join_uri(config.root_uri(target), "runs", config.name))
    check_exit_tasks(pipeline.pipeline_spec)
    data = check_file(yaml_of(pipeline), target)
    with os_errors(f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    LocalStorage(path.parent).write(path.name, data)
    compiled = described(path, pipeline.pipeline_spec)
    return replace(compiled, unused=tuple(TARGETS[target].unused(config)), unready=tuple(unready(config, target)))


def check_sweep_jobs(config: RunConfig, sweep: SweepConfig, run_uri: str) -> None:
    """Check the job of every variant. Raises ConfigError that names the variant."""
    for variant in variants_of(sweep):
        run = config.training_of(variant)
        with naming_stage(variant.name, kind="variant"):
            region = run.gcp.location if run.gcp.project else ""
            check_job_spec(sweep_job_spec(run, run_uri, 0), region=region)


def yaml_of(pipeline: BaseComponent) -> bytes:
    """The text that `kfp.compiler.Compiler().compile` writes, made by libyaml where PyYAML has it, in a seventh of the
    time; long lines are broken elsewhere."""
    content = json_format.MessageToDict(pipeline.pipeline_spec)
    further = [json_format.MessageToDict(pipeline.platform_spec)] if pipeline.platform_spec.platforms else []
    comments = extract_comments_from_pipeline_spec(content, pipeline.description)
    return (comments + dump_documents([content, *further])).encode()


def described(path: Path, spec: pipeline_spec_pb2.PipelineSpec) -> Compiled:
    """The description of the pipeline `spec` in the file `path`."""
    jobs = sum("worker_pool_specs" in one.input_definitions.parameters for one in spec.components.values())
    return Compiled(path, spec.pipeline_info.name, len(spec.deployment_spec["executors"]), jobs)


def check_exit_tasks(spec: pipeline_spec_pb2.PipelineSpec) -> None:
    """An assert, as in `check_file`: tasks that run whatever became of others are tasks of the pipeline itself.

    kfp allows an exit handler only there, but does not look into a pipeline that is used as a step. No service is known
    to run one inside another.
    """
    completed = pipeline_spec_pb2.PipelineTaskSpec.TriggerPolicy.ALL_UPSTREAM_TASKS_COMPLETED
    inside = [
        f"{component}/{name}"
        for component, content in spec.components.items()
        for name, task in content.dag.tasks.items()
        if task.trigger_policy.strategy == completed
        or any(source.HasField("task_final_status") for source in task.inputs.parameters.values())
    ]
    assert not inside, f"exit tasks inside groups: {inside}"


def check_file(data: bytes, target: TargetName) -> bytes:
    """`data`, a compiled file, if the target's service reads it and it is not too large.

    An assert, because no run file can lead there, only a change of the graph or of kfp. Tests compare the file with the
    pipeline: reading it takes as long as writing it.
    """
    is_one = target == "kubeflow" or not re.search(rb"^---", data, re.MULTILINE)
    assert is_one, "compiled to two documents: a step has Kubernetes settings"
    assert len(data) <= LARGEST_FILE_BYTES, f"compiled to {len(data)} bytes"
    return data
