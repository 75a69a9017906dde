"""lmms-eval's files in the form that release 0.7.3 writes: scores, intervals, and errors that it hides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.evaluation.lmms_eval_results import TaskScores, read_results

RIGHT = [1.0, 0.0, 1.0, 1.0]
# As the task pope writes them: stderr_clt is accuracy's, also beside precision.
SCORES = {
    "alias": "pope",
    "pope_accuracy,none": 0.75, "pope_accuracy_stderr,none": "N/A", "pope_accuracy_stderr_clt,none": 0.25,
    "pope_precision,none": 0.6, "pope_precision_stderr,none": "N/A", "pope_precision_stderr_clt,none": 0.25,
    "pope_yes_ratio,none": [], "pope_yes_ratio_stderr,none": [],
}  # fmt: skip


def sample(number: int, right: float, said: str = "yes") -> dict[str, Any]:
    each = {"question_id": number, "score": right, "prediction": said, "ground_truth": "yes"}
    return {
        "doc_id": number, "target": "yes", "resps": f" {said}", "filtered_resps": said, "input": "is it even?",
        "input_media": [f"{number}.png"], "pope_accuracy": each, "pope_precision": each, "acc": right,
    }  # fmt: skip


def write(folder: Path, results: dict[str, Any], samples: dict[str, list[dict[str, Any]]]) -> Path:
    own = folder / "results/model"
    own.mkdir(parents=True)
    counts = {task: {"original": 9, "effective": 4} for task in results}
    (own / "20261127_092344_results.json").write_text(json.dumps({"results": results, "n-samples": counts}))
    for task, lines in samples.items():
        text = "".join(json.dumps(line) + "\n" for line in reversed(lines))
        (own / f"20261127_092344_samples_{task}.jsonl").write_text(text)
    return folder / "results"


def read(folder: Path, scores: dict[str, Any], samples: list[dict[str, Any]] | None = None) -> TaskScores:
    lines = [sample(number, right) for number, right in enumerate(RIGHT)] if samples is None else samples
    return read_results(write(folder, {"pope": scores}, {"pope": lines} if lines else {}), ["pope"])["pope"]


def test_a_mean_over_questions_has_a_bootstrap_interval_and_another_score_has_none(tmp_path: Path) -> None:
    described = read(tmp_path, SCORES).described
    assert described["scores"] == {"pope_accuracy": 0.75, "pope_precision": 0.6}
    assert described["intervals"].keys() == {"pope_accuracy"}, "precision is no mean over questions"
    low, high = described["intervals"]["pope_accuracy"]
    assert 0.0 <= low < 0.75 < high <= 1.0
    assert (described["format"], described["questions"], described["compared"]) == ("lmms-eval", 4, "pope_accuracy")


def test_the_answers_are_those_of_the_compared_score_in_the_order_of_the_questions(tmp_path: Path) -> None:
    answers = read(tmp_path, SCORES).answers
    assert [(line["id"], line["score"]) for line in answers] == [(str(n), right) for n, right in enumerate(RIGHT)]
    assert answers[0] | {"id": "0"} == {
        "id": "0", "slice": "", "question": "is it even?", "answers": ["yes"], "image": "0", "prediction": "yes",
        "score": 1.0,
    }  # fmt: skip


def test_lmms_evals_own_standard_error_makes_an_interval(tmp_path: Path) -> None:
    described = read(tmp_path, {"score,none": 40.0, "score_stderr,none": 2.0, "score,other": 7.0}).described
    assert described["scores"] == {"score": 40.0, "score,other": 7.0}
    assert described["intervals"] == {"score": (pytest.approx(36.08), pytest.approx(43.92))}


def test_numbers_of_questions_without_a_filter_are_read_as_they_are(tmp_path: Path) -> None:
    assert read(tmp_path, {"acc,none": 0.75}).described["compared"] == "acc"


def test_a_group_of_tasks_has_scores_and_no_answers(tmp_path: Path) -> None:
    found = read(tmp_path, {"acc,none": 0.5}, samples=[])
    assert found.answers == []
    assert (found.described["questions"], found.described["compared"], found.described["intervals"]) == (4, "", {})


def test_other_questions_have_another_digest(tmp_path: Path) -> None:
    one = read(tmp_path / "one", SCORES).described["questions_sha256"]
    assert read(tmp_path / "same", SCORES).described["questions_sha256"] == one
    others = [sample(number, right) | {"input": "is it odd?"} for number, right in enumerate(RIGHT)]
    assert read(tmp_path / "other", SCORES, others).described["questions_sha256"] != one


def test_a_question_whose_request_failed_is_no_wrong_answer(tmp_path: Path) -> None:
    failed = [sample(0, 1.0), sample(1, 0.0, said="[LMMS_EVAL_REQUEST_FAILED after 5 retries] timed out")]
    with pytest.raises(UserError, match="1 of 2 questions of task pope were not answered"):
        read(tmp_path, SCORES, failed)


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ({"mmmu": SCORES}, "lmms-eval has no score of task pope"),
        ({"pope": {"alias": "pope", "pope_accuracy,none": float("nan")}}, "lmms-eval has no score of task pope"),
        (None, "lmms-eval wrote no results"),
    ],
)
def test_a_task_without_scores_is_an_error(tmp_path: Path, results: dict[str, Any] | None, said: str) -> None:
    folder = write(tmp_path, results, {}) if results else tmp_path
    with pytest.raises(UserError, match=said) as caught:
        read_results(folder, ["pope"])
    assert caught.value.code == 1
