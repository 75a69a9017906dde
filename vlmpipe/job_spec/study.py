"""Rules VP80x: the study around the trials' spec in a hyperparameter tuning job."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Literal, TypedDict, cast

from vlmpipe.config.launch_commands import passes_arguments
from vlmpipe.job_spec.read_forms import ReadSpec
from vlmpipe.job_spec.rules.base import Pool
from vlmpipe.job_spec.schema import Spelling, read_tuning_job
from vlmpipe.job_spec.violation import FieldPath, Violation

CHECKED = ("study_spec", "max_trial_count", "parallel_trial_count", "max_failed_trial_count")
GOALS = ("MAXIMIZE", "MINIMIZE")
ValueKind = Literal["double_value_spec", "integer_value_spec", "discrete_value_spec", "categorical_value_spec"]
VALUES: tuple[ValueKind, ...] = (
    "double_value_spec", "integer_value_spec", "discrete_value_spec", "categorical_value_spec"
)  # fmt: skip
RANGES = VALUES[:2]
MIN_APART, MAX_DISCRETE_VALUES = 1e-10, 1000
LOG_SCALES = ("UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE")
_BRACES = re.compile(r"\{\{\s*([A-Za-z_][\w-]*)\s*\}\}|\$\{([A-Za-z_][\w-]*)\}")


class Metric(TypedDict, total=False):
    """A metric of a study (StudySpec.MetricSpec)."""

    metric_id: str
    goal: str


class Values(TypedDict, total=False):
    """A range of values, or those to choose from."""

    min_value: float
    max_value: float
    values: list[float | str]
    default_value: float | str


class Parameter(TypedDict, total=False):
    """A parameter of a study (StudySpec.ParameterSpec), with one of VALUES."""

    parameter_id: str
    scale_type: str
    double_value_spec: Values
    integer_value_spec: Values
    discrete_value_spec: Values
    categorical_value_spec: Values
    conditional_parameter_specs: list[Condition]


class Condition(TypedDict, total=False):
    """A parameter that is searched under a condition on another."""

    parameter_spec: Parameter


class Study(TypedDict, total=False):
    """The readable part of a study (StudySpec)."""

    algorithm: str
    metrics: list[Metric]
    parameters: list[Parameter]


class TuningJob(TypedDict, total=False):
    """The readable part of a tuning job without its trials' spec."""

    study_spec: Study
    max_trial_count: int
    parallel_trial_count: int
    max_failed_trial_count: int


def study_violations(job: Mapping[str, object], trial: ReadSpec, spelling: Spelling) -> Iterator[Violation]:
    """Problems of a tuning job's study, and of the parameters that its trials get.

    Args:
        job: the tuning job without its trials' spec, as it was written.
        trial: the readable part of the trials' spec.
    """
    reading = read_tuning_job(job, spelling)
    yield from reading.violations
    unread = [violation.field for violation in reading.violations]
    counts = cast("TuningJob", reading.fields)  # of which the reader left only values of the API's types
    study = counts.get("study_spec", {})
    names: list[str] = []
    for violation in (*_metrics(study), *_parameters(study, names), *_counts(counts)):
        if not any(path[: len(violation.field)] == violation.field for path in unread):
            yield violation
    for index, pool in enumerate(trial.get("worker_pool_specs", ())):
        yield from _told(Pool(index, pool), [name for name in names if name])


def _metrics(study: Study) -> Iterator[Violation]:
    metrics = study.get("metrics", [])
    if not metrics:
        expected = "one metric that trials report, and its goal"
        yield Violation("VP801", ("study_spec", "metrics"), "no metric", expected)
    if len(metrics) > 1:
        yield from _several_metrics(study, len(metrics))
    for index, metric in enumerate(metrics):
        path: FieldPath = ("study_spec", "metrics", index)
        if not re.fullmatch(r"\S+", metric.get("metric_id", "")):
            name = metric.get("metric_id") or "nothing"
            yield Violation("VP801", (*path, "metric_id"), name, "the name under which trials report it, in one word")
        if metric.get("goal") not in GOALS:
            yield Violation("VP801", (*path, "goal"), metric.get("goal", "nothing"), " or ".join(GOALS))


def _several_metrics(study: Study, count: int) -> Iterator[Violation]:
    """Several metrics are allowed: the service then looks for trials that no other one beats in all of them."""
    text = "one metric, where one trial is to be the best; early stopping needs one"
    stopping = next((name for name in study if name.endswith("stopping_spec")), "")
    actual = f"{count} metrics with {stopping}" if stopping else f"{count} metrics"
    fix = "leave all but one out, or choose among the Pareto-optimal trials by hand"
    yield Violation("VP808", ("study_spec", "metrics"), actual, text, fix)


