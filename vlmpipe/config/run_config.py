"""RunConfig: the schema of the run file, and the checks that concern several of its sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError, model_validator

from vlmpipe.config.overrides import parse_overrides
from vlmpipe.config.rules.baseline import baseline_problems
from vlmpipe.config.rules.confinement import confinement_problems
from vlmpipe.config.rules.replay import stages_replay_problem
from vlmpipe.config.rules.secrets import secret_problems
from vlmpipe.config.rules.sections import section_problems
from vlmpipe.config.rules.sweep import sweep_problems
from vlmpipe.config.rules.warnings import setting_warnings
from vlmpipe.config.run_fields import RunFields
from vlmpipe.config.sections.stages import problems_of_stages, stage_problems, with_overrides
from vlmpipe.config.sections.sweep import SweepConfig, variants_of
from vlmpipe.config.validation_errors import (
    Problem,
    ProblemsError,
    RunFileError,
    from_validation_error,
)
from vlmpipe.config.yaml_loader import read_run_file
from vlmpipe.records.stage_folders import path_in
from vlmpipe.trainer.config.deepspeed_keys import problems_of_new_runs


class RunConfig(RunFields):
    """A run: model, data, training, machines, and the conditions for registering the model."""

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        in_sections = _stages_problems(self) if self.stages else section_problems(self)
        if problems := [*secret_problems(self.to_dict()), *in_sections]:
            raise ProblemsError(problems)
        if self.sweep and (of_sweep := list(_sweep_problems(self, self.sweep))):
            raise ProblemsError(of_sweep)
        return self


def load_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run file with `a.b=c` overrides applied. Raises ConfigError that lists every problem."""
    config = parse_run_config(with_overrides(read_run_file(Path(path)), parse_overrides(overrides)), str(path))
    config.__dict__["source"] = (str(path), *overrides)  # as cached_property stores it; not part of equality
    return config


def derived(config: RunConfig, subcommand: str, arguments: Sequence[str]) -> RunConfig:
    """The run file, which `vlmpipe <subcommand> <arguments>` derived from another: that command continues its run."""
    config.__dict__.update(subcommand=subcommand, source=tuple(arguments))
    return config


def load_new_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file as `load_run_file`, for a run that is to be checked or started.

    Records of runs are read without what is asked here in addition: they were started, and may be continued.
    """
    try:
        config = load_run_file(path, overrides)
    except RunFileError as error:
        content = with_overrides(read_run_file(Path(path)), parse_overrides(overrides))
        raise RunFileError(error.source, [*error.problems, *_without_effect("", content.get("train"))]) from None
    runs = [config, *(config.variant(variant) for variant in variants_of(config.sweep))] if config.sweep else [config]
    problems = dict.fromkeys(
        problem
        for run in runs
        for place, (name, stage) in enumerate(run.stage_runs().items())
        for problem in [
            *_without_effect(name, stage.train.model_dump(include={"strategy", "deepspeed"})),
            *_named(name, baseline_problems(stage, is_later_stage=place > 0)),
            *_named(name, confinement_problems(stage)),
        ]
    )
    if problems:
        raise RunFileError(str(path), list(problems))
    return config


def _named(stage: str, problems: Iterator[Problem]) -> Iterator[Problem]:
    """The problems by their fields in the run file with stages."""
    for problem in problems:
        yield Problem(path_in(stage, problem.field), problem.text) if stage else problem


def _without_effect(stage: str, train: object) -> Iterator[Problem]:
    """Keys of train.deepspeed that the strategy ignores, also of a section that is not a valid one."""
    if not isinstance(train, Mapping) or not isinstance(deepspeed := train.get("deepspeed"), Mapping):
        return
    for text in problems_of_new_runs(deepspeed, str(train.get("strategy"))):
        yield Problem(path_in(stage, "train.deepspeed") if stage else "train.deepspeed", text)


def parse_run_config(data: Mapping[str, object], source: str) -> RunConfig:
    """Check a run file's content. `source` names it in the error, a RunFileError that lists every problem."""
    config = RunConfig.parsed(data, source)
    idle = [path_in(name, "train.epochs") for name, run in config.stage_runs().items() if not run.train.epochs]
    if idle:
        text = "found 0, which trains nothing and is for variants of a sweep; expected at least 1"
        raise RunFileError(source, [Problem(field.removeprefix("stages.."), text) for field in idle])
    return config


def warnings(config: RunConfig) -> list[Problem]:
    """Settings that are allowed but have no effect or are probably not intended."""
    by_stage = {name: list(setting_warnings(run)) for name, run in config.stage_runs().items()}
    for name in list(by_stage) if config.sweep else list(by_stage)[:-1]:  # their models are not registered
        by_stage[name] = [warning for warning in by_stage[name] if warning.field != "gate"]
    return problems_of_stages(by_stage) if config.stages else by_stage[""]


def _stages_problems(config: RunConfig) -> list[Problem]:
    contents = config.stage_contents()
    problems = list(stage_problems(config.name, config.stages, contents, is_search=config.tune is not None))
    problems = problems or list(stages_replay_problem(config))
    return problems or problems_of_stages({name: _problems_of(content) for name, content in contents.items()})


def _sweep_problems(config: RunConfig, sweep: SweepConfig) -> Iterator[Problem]:
    runs, problems = dict[str, RunConfig](), list[Problem]()
    for variant in variants_of(sweep):
        try:
            runs[variant.name] = config.variant(variant)
        except RunFileError as error:
            problems += [
                Problem(f"sweep.variants.{variant.name}", f"{problem.field} {problem.text}")
                for problem in error.problems
            ]
    yield from problems or sweep_problems(config, sweep, runs)


def _problems_of(content: Mapping[str, object]) -> list[Problem]:
    try:
        RunConfig.model_validate(content)
    except ValidationError as error:
        return from_validation_error(error, RunConfig)
    return []
