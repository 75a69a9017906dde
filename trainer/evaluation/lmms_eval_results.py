"""Reads what lmms-eval leaves: its scores with intervals, and the answers that were scored.

lmms-eval ends with 0 after many errors, and scores the text of a failed request as an answer: both are found here. Its
`stderr_clt` is not read: it is that of the questions' own scores, also beside scores that are no mean of them, such as
a precision.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.evaluation.significance.bootstrap import interval, resampled_sums

FORMAT = "lmms-eval"  # in evaluate.json, in place of a format of question files
FAILED = "[LMMS_EVAL_REQUEST_FAILED"  # begins the answer to a question whose request failed
STDERR, NO_FILTER = "_stderr", ",none"
OF_NORMAL = 1.96  # standard errors on either side of a mean that hold 95 %


@dataclass(frozen=True)
class TaskScores:
    """A task's entry in evaluate.json, and its answers; none where no score is a mean over questions."""

    described: dict[str, object]
    answers: list[dict[str, object]]


def read_results(folder: Path, tasks: Sequence[str]) -> dict[str, TaskScores]:
    """The tasks' scores, by name. Raises UserError without results of a task, or with a question that has no answer."""
    path = next(folder.glob("**/*_results.json"), None)
    if path is None:
        raise _no_scores("lmms-eval wrote no results")
    content = json.loads(path.read_bytes())
    read = {}
    for task in tasks:
        scores = _scores(content["results"].get(task, {}))
        if not scores:
            raise _no_scores(f"lmms-eval has no score of task {task}")
        samples = _samples(path.parent, task)
        if failed := sum(FAILED in json.dumps(sample) for sample in samples):
            raise _no_scores(f"{failed} of {len(samples)} questions of task {task} were not answered")
        read[task] = _task(scores, content["results"][task], samples, content["n-samples"].get(task, {}))
    return read


def _no_scores(problem: str) -> UserError:
    return UserError(
        problem,
        expected="scores of every task of evaluate.lmms_eval",
        fix="read what lmms-eval printed above; nothing is added to evaluate.json",
        code=ExitCode.UNEXPECTED,
    )


def _scores(result: Mapping[str, object]) -> dict[str, float]:
    numbers = {name: _number(value) for name, value in result.items() if "," in name and STDERR not in name}
    return {name: number for name, number in numbers.items() if number is not None}


def _number(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _samples(folder: Path, task: str) -> list[dict[str, object]]:
    """The task's questions as logged; none for a group of tasks."""
    file = next(folder.glob(f"*_samples_{task}.jsonl"), None)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file else []
    return sorted(lines, key=lambda line: int(line["doc_id"]))


def _task(
    scores: dict[str, float], result: dict[str, object], samples: list[dict[str, object]], counts: dict[str, object]
) -> TaskScores:
    intervals, first = {}, ""
    shown = {name: name.removesuffix(NO_FILTER) for name in scores}
    for name, value in scores.items():
        metric, _, filtered = name.partition(",")
        of_samples = _of_each(samples, metric) if name.endswith(NO_FILTER) else []
        error = _number(result.get(f"{metric}{STDERR},{filtered}"))
        if of_samples and math.isclose(float(np.mean(of_samples)), value, rel_tol=1e-6, abs_tol=1e-9):
            first = first or metric
            drawn = resampled_sums(range(len(of_samples)), [[score] for score in of_samples])[:, 0] / len(of_samples)
            intervals[shown[name]] = interval(drawn, len(of_samples))
        elif error is not None:
            intervals[shown[name]] = (value - OF_NORMAL * error, value + OF_NORMAL * error)
    asked = repr([(line["doc_id"], line.get("input"), line.get("target")) for line in samples])
    described = {
        "format": FORMAT,
        "questions": len(samples) or counts.get("effective"),
        "scores": {shown[name]: value for name, value in scores.items()},
        "intervals": intervals,
        "compared": first,  # the score that the answers' file holds, by question
        "questions_sha256": hashlib.sha256(asked.encode()).hexdigest() if samples else "",
    }
    return TaskScores(described, [_answer(line, first) for line in samples] if first else [])


def _of_each(samples: Sequence[dict[str, object]], metric: str) -> list[float]:
    """The metric of each question; empty where a question has none that is a number."""
    values = [sample.get(metric) for sample in samples]
    numbers = [_number(value.get("score") if isinstance(value, dict) else value) for value in values]
    return [number for number in numbers if number is not None] if None not in numbers else []


def _answer(sample: dict[str, object], metric: str) -> dict[str, object]:
    """A line of the answers' file. The image is not logged by its content: each question counts as one of its own."""
    (score,) = _of_each([sample], metric)
    responses = sample.get("filtered_resps")
    return {
        "id": str(sample["doc_id"]),
        "slice": "",
        "question": str(sample.get("input", "")),
        "answers": [str(sample.get("target", ""))],
        "image": str(sample["doc_id"]),
        "prediction": responses if isinstance(responses, str) else json.dumps(responses),
        "score": score,
    }
