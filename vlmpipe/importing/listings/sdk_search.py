"""Arguments of the SDK's HyperparameterTuningJob as the study that it sends.

Source: google-cloud-aiplatform 1.165.1, aiplatform/hyperparameter_tuning.py and jobs.py.
"""

from __future__ import annotations

from collections.abc import Mapping

KIND = "parameter_class"  # of the SDK's class, next to its arguments
# Classes of the SDK with the names of their arguments.
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "DoubleParameterSpec": ("min", "max", "scale"),
    "IntegerParameterSpec": ("min", "max", "scale"),
    "DiscreteParameterSpec": ("values", "scale"),
    "CategoricalParameterSpec": ("values",),
}
SCALES = {"linear": "UNIT_LINEAR_SCALE", "log": "UNIT_LOG_SCALE", "reverse_log": "UNIT_REVERSE_LOG_SCALE"}
ALGORITHMS = {"random": "RANDOM_SEARCH", "grid": "GRID_SEARCH"}
MEASUREMENTS = {"best": "BEST_MEASUREMENT", "last": "LAST_MEASUREMENT"}


def sent_search(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments with `study_spec` in the place of those that make it. What is of another form stays as it is."""
    rest = dict(arguments)
    study: dict[str, object] = {}
    metrics, parameters = rest.pop("metric_spec", None), rest.pop("parameter_spec", None)
    if isinstance(metrics, Mapping):
        study["metrics"] = [{"metric_id": name, "goal": str(goal).upper()} for name, goal in metrics.items()]
    if isinstance(parameters, Mapping):
        study["parameters"] = [_parameter(str(name), spec) for name, spec in parameters.items()]
    algorithm, selection = rest.pop("search_algorithm", None), rest.pop("measurement_selection", None)
    if algorithm is not None:
        study["algorithm"] = _in_the_api(ALGORITHMS, algorithm)
    if selection is not None:
        study["measurement_selection_type"] = _in_the_api(MEASUREMENTS, selection)
    return {**rest, **({"study_spec": study} if study else {})}


def _parameter(parameter: str, spec: object) -> dict[str, object]:
    if not isinstance(spec, Mapping):
        return {"parameter_id": parameter, "values": spec}
    arguments = dict(spec)
    kind = str(arguments.pop(KIND, "")).removesuffix("ParameterSpec").lower()
    names = {"min": "min_value", "max": "max_value", "values": "values"}
    values = {target: arguments.pop(name) for name, target in names.items() if name in arguments}
    scale = arguments.pop("scale", None)
    sent: dict[str, object] = {"parameter_id": parameter, f"{kind}_value_spec": values}
    if scale is not None:
        sent["scale_type"] = _in_the_api(SCALES, scale)
    conditions = arguments.pop("conditional_parameter_spec", None)
    if isinstance(conditions, Mapping):
        sent["conditional_parameter_specs"] = [
            {"parameter_spec": _parameter(str(inner), below)} for inner, below in conditions.items()
        ]
    return {**sent, **arguments}


def _in_the_api(names: Mapping[str, str], value: object) -> object:
    """The API's name of an SDK's value; the value itself where it has none."""
    return names.get(value, value) if isinstance(value, str) else value
