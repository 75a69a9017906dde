"""The study of a tuning job as the section tune: what is searched, by which metric, and how many trials there are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from pydantic import ValidationError

from vlmpipe.config.overrides import apply_overrides
from vlmpipe.config.run_config import parse_run_config
from vlmpipe.config.sections.tune import OF_ADAPTERS, ParameterSpec
from vlmpipe.config.validation_errors import RunFileError, did_you_mean, fields_of
from vlmpipe.importing.cluster import ranks
from vlmpipe.importing.findings import Outcome, Path
from vlmpipe.importing.job_specs.answers import Answers
from vlmpipe.importing.job_specs.draft import StudyDraft
from vlmpipe.importing.settings.concepts import is_on
from vlmpipe.importing.settings.model_words import EXAMPLE_RANK
from vlmpipe.importing.settings.training import SCHEDULES
from vlmpipe.importing.settings.words import table_of
from vlmpipe.importing.translation import Setting, Translation
from vlmpipe.job_spec.study import RANGES, VALUES, Parameter, ValueKind, Values
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.config.train_fields import ONE_OF_TWO
from vlmpipe.trainer.monitoring.hypertune import VALIDATION_LOSS

STUDY = ("study_spec",)
# Concepts of the programs' arguments whose values are one field's.
FIELDS = {
    "learning_rate": "train.optimizer.learning_rate",
    "global_batch": "train.global_batch_size",
    "micro_batch": "train.global_batch_size",
    "epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "warmup_ratio": "train.warmup_fraction",
    "warmup_steps": "train.warmup_steps",
    "schedule": "train.lr_schedule",
    "final_rate": "train.final_rate_fraction",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
}
OTHER_NAMES = {
    "wd": "train.optimizer.weight_decay",
    "l2": "train.optimizer.weight_decay",
    "warmup": "train.warmup_fraction",
    "warmup_fraction": "train.warmup_fraction",
    "rank": "model.lora.rank",
    "lora_rank_r": "model.lora.rank",
    "eps": "train.optimizer.eps",
    "clip_grad_norm": "train.clip_grad_norm",
    "grad_clip": "train.clip_grad_norm",
    "num_train_steps": "train.max_steps",
    "bs": "train.global_batch_size",
}
LOSSES = ("validation_loss", "val_loss", "valid_loss", "eval_loss", "loss", "eval/loss", "val/loss", "validation/loss")
SHARES = ("accuracy", "acc", "val_accuracy", "val_acc", "eval_accuracy", "validation_accuracy", "eval/accuracy")
OF_EVALUATE = ("exact_match", "vqa_accuracy", "anls", "cider_d")
STOPPING = {
    "median_automated_stopping_spec": "median",
    "decay_curve_stopping_spec": "decay_curve",
    "convex_automated_stopping_spec": "decay_curve",
}
EXAMPLE_VALIDATE_STEPS = 100
MAX_VALUES = 1000  # of a choice of numbers
NOT_TAKEN = {
    "observation_noise": "the service chooses how noisy it takes trials to be",
    "study_stopping_config": "max_trial_count ends a search; vlmpipe cancel ends it earlier",
}
NO_CONDITIONS = "parameters are searched independently of each other: one under a condition has no field"


def translate_search(translation: Translation, answers: Answers[StudyDraft], passes: int = 1) -> bool:
    """Set the section tune from a corrected study. Returns whether any parameter is a field that can be searched.

    passes: the trials' gradient accumulation, by which a rank's batch counts.
    """
    parameters: dict[str, Parameter] = {}
    for index, parameter in enumerate(answers.draft.get((*STUDY, "parameters")) or ()):
        path: Path = (*STUDY, "parameters", index)
        _conditions(answers, path, parameter)
        _parameter(answers, path, parameter, parameters, passes)
    if parameters:
        translation.settings["tune.parameters"] = Setting(parameters, "", is_given=True)
        _adapters(translation, parameters)
        _metric(answers)
        _algorithm(answers, parameters)
        _stopping(answers)
        _counts(answers)
    for name, reason in NOT_TAKEN.items():
        answers.refuse((*STUDY, name), reason)
    no_search = "a run file has no field for it" if parameters else "no parameter of the study is a field of train"
    for path in list(answers.draft.at.values()):
        answers.refuse(path, no_search)
    return bool(parameters)


def field_of(name: str) -> str:
    """The run file's field that a parameter of a study sets, by its name; empty for none."""
    bare = name.lstrip("-")
    known = {path for path, _, _ in fields_of(TrainConfig)}
    if bare in OF_ADAPTERS or (bare.removeprefix("train.") in known and bare.startswith("train.")):
        return bare
    lowered = bare.lower().replace("-", "_")
    for table in (OTHER_NAMES, table_of("transformers"), table_of("llama_factory"), table_of("axolotl")):
        entry = table.get(lowered)
        field = entry if isinstance(entry, str) else FIELDS.get(str((entry or {}).get("is")), "")
        if field.startswith("train.") or field in OF_ADAPTERS:
            return field
    return ""


