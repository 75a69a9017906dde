"""The study of a tuning job: each rule by its own fixture, in both spellings, and beside the fake of the service."""

from __future__ import annotations

from typing import Any

import pytest
from google.cloud.aiplatform_v1 import types as api
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.vertex.tuning_jobs import TuningJobs
from tests.support.pipelines.job_specs import ABSENT, CONTAINER, ONE, changed, in_camel_case, started
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.job_spec.file import spec_of
from vlmpipe.job_spec.rules import RULES, Violation

RATE = {"parameter_id": "lr", "double_value_spec": {"min_value": 1e-5, "max_value": 1e-3}}
LOG = {**RATE, "scale_type": "UNIT_LOG_SCALE"}
RANK = {"parameter_id": "rank", "integer_value_spec": {"min_value": 4, "max_value": 64}}
OPT = {"parameter_id": "opt", "categorical_value_spec": {"values": ["adamw", "sgd"]}}
STUDY = {"metrics": [{"metric_id": "accuracy", "goal": "MAXIMIZE"}], "parameters": [LOG, RANK, OPT]}
PARAMETERS, METRIC = "study_spec.parameters", "study_spec.metrics.0"


def check(job: dict[str, Any]) -> list[Violation]:
    return spec_of(job).check(load_catalog())


def tuning(spec: dict[str, Any] = ONE, **changes: Any) -> dict[str, Any]:
    job = {
        "display_name": "s", "study_spec": STUDY, "max_trial_count": 5, "parallel_trial_count": 2,
        "trial_job_spec": spec,
    }  # fmt: skip
    return changed(job, {name.replace("__", "."): value for name, value in changes.items()})


def trial(changes: dict[str, Any]) -> dict[str, Any]:
    return tuning(changed(ONE, changes))


def ranged(low: float, high: float, kind: str = "double", **others: Any) -> dict[str, Any]:
    return {"parameter_id": "p", f"{kind}_value_spec": {"min_value": low, "max_value": high}, **others}


def searched(*parameters: dict[str, Any], **study: Any) -> dict[str, Any]:
    return tuning(study_spec={**STUDY, **study, "parameters": list(parameters)})


def numbers(*values: float) -> dict[str, Any]:
    return {"parameter_id": "p", "discrete_value_spec": {"values": list(values)}}


SHELL = ("bash", "-c", "torchrun --nproc_per_node=8 t.py")
BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("VP101", tuning(study_spec={**STUDY, "nonsense": 1}), "study_spec.nonsense"),
    ("VP106", tuning(study_spec__metrics=[{"metric_id": "a", "goal": "max"}]), f"{METRIC}.goal"),
    ("VP103", searched(ranged("low", 1)), f"{PARAMETERS}.0.double_value_spec.min_value"),  # type: ignore[arg-type]
    ("VP104", tuning(max_trial_count="many"), "max_trial_count"),
    ("VP103", searched(numbers(1, "b")), f"{PARAMETERS}.0.discrete_value_spec.values.1"),  # type: ignore[arg-type]
    ("VP801", tuning(study_spec__metrics=[]), "study_spec.metrics"),
    ("VP801", tuning(study_spec__metrics=[{"metric_id": "a"}]), f"{METRIC}.goal"),
    ("VP801", tuning(study_spec__metrics=[{"goal": "MAXIMIZE"}]), f"{METRIC}.metric_id"),
    ("VP808", tuning(study_spec__metrics=[{"metric_id": x, "goal": "MAXIMIZE"} for x in "ab"]), "study_spec.metrics"),
    ("VP802", searched(), PARAMETERS),
    ("VP802", searched(RATE, RATE), f"{PARAMETERS}.1.parameter_id"),
    ("VP802", searched({"parameter_id": "p"}), f"{PARAMETERS}.0"),
    ("VP802", searched({**RATE, **RANK}), f"{PARAMETERS}.0"),
    ("VP802", searched(ranged(1, 0.1)), f"{PARAMETERS}.0.double_value_spec"),
    ("VP802", searched(ranged(0, 1, scale_type="UNIT_LOG_SCALE")), f"{PARAMETERS}.0.scale_type"),
    ("VP802", searched(ranged(0.5, 2, "integer")), f"{PARAMETERS}.0.integer_value_spec.min_value"),
    ("VP802", searched(numbers()), f"{PARAMETERS}.0.discrete_value_spec.values"),
    ("VP802", searched(numbers(2, 1)), f"{PARAMETERS}.0.discrete_value_spec.values"),
    ("VP802", searched(numbers(*range(1001))), f"{PARAMETERS}.0.discrete_value_spec.values"),
    ("VP802", searched({**OPT, "scale_type": "UNIT_LINEAR_SCALE"}), f"{PARAMETERS}.0.scale_type"),
    ("VP802", searched(RATE, algorithm="GRID_SEARCH"), f"{PARAMETERS}.0.double_value_spec"),
    ("VP803", tuning(max_trial_count=0), "max_trial_count"),
    ("VP803", tuning(parallel_trial_count=6), "parallel_trial_count"),
    ("VP807", tuning(max_trial_count=ABSENT), "max_trial_count"),
    ("VP804", trial({f"{CONTAINER}.args": ["--lr={{lr}}"]}), f"trial_job_spec.{CONTAINER}.args.0"),
    ("VP804", trial({f"{CONTAINER}.args": ["--rate", "${lr}"]}), f"trial_job_spec.{CONTAINER}.args.1"),
    ("VP805", trial({f"{CONTAINER}.args": ["--rank=8"]}), f"trial_job_spec.{CONTAINER}.args.0"),
    ("VP806", trial(started(*SHELL)), f"trial_job_spec.{CONTAINER}"),
    ("VP806", trial(started(*SHELL[:2], f'{SHELL[2]} "$@"')), f"trial_job_spec.{CONTAINER}"),
    ("VP806", trial(started("env", "bash", "-eu", "-o", "pipefail", *SHELL[1:])), f"trial_job_spec.{CONTAINER}"),
]  # fmt: skip
VALID = [
    tuning(),
    tuning(max_failed_trial_count=2, encryption_spec={"kms_key_name": "k"}),
    searched(numbers(1, 2), ranged(-3, 2, "integer") | {"parameter_id": "q"}, algorithm="GRID_SEARCH"),
    searched(ranged("1e-5", "1e-3")),  # type: ignore[arg-type]  # as PyYAML reads 1e-5
    trial({f"{CONTAINER}.args": ["--optimizer", "adamw", "--title={{ title }}: {{ text }}"]}),
    trial(started(*SHELL[:2], 'torchrun --nproc_per_node=8 t.py "$@"', "sh")),
    trial(started(*SHELL[:2], 'torchrun --nproc_per_node=8 t.py "$0" "$@"')),
    trial(started(*SHELL[:2], "torchrun --nproc_per_node=8 t.py $*", "sh")),
]


