"""The pipeline's parameters: what a person sets for one run, merged into the compiled run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from vlmpipe.config.json_loader import parse_json
from vlmpipe.config.overrides import leaves, read_overrides, twice
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.config.sections.stages import with_overrides
from vlmpipe.config.validation_errors import show
from vlmpipe.records.compiled import CompiledSettings, Parameter
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
PARAMETER_FIELDS = {
    "data_uri": "data.source",
    "epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "learning_rate": "train.optimizer.learning_rate",
    "seed": "train.seed",
    "resume": "train.resume",
    "min_exact_match": "gate.min_exact_match",
}


class ParameterDefaults(TypedDict):
    """The run file's values of PARAMETER_FIELDS, which the console shows."""

    data_uri: str
    epochs: int
    max_steps: int
    learning_rate: float
    seed: int
    resume: str
    min_exact_match: float


def parameter_defaults(config: RunConfig) -> ParameterDefaults:
    """Return the defaults of the pipeline's parameters."""
    return ParameterDefaults(
        data_uri=config.data.source,
        epochs=config.train.epochs,
        max_steps=config.train.max_steps,
        learning_rate=config.train.optimizer.learning_rate,
        seed=config.train.seed,
        resume=config.train.resume,
        min_exact_match=config.gate.min_exact_match,
    )


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
