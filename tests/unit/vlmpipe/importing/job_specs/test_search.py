from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import yaml

from tests.support.guides.searches import SEARCHES
from tests.support.short_form import WHOLE
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.config.yaml_loader import parse_yaml
from vlmpipe.importing.findings import Finding, Outcome
from vlmpipe.importing.importer import Imported, import_job_spec, import_run_file
from vlmpipe.importing.job_specs.search import field_of
from vlmpipe.importing.sources import Kind, Source, source_of
from vlmpipe.pipelines.tune.search import require_tuning
from vlmpipe.trainer.errors import ConfigError

JOB = yaml.safe_load(SEARCHES["tuning.yaml"])


def imported(**study: Any) -> tuple[Imported, RunConfig]:
    job = copy.deepcopy(JOB)
    for name, value in study.items():
        place = job if name in job else job["studySpec"]
        place[name] = value
    result = import_run_file(Source("tuning.yaml", Kind.JOB_SPEC, job))
    return result, parse_run_config(parse_yaml(result.text, "tuning.yaml"), "tuning.yaml")


@functools.cache
def as_written() -> tuple[Imported, RunConfig]:
    return imported()


def finding(result: Imported, path: str) -> Finding:
    return next(found for found in result.findings if found.path == path)


def test_a_study_becomes_the_section_tune() -> None:
    _, config = as_written()
    tune = require_tuning(config)
    assert (tune.metric, tune.goal, tune.stopping) == ("validation_loss", "MINIMIZE", "median")
    assert (tune.max_trial_count, tune.parallel_trial_count, tune.max_failed_trial_count) == (20, 20, 5)
    assert tune.algorithm == "RANDOM_SEARCH"
    assert {name: spec.extremes for name, spec in tune.parameters.items()} == {
        "train.optimizer.learning_rate": [1e-6, pytest.approx(3.25e-5, rel=0.01), 1e-4],
        "train.global_batch_size": [64, 128, 256],  # of 16 ranks
        "model.lora.rank": [4, 5, 64],
        "train.lr_schedule": ["cosine", "linear"],
    }
    assert tune.parameters["train.optimizer.learning_rate"].scale_type == "UNIT_LOG_SCALE"
    assert config.train.trainer is None and config.train.epochs == 3
    assert config.model.lora and config.train.validate_every_steps


@pytest.mark.parametrize(
    ("path", "outcome", "reason"),
    [
        ("studySpec.metrics[1].metricId", Outcome.REFUSED, "a search has one metric"),
        ("studySpec.metrics[0].goal", Outcome.CHANGED, "minimize there"),
        ("studySpec.parameters[0].doubleValueSpec.defaultValue", Outcome.DROPPED, "studies of Vizier"),
        ("studySpec.parameters[1].scaleType", Outcome.DROPPED, "drawn as they stand"),
        ("studySpec.parameters[4].doubleValueSpec.maxValue", Outcome.REFUSED, "at most 1"),
        ("studySpec.parameters[5].categoricalValueSpec.values", Outcome.REFUSED, "none has this name"),
        (
            "studySpec.parameters[5].conditionalParameterSpecs[0].parameterSpec.parameterId",
            Outcome.REFUSED,
            "momentum: parameters are searched independently",
        ),
        ("studySpec.algorithm", Outcome.CHANGED, "takes no range of real numbers"),
        ("studySpec.measurementSelectionType", Outcome.REFUSED, "the last measurement counts"),
        ("studySpec.medianAutomatedStoppingSpec.useElapsedDuration", Outcome.CHANGED, "by steps, not by time"),
        ("parallelTrialCount", Outcome.CHANGED, "at most max_trial_count"),
    ],
)
def test_each_value_of_a_study_has_its_reason(path: str, outcome: Outcome, reason: str) -> None:
    found = finding(as_written()[0], path)
    assert found.outcome is outcome
    assert reason in found.reason


BATCHES = [
    ("per_device_train_batch_size", {"discreteValueSpec": {"values": [1, 2]}}, [1, 2], "on 16 ranks in 8 passes"),
    ("per_device_train_batch_size", {"categoricalValueSpec": {"values": ["1", "2"]}}, [1, 2], "in 8 passes"),
    ("batch_size", {"integerValueSpec": {"minValue": 3, "maxValue": 5}}, [3, 4, 5], "a rank's samples"),
    ("global_batch_size", {"discreteValueSpec": {"values": [128, 256]}}, [1, 2], "global_batch_size there"),
    (
        "global_batch_size",
        {"integerValueSpec": {"minValue": 100, "maxValue": 150}},
        [0.875, 1, 1.125],
        "16 ranks divide",
    ),
]