def test_every_rule_about_studies_has_a_fixture() -> None:
    assert {code for code, *_ in BROKEN if code > "VP8"} == {code for code in RULES if code > "VP8"}


def dotted(path: str) -> str:
    return path.replace("[", ".").replace("]", "")


@pytest.mark.parametrize(("code", "job", "path"), BROKEN)
def test_each_fixture_breaks_its_rule_and_no_other(code: str, job: dict[str, Any], path: str) -> None:
    assert [(one.code, dotted(one.path)) for one in check(job)] == [(code, path)]
    assert [one.code for one in check(in_camel_case(job))] == [code]


@pytest.mark.parametrize("job", VALID)
def test_a_valid_tuning_job_breaks_no_rule(job: dict[str, Any]) -> None:
    assert check(job) == []
    assert check(in_camel_case(job)) == []


def test_a_placeholder_is_answered_with_how_values_reach_a_trial() -> None:
    (found,) = check(trial({f"{CONTAINER}.args": ["--lr={{lr}}"]}))
    assert found.severity == "error" and "appends --lr=VALUE to the arguments of each trial" in found.fix


def test_parameters_under_conditions_are_looked_at() -> None:
    inner = {"parent_categorical_values": {"values": ["sgd"]}, "parameter_spec": ranged(2, 1)}
    (found,) = check(searched({**OPT, "conditional_parameter_specs": [inner]}))
    place = "study_spec.parameters[0].conditional_parameter_specs[0].parameter_spec.double_value_spec"
    assert (found.code, found.path) == ("VP802", place)


def test_a_missing_study_is_named_once_for_each_part() -> None:
    assert [one.code for one in check({"trial_job_spec": ONE})] == ["VP801", "VP802", "VP807", "VP807"]


LOW, HIGH = st.sampled_from([-1, 0, 0.5, 1]), st.sampled_from([0, 0.5, 1, 2])
SCALES = st.sampled_from([{}, {"scale_type": "UNIT_LINEAR_SCALE"}, {"scale_type": "UNIT_LOG_SCALE"}])
SPECS = st.one_of(
    st.builds(lambda low, high, scale: ranged(low, high) | scale, LOW, HIGH, SCALES),
    st.builds(lambda values: numbers(*values), st.lists(st.sampled_from([1, 2, 3]), max_size=3)),
    st.builds(lambda scale: {**OPT, **scale}, SCALES),
    st.sampled_from([RATE, LOG, RANK, OPT, {"parameter_id": "none"}, {**RANK, "parameter_id": "two words"}]),
)
METRICS = st.lists(st.sampled_from([{"metric_id": "a", "goal": "MAXIMIZE"}, {"metric_id": "b"}]), max_size=2)


@given(st.lists(SPECS, max_size=3), METRICS, st.sampled_from(["", "GRID_SEARCH"]), st.integers(1, 3), st.integers(1, 3))
def test_a_study_is_refused_where_the_fake_of_the_service_refuses_it(
    parameters: list[dict[str, Any]], metrics: list[dict[str, Any]], algorithm: str, trials: int, parallel: int
) -> None:
    study = {"metrics": metrics, "parameters": parameters, **({"algorithm": algorithm} if algorithm else {})}
    job = tuning(study_spec=study, max_trial_count=trials, parallel_trial_count=parallel)
    refused = TuningJobs("projects/p/locations/l")._problems(api.HyperparameterTuningJob(job))
    assert bool(check(job)) == bool(refused), refused
