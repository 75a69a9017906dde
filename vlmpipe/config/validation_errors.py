"""Validation errors of a run file: each names the field, what was found and what was expected.

Pydantic finds the problems; this module says them for people. An unknown key is answered with the closest known one,
also when that one lives in another section.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trainer.errors import ConfigError

LEAST_SIMILARITY = 0.68
MAY_HOLD_SECRETS = ("cluster.env",)

# Names that other tools give to a field of ours.
OTHER_NAMES = {
    "lr": "learning_rate",
    "batch_size": "global_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "num_train_epochs": "epochs",
    "max_grad_norm": "clip_grad_norm",
    "gradient_checkpointing": "activation_checkpointing",
    "warmup_ratio": "warmup_fraction",
    "max_seq_length": "sequence_length",
    "num_nodes": "replica_count",
    "gpus": "accelerator_count",
    "vision_tower": "tower",
    "llm": "language_model",
    "lr_scheduler_type": "lr_schedule",
    "gradient_accumulation_steps": "global_batch_size",
    # Earlier names of fields.
    "row_tokens": "sequence_length",
    "row_images": "max_images_per_sequence",
    "over_long": "overlong_policy",
    "held_out_fraction": "validation_fraction",
    "global_batch_rows": "global_batch_size",
    "micro_batch_rows": "micro_batch_size",
    "reference_batch_rows": "reference_batch_size",
    "validate_rows": "validation_sequences",
    "tower_stream": "overlap_vision_encoder",
    "zero_node_weights": "zero_hpz",
    "whole": "pretrained",
    "ladder": "capacity_fallback",
    "refuse_red": "fail_on_error",
    "asynchronous": "async_save",
    "tuning": "tune",
}
# Earlier names that are still names of something else.
EARLIER_PATHS = {"train.schedule": "train.lr_schedule", "cluster.strategy": "cluster.scheduling_strategy"}
# Earlier values of fields.
EARLIER_VALUES = {("train.strategy", "tp+fsdp"): "tp"}
LONGEST_SHOWN = 60  # characters of a quoted value


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one field. `field` is a dotted path; empty for the file as a whole."""

    field: str
    text: str

    def __str__(self) -> str:
        return f"{self.field}: {self.text}" if self.field else self.text


class RunFileError(ConfigError):
    """A run file with problems, all of them at once (exit 64)."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source, self.problems = source, tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)]))


class ProblemsError(ValueError):
    """Raised by a validator that found several problems, each with its own field."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, problems)))


