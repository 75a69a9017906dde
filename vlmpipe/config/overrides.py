"""Overrides of a run file's fields: the command line, a console's parameters, stages and variants of a sweep.

One merge for all of them. A section is merged field by field, so that `gate={max_loss: 3}` is `gate.max_loss=3` and
leaves the other conditions as they are. A value is replaced: also a list, and what is one value although it is written
as a mapping (WHOLE), of which `gate.per_slice.digit=0.5` sets one entry.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vlmpipe.config.json_loader import parse_json
from vlmpipe.config.validation_errors import (
    Problem,
    ProblemsError,
    RunFileError,
    did_you_mean,
    show,
)
from vlmpipe.config.yaml_loader import parse_yaml
from vlmpipe.trainer.config.train_fields import ONE_OF_TWO

# Where weights come from: other ones have another revision, or a configuration instead.
SOURCES = ("model.pretrained", "model.tower", "model.projector", "model.language_model")
# Mappings with keys of the user's own; a test compares them with the schema.
KEYED = (
    "model.pretrained.config", "model.tower.config", "model.projector.config", "model.language_model.config",
    "model.image_processor", "data.source_arguments", "train.deepspeed", "cluster.step_disks", "cluster.env", "secrets",
    "gate.per_slice",
    "gate.min_scores", "gate.benchmarks", "register.serving.env", "deploy.env", "tune.parameters", "sweep.grid",
    "sweep.variants", "gcp.labels", "kubeflow.node_selector", "kubeflow.secret_env",
)  # fmt: skip
WHOLE = frozenset({*SOURCES, *KEYED})
_OF_A_STAGE = re.compile(r"^stages\.[^.]+\.")
EXAMPLE = '{"train.epochs": 2}'


def parse_overrides(texts: Sequence[object]) -> dict[str, object]:
    """`["train.epochs=2", ...]` as {dotted key: value}. Values are read as YAML; `a.b=` sets an empty text."""
    overrides: dict[str, object] = {}
    problems = []
    for text in texts:
        if not isinstance(text, str):
            expected = "a text such as 'train.epochs=2': each override is an argument of its own"
            problems.append(Problem("", f"found {text!r}, expected {expected}"))
            continue
        key, equals, value = text.partition("=")
        key = key.strip()
        # Bytes that are not UTF-8 reach Python as surrogates, which encode to nothing.
        if "\0" in text or text.encode(errors="ignore").decode() != text:
            problems.append(Problem("", f"found {text!r}, expected text in UTF-8 without NUL{_of_this_python()}"))
        elif not equals or not all(key.split(".")):
            problems.append(Problem("", f"found {text!r}, expected an override of the form section.field=value"))
        elif key in overrides:
            problems.append(Problem(key, "overridden twice"))
        else:
            overrides[key] = parse_yaml(value, f"override {key}") if value.strip() else ""
    if problems:
        raise RunFileError("command line", problems)
    return overrides


def override_texts(overrides: Mapping[str, object]) -> list[str]:
    """Texts that `parse_overrides` reads as these, such as `cluster.reduction_server=null` for None."""
    return [f"{path}={_text(value)}" for path, value in overrides.items()]


def _text(value: object) -> str:
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    try:
        is_itself = value == "" or parse_yaml(value, "a value") == value
    except RunFileError:
        is_itself = False
    return value if is_itself else json.dumps(value, ensure_ascii=False)


def _of_this_python() -> str:
    """Why text in UTF-8 may not have arrived as such."""
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        return ""
    return f"; this Python reads arguments in {encoding}: set PYTHONUTF8=1, or LC_ALL=C.UTF-8"


def read_overrides(text: str) -> dict[str, object]:
    """The overrides in a pipeline parameter: a JSON object of dotted keys; none in a blank text.

    Raises RunFileError.
    """
    if not text.strip():
        return {}
    overrides = parse_json(text, "parameter overrides")
    if not isinstance(overrides, dict):
        problem = f"found {show(overrides)}, expected a JSON object such as {EXAMPLE}"
        raise RunFileError("parameter overrides", [Problem("", problem)])
    if problems := [Problem("", f"found the key {key!r}, expected section.field") for key in _without_names(overrides)]:
        raise RunFileError("parameter overrides", problems)
    return overrides


def _without_names(content: Mapping[str, object]) -> Iterator[str]:
    """Dotted keys with an empty name in them, such as `train.`"""
    yield from (path for path, _ in leaves(content) if not all(path.split(".")))


def leaves(changes: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Dotted path and value of each field in nested sections. An empty section is a value."""
    for name, value in changes.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and value and _OF_A_STAGE.sub("", path) not in WHOLE:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def twice(paths: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of dotted paths of which one is the other or lies in it."""
    ordered = sorted(paths, key=lambda path: f"{path}.")
    return [(outer, inner) for outer, inner in itertools.pairwise(ordered) if f"{inner}.".startswith(f"{outer}.")]


def apply_overrides(data: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """A copy of the run file `data` with overrides merged into it. Unknown keys are left to the schema.

    In a list of sections a key has the section's name: stages.align.train.epochs. Raises RunFileError for a field that
    is given twice, for an empty section, which would change nothing, and where a key leads through a plain value or to
    a section that the list has not.
    """
    fields = dict(leaves(overrides))
    paths = [path for path, _ in leaves(overrides)]
    problems = [
        Problem(inner, f"is given twice, as {outer} too" if outer != inner else "is given twice")
        for outer, inner in twice(paths)
    ]
    problems += [
        Problem(path, "found an empty section, which changes nothing; expected its fields, one by one")
        for path, value in fields.items()
        if value == {} and isinstance(value, Mapping) and _is_section(data, path)
    ]
    if problems:
        raise RunFileError("overrides", problems)
    try:
        return merged(data, overrides)
    except ProblemsError as error:
        raise RunFileError("overrides", error.problems) from None


def merged(content: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, Any]:
    """A copy of `content` with the fields of `changes`, in sections or under dotted keys, in their places.

    A field that takes another one's place, such as train.warmup_steps, sets that one to null.

    Raises ProblemsError that names each field that has no place.
    """
    result = copy.deepcopy(dict(content))
    fields = list(leaves(changes))
    problems = [
        Problem(path, text) for path, value in fields + replaced(dict(fields)) if (text := _put(result, path, value))
    ]
    if problems:
        raise ProblemsError(problems)
    return result


def replaced(fields: Mapping[str, object]) -> list[tuple[str, None]]:
    """Fields whose place a given one takes, to be set to null; not those that are given too, which is an error."""
    others = [
        f"{section}.{ONE_OF_TWO[name]}"
        for section, _, name in (path.rpartition(".") for path, value in fields.items() if value is not None)
        if name in ONE_OF_TWO and section.rpartition(".")[2] == "train"
    ]
    return [(other, None) for other in others if other not in fields]


def _put(content: dict[str, object], path: str, value: object) -> str:
    """Set the field, unless the value is an empty section where one is. Returns what is wrong, else an empty text."""
    *sections, last = path.split(".")
    place: Any = content
    for section in sections:
        place = _section(place, section)
        if isinstance(place, str):
            return place
    if not isinstance(place, dict):
        return f"{sections[-1]} is a list, and {last} is no section of it"
    if not (value == {} and isinstance(value, Mapping) and _is_section(content, path)):
        place[last] = value
    return ""


def _is_section(content: Mapping[str, object], path: str) -> bool:
    """Return whether the content has a section with fields there."""
    place: object = content
    for name in path.split("."):
        if isinstance(place, list):
            place = _by_name(place).get(name)
        else:
            place = place.get(name) if isinstance(place, Mapping) else None
    return isinstance(place, Mapping) and _OF_A_STAGE.sub("", path) not in WHOLE


def _section(place: dict[str, object] | list[object], name: str) -> dict[str, object] | list[object] | str:
    """The section of that name, also in a list of named ones; else what is wrong."""
    if isinstance(place, list):
        named = _by_name(place)
        return named.get(name) or f"there is no {name} in the list{did_you_mean(name, list(named))}"
    if place.get(name) is None:
        place[name] = {}
    inner = place[name]
    if isinstance(inner, dict | list):
        return inner
    return f"{name} is a single value and has no fields of its own (found {show(inner)})"


def _by_name(sections: Sequence[object]) -> dict[str, dict[str, object]]:
    return {str(section["name"]): section for section in sections if isinstance(section, dict) and "name" in section}
