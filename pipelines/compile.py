"""Compiles a run file to a checked pipeline file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from google.protobuf import json_format
from kfp.compiler.pipeline_spec_builder import extract_comments_from_pipeline_spec
from kfp.dsl.base_component import BaseComponent
from kfp.pipeline_spec import pipeline_spec_pb2

from vlmpipe.config.sections.stages import naming_stage
from vlmpipe.config.sections.sweep import SweepConfig, variants_of
from vlmpipe.job_spec.build import sweep_order
from vlmpipe.job_spec.check import check_job_spec, check_jobs
from vlmpipe.pipelines.step_metadata import check_step_metadata
from vlmpipe.pipelines.training import build
from vlmpipe.platforms.compiled import Compiled, described
from vlmpipe.platforms.pipeline_yaml import documents as read_documents
from vlmpipe.platforms.pipeline_yaml import dump_documents
from vlmpipe.platforms.table import platform_of
from vlmpipe.trainer.errors import ExitCode, UserError, os_errors
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.local import LocalStorage

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

LARGEST_FILE_BYTES = 10 << 20  # what Artifact Registry takes


def compile_pipeline(config: RunConfig, target: str, path: Path) -> Compiled:
    """Write the pipeline of `config` for `target` to `path` (YAML, the same bytes every time) and check it.

    Nothing is written unless all checks pass: the file is one document, with a second one of Kubernetes settings only
    for Kubeflow, because Vertex AI refuses it; and each job's spec is one that Vertex AI would take.

    Raises ConfigError for a run file that lacks what the target needs or makes a bad job, UserError when `path` cannot
    be written.
    """
    platform = platform_of(target)
    pipeline = build(config, target)
    for run in config.stage_runs().values():
        check_jobs(run, join_uri(platform.root_uri(run), "runs", run.name))
    if platform.max_step_bytes:
        check_step_metadata(config, platform)
    if config.sweep:
        check_sweep_jobs(config, config.sweep, join_uri(platform.root_uri(config), "runs", config.name))
    check_exit_tasks(pipeline.pipeline_spec)
    contents = contents_of(pipeline)
    data = yaml_of(contents, pipeline.description or "")
    check_file(data, contents, documents=platform.graph().documents)
    with os_errors(f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    LocalStorage(path.parent).write(path.name, data)
    compiled = described(path, pipeline.pipeline_spec)
    return replace(compiled, unused=tuple(platform.unused(config)), unready=tuple(platform.unready(config)))


def check_sweep_jobs(config: RunConfig, sweep: SweepConfig, run_uri: str) -> None:
    """Check the job of every variant. Raises ConfigError that names the variant."""
    for variant in variants_of(sweep):
        run = config.training_of(variant)
        with naming_stage(variant.name, kind="variant"):
            region = run.gcp.location if run.gcp.project else ""
            check_job_spec(sweep_order(run, run_uri, 0).spec(), region=region)


def contents_of(pipeline: BaseComponent) -> list[dict[str, object]]:
    """The documents of the pipeline's file: its spec, and on Kubeflow settings of its steps if there are any."""
    further = [json_format.MessageToDict(pipeline.platform_spec)] if pipeline.platform_spec.platforms else []
    return [json_format.MessageToDict(pipeline.pipeline_spec), *further]


def yaml_of(contents: Sequence[Mapping[str, object]], description: str) -> bytes:
    """The text that `kfp.compiler.Compiler().compile` writes, made by libyaml where PyYAML has it, in a seventh of the
    time; long lines are broken elsewhere, and comments hold no character that breaks a line or that YAML refuses."""
    comments = extract_comments_from_pipeline_spec(_with_printable_defaults(contents[0]), description)
    return (comments + dump_documents(contents)).encode()


def _with_printable_defaults(content: Mapping[str, Any]) -> dict[str, object]:
    """The spec for KFP's comments, into which it writes texts as they are (kubeflow/pipelines 10438)."""
    root = content["root"]
    inputs = root.get("inputDefinitions", {})
    shown = {name: dict(parameter) for name, parameter in inputs.get("parameters", {}).items()}
    for parameter in shown.values():
        text = parameter.get("defaultValue")
        if isinstance(text, str) and not text.isprintable():
            parameter["defaultValue"] = "".join(
                character
                if character.isprintable()
                else json.dumps(character)[1:-1]
                if character != "\x7f"
                else r"\u007f"
                for character in text
            )
    parameters = {"inputDefinitions": {**inputs, "parameters": shown}} if shown else {}
    return {"pipelineInfo": content["pipelineInfo"], "root": {**root, **parameters}}


def check_exit_tasks(spec: pipeline_spec_pb2.PipelineSpec) -> None:
    """Tasks that run whatever became of others are tasks of the pipeline itself.

    An assert, because no run file can lead elsewhere, only a change of the graph or of kfp.

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


def check_file(data: bytes, contents: Sequence[Mapping[str, object]], *, documents: int) -> None:
    """Read a compiled file as its service will: it holds what was meant, in one document unless it is for Kubeflow.

    Raises UserError (exit 1): no run file is known that leads there, and a published file could not be taken back.
    """
    problem = f"{len(data):,} bytes" if len(data) > LARGEST_FILE_BYTES else ""
    if len(contents) > documents:
        problem = "two documents: a step has Kubernetes settings"
    try:
        if not problem and read_documents(data) != list(contents):
            problem = "YAML that says something else than the pipeline"
    except yaml.YAMLError as error:
        problem = f"YAML that cannot be read: {str(error).splitlines()[0]}"
    if problem:
        raise UserError(
            f"the pipeline was compiled to {problem}",
            expected=f"one document of at most {LARGEST_FILE_BYTES:,} bytes that reads as the pipeline",
            fix="nothing was written; please report it with the run file",
            code=ExitCode.UNEXPECTED,
        )