def key_of(name: str, field: FieldInfo) -> str:
    """The key of a field in the run file: its alias when it has one."""
    return field.alias or name


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo, type[BaseModel] | None]]:
    """Every field of `model` and of the sections below it: (dotted path, field, section's model or None)."""
    for name, field in model.model_fields.items():
        path = f"{prefix}.{key_of(name, field)}" if prefix else key_of(name, field)
        section = section_of(field)
        yield path, field, section
        if section:
            yield from fields_of(section, path)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model behind a field that is a section, also an optional one; None for a plain value."""
    annotation = field.annotation
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    models = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
    return models[0] if models else None


def show(value: Any) -> str:
    """A value as it is written in YAML or JSON, shortened."""
    if isinstance(value, Mapping):
        return "a section" if value else "an empty section"
    text = json.dumps(value, ensure_ascii=False, default=repr)
    if not text.isprintable():
        text = json.dumps(value, default=repr)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"


def from_validation_error(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """The problems behind pydantic's errors, one per field, in the schema's order."""
    fields = {path: field for path, field, _ in fields_of(model)}
    by_path: dict[str, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_path.setdefault(_path(details["loc"], fields, details["type"]), []).append(details)
    problems: list[Problem] = []
    for path, group in by_path.items():
        cause = group[0].get("ctx", {}).get("error")
        if isinstance(cause, ProblemsError):
            problems += cause.problems
        else:
            problems.append(Problem(path, _text(path, group, fields)))
    return problems


def _path(loc: tuple[int | str, ...], fields: Mapping[str, FieldInfo], kind: str) -> str:
    """The dotted path of an error. Pydantic appends the option of a union that it tried; that part is dropped."""
    path = ""
    for part in loc:
        longer = f"{path}.{part}" if path else str(part)
        inside_plain_value = path in fields and section_of(fields[path]) is None
        if inside_plain_value and not _holds_items(fields[path]):
            return path
        if path and not inside_plain_value and longer not in fields and kind != "extra_forbidden":
            return path
        path = longer
    return path


def _holds_items(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in (dict, list, tuple)


def _text(path: str, group: list[ErrorDetails], fields: Mapping[str, FieldInfo]) -> str:
    details = group[0]
    if details["type"] == "extra_forbidden":
        return _unknown_key(path, fields)
    if details["type"] == "missing":
        purpose = fields[path].description if path in fields else ""
        return f"missing, and there is no default. {purpose or ''}".rstrip()
    if details["type"] == "value_error":
        reason = str(details["ctx"]["error"])
        value = details["input"]
        whole_section = isinstance(value, Mapping | BaseModel)
        return reason if whole_section or path.startswith(MAY_HOLD_SECRETS) else f"found {show(value)}: {reason}"
    found = "a value of another kind" if path.startswith(MAY_HOLD_SECRETS) else show(details["input"])
    expected = " or ".join(dict.fromkeys(_expected(one) for one in group))
    hint = ""
    if details["type"] == "literal_error" and isinstance(details["input"], str):
        earlier = EARLIER_VALUES.get((path, details["input"]))
        hint = f"; it is {earlier} now" if earlier else did_you_mean(details["input"], _options(details))
    return f"found {found}, expected {expected}{hint}"


def _expected(details: ErrorDetails) -> str:
    ctx = details.get("ctx", {})
    kind = details["type"]
    match kind:
        case "literal_error":
            options = _options(details)
            return f"one of {', '.join(options)}" if len(options) > 1 else options[0]
        case "greater_than":
            return f"a number greater than {ctx['gt']:g}"
        case "greater_than_equal":
            return f"a number of at least {ctx['ge']:g}"
        case "less_than_equal":
            return f"a number of at most {ctx['le']:g}"
        case "int_type" | "int_parsing" | "int_from_float":
            return "a whole number"
        case "float_type" | "float_parsing":
            return "a number"
        case "bool_type" | "bool_parsing":
            return "true or false"
        case "string_type":
            return "text (put a number in quotes)"
        case "string_too_short":
            return "a text that is not empty"
        case "string_pattern_mismatch":
            return f"a text of the form {ctx['pattern']}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "a section with keys of its own"
        case "tuple_type" | "list_type":
            return "a list, for example [a, b]"
        case "none_required":
            return "null"
    message = details["msg"]
    return message[:1].lower() + message[1:]


def _options(details: ErrorDetails) -> list[str]:
    """The values that a Literal allows; pydantic gives them as "'on', 'off' or 'auto'"."""
    options = details["ctx"]["expected"].replace(" or ", ", ").split(", ")
    return [option.strip("'") or "(empty)" for option in options]


def _unknown_key(path: str, fields: Mapping[str, FieldInfo]) -> str:
    closest = closest_field(path, fields)
    if closest:
        return f"unknown key, did you mean {closest}?"
    section = path.rpartition(".")[0]
    known = [name.rpartition(".")[2] for name in fields if name.rpartition(".")[0] == section]
    return f"unknown key; known here: {', '.join(known)}"


def closest_field(path: str, fields: Mapping[str, FieldInfo] | Sequence[str]) -> str:
    """The known dotted path that `path` was most likely meant to be, or "" when none is near.

    A field in the same section wins over an equally similar one elsewhere.
    """
    if path in EARLIER_PATHS:
        return EARLIER_PATHS[path]
    section, _, key = path.rpartition(".")
    key = key.lower().replace("-", "_")
    key = OTHER_NAMES.get(key, key)

    def score(candidate: str) -> float:
        home, _, name = candidate.rpartition(".")
        similarity = difflib.SequenceMatcher(None, key, name).ratio()
        if similarity < LEAST_SIMILARITY:
            return 0.0
        nearness = 0.1 if home == section else 0.05 if home.startswith(f"{section}.") else 0.0
        return similarity + nearness

    best = max(fields, key=score)
    return best if score(best) else ""


def closest(name: str, known: Sequence[str]) -> str:
    """The most similar known name in any case, or "" when none is similar."""
    close = difflib.get_close_matches(name[:LONGEST_SHOWN].upper(), [item.upper() for item in known], n=1)
    return next(item for item in known if item.upper() == close[0]) if close else ""


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """ "; did you mean X?" or nothing."""
    found = closest(name, known)
    return f"; did you mean {found}?" if found else ""