def _parameters(study: Study, names: list[str]) -> Iterator[Violation]:
    """Check the parameters, those under conditions too, and add their names."""
    parameters = study.get("parameters", [])
    if not parameters:
        yield Violation("VP802", ("study_spec", "parameters"), "no parameter", "what is searched")
    for path, parameter in _all_parameters(parameters, ("study_spec", "parameters")):
        name = parameter.get("parameter_id", "")
        if not re.fullmatch(r"\S+", name):
            yield Violation("VP802", (*path, "parameter_id"), name or "nothing", "the argument's name, in one word")
        elif name in names and len(path) == 3:  # under conditions that exclude each other one name may come twice
            yield Violation("VP802", (*path, "parameter_id"), f"{name} twice", "each parameter once")
        names.append(name)
        kinds = [kind for kind in VALUES if kind in parameter]
        if len(kinds) != 1:
            yield Violation("VP802", path, " and ".join(kinds) or "no values", f"exactly one of {', '.join(VALUES)}")
            continue
        if "default_value" in parameter[kinds[0]]:
            where = (*path, kinds[0], "default_value")
            yield Violation("VP802", where, "a default", "none: it is for studies of Vizier", "leave it out")
        if kinds[0] == VALUES[0] and study.get("algorithm") == "GRID_SEARCH":
            fix = "name the values in a discrete_value_spec, or take another algorithm"
            yield Violation("VP802", (*path, kinds[0]), "a range of real numbers", "points for GRID_SEARCH", fix)
        yield from _values(parameter, kinds[0], path)


def _all_parameters(parameters: list[Parameter], path: FieldPath) -> Iterator[tuple[FieldPath, Parameter]]:
    for index, parameter in enumerate(parameters):
        yield (*path, index), parameter
        for number, condition in enumerate(parameter.get("conditional_parameter_specs", ())):
            inner = (*path, index, "conditional_parameter_specs", number, "parameter_spec")
            if "parameter_spec" in condition:
                for place, below in _all_parameters([condition["parameter_spec"]], inner):
                    yield (*inner, *place[len(inner) + 1 :]), below


def _values(parameter: Parameter, kind: ValueKind, path: FieldPath) -> Iterator[Violation]:
    values, here, scale = parameter[kind], (*path, kind), parameter.get("scale_type", "")
    if kind not in RANGES:
        listed = values.get("values", [])
        if not listed:
            yield Violation("VP802", (*here, "values"), "no value", "the values to choose from")
        numbers = [value for value in listed if isinstance(value, int | float)]  # unread ones have a violation
        if kind == VALUES[2] and any(after - before < MIN_APART for before, after in itertools.pairwise(numbers)):
            yield Violation(
                "VP802", (*here, "values"), "numbers that do not rise", "numbers in rising order, each once"
            )
        if kind == VALUES[2] and len(listed) > MAX_DISCRETE_VALUES:
            yield Violation("VP802", (*here, "values"), f"{len(listed)} numbers", f"at most {MAX_DISCRETE_VALUES}")
        if kind == VALUES[3] and scale not in ("", "SCALE_TYPE_UNSPECIFIED"):
            yield Violation("VP802", (*path, "scale_type"), scale, "no scale: texts have none", "leave it out")
        return
    # A bound that is left out is 0, in the API's messages.
    low, high = values.get("min_value", 0), values.get("max_value", 0)
    if low >= high:
        yield Violation("VP802", here, f"{low:g} to {high:g}", "min_value below max_value")
    elif scale in LOG_SCALES and low <= 0:
        yield Violation("VP802", (*path, "scale_type"), f"{scale} from {low:g}", "a range above 0")
    for name in ("min_value", "max_value"):
        if kind == RANGES[1] and name in values and not float(values[name]).is_integer():
            yield Violation("VP802", (*here, name), f"{values[name]:g}", "a whole number, or a double_value_spec")


def _counts(job: TuningJob) -> Iterator[Violation]:
    trials, parallel = job.get("max_trial_count", 0), job.get("parallel_trial_count", 0)
    for name, count in (("max_trial_count", trials), ("parallel_trial_count", parallel)):
        if name not in job:
            fix = f"give it here, or to gcloud as --{name.replace('_', '-')}, which takes 1 where nothing is given"
            yield Violation("VP807", (name,), "nothing", "a number of trials, which the API requires", fix)
        elif count < 1:
            yield Violation("VP803", (name,), str(count), "1 or more")
    if 0 < trials < parallel:
        expected = f"at most max_trial_count, {trials}"
        yield Violation("VP803", ("parallel_trial_count",), str(parallel), expected)


def _told(pool: Pool, names: list[str]) -> Iterator[Violation]:
    """Words that stand for a parameter, or take the place of one."""
    how = "leave it out: Vertex AI appends --{0}=VALUE to the arguments of each trial"
    for path, word in pool.words():
        braces = [braced or dollar for braced, dollar in _BRACES.findall(word)]
        if name := next((name for name in braces if name in names), ""):
            fix = how.format(name)
            yield Violation("VP804", ("trial_job_spec", *path), word, "no placeholder: nothing replaces it", fix)
        elif (name := word.lstrip("-").partition("=")[0]) in names and word.startswith("--"):
            fix = how.format(name)
            yield Violation("VP805", ("trial_job_spec", *path), word, "a parameter of the study once", fix)
    words = [*pool.container.get("command", ()), *pool.container.get("args", ())]
    if names and not passes_arguments(words):
        text = "a shell's text, after which the parameters do not reach the program"
        fix = 'write PROGRAM "$@" in the text, and one more word after it, such as sh'
        yield Violation("VP806", ("trial_job_spec", *pool.at("container_spec")), text, '"$@" in the text', fix)