def _conditions(answers: Answers[StudyDraft], path: Path, parameter: Parameter) -> None:
    for number, condition in enumerate(parameter.get("conditional_parameter_specs") or ()):
        name = (condition.get("parameter_spec") or {}).get("parameter_id", "")
        answers.refuse((*path, "conditional_parameter_specs", number), f"{name or 'a parameter'}: {NO_CONDITIONS}")


def _parameter(
    answers: Answers[StudyDraft],
    path: Path,
    parameter: Parameter,
    parameters: dict[str, Parameter],
    passes: int,
) -> None:
    name = str(parameter.get("parameter_id", ""))
    kind = next(name for name in VALUES if name in parameter)
    field = field_of(name)
    if not field:
        known = [*FIELDS, *OTHER_NAMES, "weight_decay", "max_grad_norm"]
        reason = "trials search fields of train and the size of adapters, and none has this name"
        answers.refuse(path, f"{reason}{did_you_mean(name, known)}")
        return
    section, _, last = field.rpartition(".")
    if taken := next((name for name in (field, f"{section}.{ONE_OF_TWO.get(last)}") if name in parameters), None):
        answers.refuse(path, f"another parameter sets {taken}, and was taken")
        return
    spec, reason = _values(name, field, kind, parameter)
    if field == "train.global_batch_size":
        spec, reason = _batches(spec, ranks(answers.translation), passes if _is_of_a_rank(name) else 0)
    try:
        ParameterSpec.model_validate(spec)
    except ValidationError as error:
        answers.refuse(path, str(error.errors()[0]["msg"]).removeprefix("Value error, "))
        return
    scale = parameter.get("scale_type", "")
    if scale and "scale_type" not in spec:
        answers.drop((*path, "scale_type"), "values of a choice are drawn as they stand, and linear is the default")
    parameters[field] = spec
    target = f"tune.parameters.{field}"
    because = f"{name} there{f', {reason}' if reason else ''}" if name != field else reason
    answers.note((*path, "parameter_id"), Outcome.CHANGED if because else None, target, because)
    answers.note((*path, kind), Outcome.CHANGED if reason else None, target, reason)
    answers.note(path, None, target, "")


def _values(name: str, field: str, kind: ValueKind, parameter: Parameter) -> tuple[Parameter, str]:
    """A parameter's values for its field, and the changes to them."""
    values, scale = parameter[kind], parameter.get("scale_type", "")
    spec: Parameter = {}
    reason = ""
    if kind in RANGES:
        low, high = values.get("min_value", 0.0), values.get("max_value", 0.0)
        whole = kind == RANGES[1]
        spec[kind] = {"min_value": int(low) if whole else low, "max_value": int(high) if whole else high}
        if scale in ("UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE"):
            spec["scale_type"] = scale
    elif kind == VALUES[2]:
        spec[kind] = {
            "values": [int(value) if float(value).is_integer() else value for value in values.get("values", [])]
        }
    else:
        spec[kind], reason = _texts(field, [str(value) for value in values.get("values", [])])
    return spec, reason


def _is_of_a_rank(name: str) -> bool:
    """Return whether a batch of that name counts the samples of one rank in one pass."""
    bare = name.lstrip("-").lower().replace("-", "_")
    entry = table_of("transformers").get(bare)
    return bare == "bs" or (isinstance(entry, Mapping) and entry.get("is") == "micro_batch")


