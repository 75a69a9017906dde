"""The pipeline's parameters: what a person sets for one run, merged into the compiled run file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

from vlmpipe.config.json_loader import parse_json
from vlmpipe.config.overrides import leaves, read_overrides, twice
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.config.sections.stages import hidden_by_stages, with_overrides
from vlmpipe.config.validation_errors import show
from vlmpipe.records.compiled import CompiledSettings, Parameter
from vlmpipe.records.stage_folders import path_in
from vlmpipe.runs.setting_differences import Differences, differences
from vlmpipe.trainer.config.job import without_gone
from vlmpipe.trainer.errors import ConfigError

# Settings that are compiled into the pipeline: changing them for one run would have no effect.
FIXED = (
    "name", "output", "gcp", "notify", "cluster.timeout", "cluster.scheduling_strategy", "cluster.max_wait_duration",
    "cluster.step_disks", "cluster.restart_job_on_worker_restart", "cluster.capacity_fallback",
    "cluster.disable_retries", "kubeflow.s3_endpoint", "kubeflow.secret_env", "kubeflow.volumes",
)  # fmt: skip
NO_DISKS: Mapping[str, Mapping[str, int]] = {}  # every step has the default one


class PipelineParameter(NamedTuple):
    """A parameter of the pipeline, as the console shows it. field: the run file's, which a changed value overrides."""

    name: str
    type: type[str] | type[int] | type[float]
    description: str
    field: str = ""


# In the console's order. The signature of the pipeline's function, its docstring and its defaults are made from these.
PARAMETERS = (
    PipelineParameter(
        "run_file", str, "The run file as JSON. A parameter below overrides it only where its default is changed."
    ),
    PipelineParameter(
        "run_id", str, "Name of the run; empty takes the pipeline job's. An earlier run's name continues that run."
    ),
    PipelineParameter("data_uri", str, "Data source", "data.source"),
    PipelineParameter("epochs", int, "Passes over the training data", "train.epochs"),
    PipelineParameter(
        "max_steps", int, "Optimizer steps after which training stops; 0 trains all epochs", "train.max_steps"
    ),
    PipelineParameter("learning_rate", float, "Peak learning rate", "train.optimizer.learning_rate"),
    PipelineParameter("seed", int, "Seed of the data order", "train.seed"),
    PipelineParameter(
        "resume",
        str,
        "auto continues from the newest good checkpoint; never gives up those of earlier runs",
        "train.resume",
    ),
    PipelineParameter(
        "min_exact_match", float, "Share of validation questions that must be answered exactly", "gate.min_exact_match"
    ),
    PipelineParameter(
        "overrides", str, 'Any other fields, as a JSON object of dotted keys, such as {"train.micro_batch_size": 2}.'
    ),
)
PARAMETER_FIELDS = {parameter.name: parameter.field for parameter in PARAMETERS if parameter.field}


def parameter_defaults(config: RunConfig) -> dict[str, Parameter]:
    """Return the run file's values of PARAMETER_FIELDS, which the console shows as defaults."""
    return {name: attrgetter(field)(config) for name, field in PARAMETER_FIELDS.items()}


def console_signature(config: RunConfig) -> inspect.Signature:
    """Return the signature of the pipeline's function, from which KFP reads names, types and defaults."""
    defaults = {"run_file": json.dumps(config.to_dict(), ensure_ascii=False), **parameter_defaults(config)}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [
            inspect.Parameter(name, kind, default=defaults.get(name, ""), annotation=type_)
            for name, type_, _, _ in PARAMETERS
        ]
    )


def console_docstring(config: RunConfig, summary: str) -> str:
    """Return the docstring of the pipeline's function, from which KFP reads the descriptions."""
    hidden = hidden_by_stages(config.to_dict(), list(PARAMETER_FIELDS.values()))
    lines = [summary, "", "Args:"]
    for name, _, description, field in PARAMETERS:
        text = f"{description} ({field})." if field else description
        if names := hidden.get(field):
            instead = " and ".join(path_in(stage, field) for stage in names)
            text += f" Refused here, as stages have their own: give {instead} in overrides."
        lines.append(f"    {name}: {text}")
    return "\n".join(lines)


def compiled_settings(
    config: RunConfig, target: str, root_uri: str, stage: str = "", disks: Mapping[str, Mapping[str, int]] = NO_DISKS
) -> str:
    """The JSON text of `CompiledSettings`."""
    runs = {name: run.to_dict() for name, run in config.stage_runs().items()}
    content = {
        "target": target,
        "root_uri": root_uri,
        "stage": stage,
        "stages": list(runs),
        "run_file": config.given(),
        "fixed": {name: {field: _look_up(run, field) for field in FIXED} for name, run in runs.items()},
        "parameters": parameter_defaults(config),
        "disks": disks,
    }
    return CompiledSettings.model_validate(content).text()


def with_parameters(
    run_file: str, settings: CompiledSettings, overrides: str, parameters: Mapping[str, Parameter]
) -> RunConfig:
    """The run file with this run's parameters and overrides. Raises ConfigError."""
    defaults = settings.parameters
    changed = {
        PARAMETER_FIELDS[name]: value for name, value in parameters.items() if _is_changed(value, defaults[name])
    }
    others = read_overrides(overrides)
    if both := sorted({inner for _, inner in twice([*changed, *{path for path, _ in leaves(others)}])}):
        raise ConfigError(f"{', '.join(both)} is given as a parameter and in overrides", fix="give it once")
    content = with_overrides(without_gone(_run_file(run_file)), {**changed, **others})
    return parse_run_config(content, "run file with this run's parameters")


def from_compiled(whole: RunConfig, compiled: Mapping[str, object], stage: str) -> Differences:
    """How a stage's run file differs from that of the compiled pipeline; no difference where none was compiled."""

    def of_stage(config: RunConfig) -> dict[str, object]:
        sweep = {"sweep": config.to_dict()["sweep"]} if config.sweep else {}
        return {**config.stage_runs()[stage].to_dict(), **sweep}

    if not compiled:
        return {}
    return differences(of_stage(parse_run_config(without_gone(compiled), "compiled run file")), of_stage(whole))


def _is_changed(value: str | int | float, default: str | int | float) -> bool:
    if isinstance(value, str):
        return bool(value.strip()) and value != default
    return float(value) != float(default)  # pipeline parameters are doubles: a larger seed arrives rounded


def _run_file(text: str) -> dict[str, object]:
    value = parse_json(text, "parameter run_file")
    if not isinstance(value, dict):
        raise ConfigError(f"parameter run_file is {show(value)}", expected="a run file as a JSON object")
    return value


def require_fixed(content: Mapping[str, object], fixed: Mapping[str, object]) -> None:
    """Raise ConfigError for a setting that cannot change for one run."""
    changed = [field for field in fixed if _look_up(content, field) != fixed[field]]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)} differs from the compiled pipeline, where it is fixed",
            expected="the values that the pipeline was compiled with",
            fix="change the run file and compile again",
        )


def _look_up(content: Mapping[str, object], field: str) -> object:
    value: object = content
    for part in field.split("."):
        assert isinstance(value, Mapping)
        value = value[part]
    return value