@pytest.mark.parametrize(("name", "values", "of_a_rank", "reason"), BATCHES if WHOLE else BATCHES[1::3])
def test_a_batch_is_that_of_all_ranks_and_passes(
    name: str, values: dict[str, Any], of_a_rank: list[float], reason: str
) -> None:
    job = copy.deepcopy(JOB)
    job["studySpec"]["parameters"] = [{"parameterId": name, **values}]
    job["trialJobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"] += [
        "--per_device_train_batch_size=4", "--gradient_accumulation_steps", "8"
    ]  # fmt: skip
    result = import_run_file(Source("tuning.yaml", Kind.JOB_SPEC, job))
    config = parse_run_config(parse_yaml(result.text, "tuning.yaml"), "tuning.yaml")
    batches = require_tuning(config).parameters["train.global_batch_size"].points
    assert batches == [128 * value for value in of_a_rank]
    assert all(batch % (16 * config.train.micro_batch_size) == 0 for batch in batches if isinstance(batch, int))
    assert reason in finding(result, "studySpec.parameters[0].parameterId").reason
    if config.train.micro_batch_size != 4:
        given = finding(
            result, "trialJobSpec.workerPoolSpecs[0].containerSpec.command.arguments.per_device_train_batch_size"
        )
        assert given.outcome is Outcome.CHANGED and "a divisor of every batch" in given.reason


def test_one_of_two_forms_is_searched() -> None:
    steps = {"parameterId": "warmup_steps", "integerValueSpec": {"minValue": 0, "maxValue": 500}}
    share = {"parameterId": "warmup_ratio", "doubleValueSpec": {"minValue": 0, "maxValue": 0.1}}
    result, config = imported(parameters=[steps, share])
    assert config.tune and list(config.tune.parameters) == ["train.warmup_steps"]
    assert "sets train.warmup_steps" in finding(result, "studySpec.parameters[1].parameterId").reason


def test_a_range_of_real_numbers_is_none_of_whole_numbers() -> None:
    rank = {"parameterId": "lora_r", "doubleValueSpec": {"minValue": 8, "maxValue": 64}}
    rate = {"parameterId": "lr", "doubleValueSpec": {"minValue": 1e-5, "maxValue": 1e-4}}
    result, config = imported(parameters=[rank, rate])
    assert config.tune and list(config.tune.parameters) == ["train.optimizer.learning_rate"]
    assert "expected a whole number" in finding(result, "studySpec.parameters[0].parameterId").reason
    assert "lora_r there" not in result.text  # what was refused is no part of the comment beside the others


def test_early_stopping_needs_a_metric_of_training() -> None:
    result, config = imported(metrics=[{"metricId": "accuracy", "goal": "MAXIMIZE"}])
    assert config.tune and (config.tune.metric, config.tune.stopping) == ("exact_match", "none")
    refused = finding(result, "studySpec.medianAutomatedStoppingSpec.useElapsedDuration")
    assert refused.outcome is Outcome.REFUSED and "validation_loss alone" in refused.reason


def test_without_a_field_that_can_be_searched_the_program_stays() -> None:
    units = [{"parameterId": "hidden_units", "integerValueSpec": {"minValue": 8, "maxValue": 64}}]
    result, config = imported(parameters=units)
    assert config.tune is None
    assert config.train.trainer and config.train.trainer.command[:2] == ("python", "train.py")
    assert finding(result, "maxTrialCount").outcome is Outcome.REFUSED


def test_a_search_without_possible_values_is_refused_whole() -> None:
    epochs = [{"parameterId": "warmup_ratio", "doubleValueSpec": {"minValue": 2, "maxValue": 3}}]
    result, config = imported(parameters=epochs)
    assert config.tune is None
    assert finding(result, "maxTrialCount").reason == "no parameter is left to search"


def test_a_study_without_a_metric_is_no_search_and_no_job_spec() -> None:
    result, config = imported(metrics=[])
    assert config.tune is None
    assert "VP801" in finding(result, "maxTrialCount").reason
    job = {**JOB, "studySpec": {**JOB["studySpec"], "metrics": []}}
    with pytest.raises(ConfigError, match="VP801"):
        import_job_spec(Source("tuning.yaml", Kind.JOB_SPEC, job))


def test_parameters_of_the_sdk_are_those_that_it_sends() -> None:
    text = import_job_spec(source_of(SEARCHES["tuning.py"], "tuning.py")).text
    study = yaml.safe_load(text)["study_spec"]
    assert study["metrics"] == [{"metric_id": "accuracy", "goal": "MAXIMIZE"}]
    assert study["algorithm"] == "RANDOM_SEARCH"
    assert study["parameters"][0] == {
        "parameter_id": "lr",
        "double_value_spec": {"min_value": 1e-5, "max_value": 1e-3},
        "scale_type": "UNIT_LOG_SCALE",
    }
    assert study["parameters"][2]["discrete_value_spec"] == {"values": [16, 32]}


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("lr", "train.optimizer.learning_rate"),
        ("learning-rate", "train.optimizer.learning_rate"),
        ("--weight_decay", "train.optimizer.weight_decay"),
        ("per_device_train_batch_size", "train.global_batch_size"),
        ("lora_alpha", "model.lora.alpha"),
        ("train.epochs", "train.epochs"),
        ("model.lora.rank", "model.lora.rank"),
        ("train.nonsense", ""),
        ("model_name_or_path", ""),
        ("dropout_rate", ""),
    ],
)
def test_the_field_of_a_parameter(name: str, field: str) -> None:
    assert field_of(name) == field