def _texts(field: str, values: list[str]) -> tuple[Values, str]:
    """Texts of a choice; numbers and schedules in the run file's words."""
    if field == "train.lr_schedule":
        ours = list(dict.fromkeys(SCHEDULES.get(value.lower(), (value, ""))[0] for value in values))
        return {"values": [*ours]}, "the run file's schedules" if ours != values else ""
    return {"values": [*values]}, ""


def _batches(spec: Parameter, processes: int, passes: int) -> tuple[Parameter, str]:
    """Batches of a step that all ranks divide. passes: those of a rank's samples; 0 for samples of all ranks."""
    kind = next(name for name in VALUES if name in spec)
    bounds = spec[kind]
    if kind == RANGES[0]:
        return spec, ""  # which has no whole numbers, and is refused
    if kind == RANGES[1]:
        low, high = int(bounds["min_value"]), int(bounds["max_value"])
        step = 1 if passes else processes
        low = -(-low // step) * step
        values: list[float | str] = list(
            range(low, high + 1, step * max(1, -(-(high - low + step) // (step * MAX_VALUES))))
        )
    else:
        values = [int(value) if str(value).isdecimal() else value for value in bounds["values"]]
    if not values or not all(isinstance(value, int) for value in values):
        return spec, ""
    batches = [value * (processes * passes or 1) for value in values if isinstance(value, int)]
    whole: Parameter = {"discrete_value_spec": {"values": [*batches]}}
    if not passes:
        return whole, f"batches that {processes} ranks divide" if kind == RANGES[1] and processes > 1 else ""
    in_passes = f" in {passes} passes" if passes > 1 else ""
    return whole, f"a rank's samples, on {processes} ranks{in_passes}" if processes * passes > 1 else ""


def _settle_micro_batch(translation: Translation, parameters: Mapping[str, Parameter]) -> None:
    """A micro-batch that divides every batch that is tried."""
    batches = parameters.get("train.global_batch_size", {}).get("discrete_value_spec", {}).get("values") or [""]
    before = translation.settings.get("train.micro_batch_size")
    if before is None or not all(isinstance(value, int) for value in (before.value, *batches)):
        return
    size = math.gcd(before.value, *(value // ranks(translation) for value in batches if isinstance(value, int))) or 1
    if size != before.value:
        why = "a divisor of every batch that is tried"
        leaves = translation.ledger.leaves_of("train.micro_batch_size")
        translation.change(leaves, "train.micro_batch_size", size, f"{before.value} there; {why}" if leaves else why)


def _adapters(translation: Translation, parameters: Mapping[str, Parameter]) -> None:
    """The section model.lora where its size is searched."""
    for field in [name for name in parameters if name in OF_ADAPTERS]:
        value = ParameterSpec.model_validate(parameters[field]).points[0]
        whole = isinstance(value, float) and value.is_integer()
        translation.assume(field, int(value) if whole else value, "a value that is searched")
        translation.assume("model.lora.rank", EXAMPLE_RANK, "an example: adapters are searched")


def _metric(answers: Answers[StudyDraft]) -> None:
    draft, translation = answers.draft, answers.translation
    metrics = draft.get((*STUDY, "metrics")) or [{}]
    name, goal = str(metrics[0].get("metric_id", "")), str(metrics[0].get("goal", ""))
    path: Path = (*STUDY, "metrics", 0)
    metric, ours = _metric_of(name, goal)
    meaning = "the loss on validation data" if metric == VALIDATION_LOSS else "the share of right answers"
    why = f"{name} there; trials are compared by {meaning}"
    answers.take((*path, "metric_id"), "tune.metric", metric, "" if metric == name else why)
    turned = f"{goal} there; a {'smaller' if ours == 'MINIMIZE' else 'larger'} {metric} is better"
    answers.take((*path, "goal"), "tune.goal", ours, "" if goal == ours else turned)
    answers.refuse((*path, "safety_config"), "a search has no bounds for unsafe trials")
    for index in range(1, len(metrics)):
        answers.refuse((*STUDY, "metrics", index), f"a search has one metric: {name}, the first")
    if metric == VALIDATION_LOSS:
        reason = f"{VALIDATION_LOSS} is measured in training, every {EXAMPLE_VALIDATE_STEPS} steps: an example"
        translation.assume("train.validate_every_steps", EXAMPLE_VALIDATE_STEPS, reason)


def _metric_of(name: str, goal: str) -> tuple[str, str]:
    """Our metric, and its goal. An unknown metric is a loss where it is minimized, else a share of right answers."""
    lowered = name.lower()
    if lowered in OF_EVALUATE:
        return lowered, "MAXIMIZE"
    if lowered in LOSSES or lowered.endswith("loss"):
        return VALIDATION_LOSS, "MINIMIZE"
    if lowered in SHARES or goal == "MAXIMIZE":
        return "exact_match", "MAXIMIZE"
    return VALIDATION_LOSS, "MINIMIZE"


def _algorithm(answers: Answers[StudyDraft], parameters: Mapping[str, Parameter]) -> None:
    path = (*STUDY, "algorithm")
    name = answers.draft.get(path)
    if name == "GRID_SEARCH" and any("double_value_spec" in spec for spec in parameters.values()):
        answers.take(path, "tune.algorithm", "RANDOM_SEARCH", "GRID_SEARCH takes no range of real numbers")
    elif name:
        answers.take(path, "tune.algorithm")
    selection = (*STUDY, "measurement_selection_type")
    chosen = answers.draft.get(selection)
    if chosen == "BEST_MEASUREMENT":
        answers.refuse(selection, "the last measurement counts: it is that of the weights that are exported")
    elif chosen:
        answers.drop(selection, "the last measurement counts")


def _stopping(answers: Answers[StudyDraft]) -> None:
    draft, translation = answers.draft, answers.translation
    for name, value in STOPPING.items():
        path = (*STUDY, name)
        if draft.get(path) is None:
            continue
        if translation.settings["tune.metric"].value != VALIDATION_LOSS:
            reason = f"trials are stopped by {VALIDATION_LOSS} alone, which is measured during training"
            answers.refuse(path, reason)
        elif "tune.stopping" in translation.settings:
            answers.refuse(path, f"tune.stopping is {translation.settings['tune.stopping'].value} already")
        else:
            reason = "their curves are extrapolated" if name.startswith("convex") else ""
            timed = draft.get((*path, "use_elapsed_duration"))
            reason = "; ".join(filter(None, [reason, "by steps, not by time" if is_on(timed) else ""]))
            translation.settings["tune.stopping"] = Setting(value, reason, is_given=True)
            answers.note(path, Outcome.CHANGED, "tune.stopping", reason or f"tune.stopping {value}")


def _counts(answers: Answers[StudyDraft]) -> None:
    for name in ("max_trial_count", "parallel_trial_count", "max_failed_trial_count"):
        if answers.draft.get((name,)) is not None:
            answers.take((name,), f"tune.{name}")


def _there(translation: Translation, field: str) -> str:
    """The parameter of the study, and the changes made to its values."""
    ledger, target = translation.ledger, f"tune.parameters.{field}"
    names = [leaf for leaf in ledger.leaves_of(target) if leaf[-1] in ("parameterId", "parameter_id")]
    return ledger.finding(names[0]).reason if names else ""


def settle_search(translation: Translation, source: str) -> None:
    """Refuse parameters with a value that the run file does not take. Without any, there is no search."""
    setting = translation.settings.get("tune.parameters")
    if setting is None:
        return
    _settle_micro_batch(translation, setting.value)
    content = translation.content()
    for field, spec in list(setting.value.items()):
        try:
            for value in ParameterSpec.model_validate(spec).extremes:
                parse_run_config(apply_overrides(content, {field: value}), f"{source} with {field} {value}")
        except RunFileError as error:
            problem = error.problems[0]
            translation.ledger.refuse_field(
                f"tune.parameters.{field}", f"{field} {value}: {problem.field}: {problem.text}"
            )
            del setting.value[field]
    changed = {field: _there(translation, field) for field in setting.value}
    reason = "; ".join(f"{field}: {text}" for field, text in changed.items() if text)
    translation.settings["tune.parameters"] = replace(setting, reason=reason)
    if not setting.value:
        for field in [name for name in translation.settings if name.startswith("tune.")]:
            del translation.settings[field]
            translation.ledger.refuse_field(field, "no parameter is left to search")
