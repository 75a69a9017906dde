"""Mends the study of a tuning job, until `check` finds no error in the study and in its trials' parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

from vlmpipe.importing.findings import Outcome, Path
from vlmpipe.importing.job_specs.draft import Draft, SpecDraft, StudyDraft
from vlmpipe.importing.job_specs.form import cut_word, enum_value
from vlmpipe.job_spec.schema import load_fields
from vlmpipe.job_spec.study import RANGES, study_violations
from vlmpipe.job_spec.violation import RULES, Violation
from vlmpipe.trainer.errors import ConfigError

MAX_REPAIRS = 400
IN_A_TRIAL = "trial_job_spec"
ALL_ARGUMENTS = ' "$@"'


def repair_study(study: StudyDraft, trial: SpecDraft) -> None:
    """Mend every error of the study; warnings become comments.

    Raises ConfigError for a study that cannot be mended, such as one without a metric.
    """
    for violation in study.reading.violations:
        _form(study, violation)
    worst: Violation | None = None
    for _ in range(MAX_REPAIRS):
        # What was mended is in the API's types, so that its own reading finds nothing.
        violations = list(study_violations(study.spec, trial.typed, "snake_case"))
        worst = next((violation for violation in violations if RULES[violation.code].severity == "error"), None)
        if worst is None:
            for violation in violations:
                place, path = _place(study, trial, violation)
                place.comment(path, f"{violation.code}: {violation.sentence}")
            return
        before = copy.deepcopy((study.spec, trial.spec))
        place, path = _place(study, trial, worst)
        MENDS.get(worst.code, _unreadable)(place, path, worst)
        if (study.spec, trial.spec) == before:
            break
    assert worst
    raise ConfigError(f"the study cannot be mended: {worst.code} {worst.sentence}", expected=worst.expected)


def _place(study: StudyDraft, trial: SpecDraft, violation: Violation) -> tuple[Draft, Path]:
    is_of_a_trial = violation.field[:1] == (IN_A_TRIAL,)
    return (trial, violation.field[1:]) if is_of_a_trial else (study, violation.field)


def _form(study: StudyDraft, violation: Violation) -> None:
    """A value that the API would not read: another spelling of it, or none."""
    path, leaves = violation.field, study.leaves_at(violation.field)
    if violation.code == "VP102":
        for leaf in leaves:
            if study.at[leaf] == path:
                study.ledger.note(leaf, Outcome.CHANGED, ".".join(map(str, path)), f"spelled {violation.expected}")
        return
    if study.get(path) is not None:
        study.comment(path, violation.sentence)
        return
    written = study.ledger.values.get(leaves[0]) if len(leaves) == 1 else None
    value = _enum(written) if violation.code == "VP106" and isinstance(written, str) else None
    if value:
        study.put(path, value, f"{written} there; expected {violation.expected}")
        return
    for leaf in leaves:
        study.ledger.note(leaf, Outcome.REFUSED, "", violation.sentence)
        study.at.pop(leaf, None)


def _enum(written: str) -> str | None:
    """A name of the API that is written in another way, such as minimize, log or RANDOM."""
    names = [name for known in load_fields()["tuning"]["enums"].values() for name in known]
    return (
        enum_value(written, names)
        or enum_value(f"unit_{written}_scale", names)
        or enum_value(f"{written}_search", names)
        or enum_value(f"{written}_measurement", names)
    )


def _unreadable(draft: Draft, path: Path, violation: Violation) -> None:
    """Take out a value that the API would not read, or the value around it."""
    while path and not draft.remove(path, Outcome.REFUSED, violation.sentence):
        path = path[:-1]


def _take_out(draft: Draft, path: Path, violation: Violation) -> None:
    """Take out the metric or the parameter around a value."""
    whole = next(
        (path[: at + 2] for at, part in reversed(list(enumerate(path[:-1]))) if part in ("metrics", "parameters")
         and isinstance(path[at + 1], int)), path)  # fmt: skip
    nested = next((path[: at + 2] for at, part in enumerate(path) if part == "conditional_parameter_specs"), whole)
    draft.remove(nested, Outcome.REFUSED, violation.sentence)


def _parameter(draft: Draft, path: Path, violation: Violation) -> None:
    value, name = draft.get(path), path[-1]
    parameter = draft.get(path[:-1]) if name in RANGES else draft.get(path[:-2])
    if name in ("default_value", "scale_type"):
        draft.remove(path, Outcome.DROPPED, violation.sentence)
    elif name == "double_value_spec" and violation.fix:  # under GRID_SEARCH
        algorithm = ("study_spec", "algorithm")
        draft.put(algorithm, "RANDOM_SEARCH", "GRID_SEARCH there, which takes no range of real numbers")
    elif name == "values" and isinstance(value, list) and value and path[-2] == "discrete_value_spec":
        rising = sorted(set(value))[:1000]
        draft.put(path, rising, f"{len(value)} numbers there; {violation.expected}")
    elif name in RANGES and isinstance(value, Mapping) and value.get("min_value", 0) > value.get("max_value", 0):
        turned = {**value, "min_value": value.get("max_value", 0), "max_value": value.get("min_value", 0)}
        draft.put(path, turned, f"{violation.found} there; {violation.expected}")
    elif name in ("min_value", "max_value") and isinstance(parameter, Mapping) and isinstance(value, float):
        draft.put(path, float(round(value)), f"{violation.found} there; {violation.expected}")
    else:
        _take_out(draft, path, violation)


def _goal_or_metric(draft: Draft, path: Path, violation: Violation) -> None:
    if path[-1] in ("goal", "metric_id"):
        _take_out(draft, path, violation)


def _count(draft: Draft, path: Path, violation: Violation) -> None:
    trials = draft.get(("max_trial_count",)) or 1
    value = trials if path == ("parallel_trial_count",) and trials >= 1 and draft.get(path) else 1
    draft.put(path, value, f"{violation.found} there; expected {violation.expected}")


def _placeholder(draft: Draft, path: Path, violation: Violation) -> None:
    cut_word(draft, path, violation.sentence)


def _shell(draft: Draft, path: Path, violation: Violation) -> None:
    """Let a shell's text pass on appended words: the words after it, the first of which is its $0."""
    for name in ("command", "args"):
        words = list(draft.get((*path, name)) or ())
        place = next((at for at, word in enumerate(words) if any(mark in word for mark in (" ", "\n"))), None)
        if place is None:
            continue
        text = words[place] if '"$@"' in words[place] else words[place].rstrip() + ALL_ARGUMENTS
        after = words[place + 1 :] or ["sh"]
        draft.put((*path, name), [*words[:place], text, *after], violation.sentence)
        return


MENDS: Mapping[str, Callable[[Draft, Path, Violation], object]] = {
    "VP801": _goal_or_metric,
    "VP802": _parameter,
    "VP803": _count,
    "VP804": _placeholder,
    "VP806": _shell,
}
