"""Results of a sweep's trainings: scores, selections and times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vlmpipe.registry.recorded_answers import PREDICTIONS, known_image_groups
from vlmpipe.report.load import number
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.evaluation.metrics import anls, vqa_accuracy
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.step import read_step
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_lines, read_record
from vlmpipe.trainer.trials.files import JOB_STEP, OUTCOME, SWEEP_FILE

Key = tuple[str, int, str, str]  # id of the sample, turn, question, expected answer
HOUR_S = 3600
SIMILARITIES: dict[str, Callable[[str, str], float]] = {"vqa_accuracy": vqa_accuracy, "anls": anls}


@dataclass(frozen=True)
class Training:
    """One training of a variant. `error` is empty for one that is done; `scores` are then those of its answers."""

    variant: str
    start: int
    run_uri: str
    error: str = ""
    scores: dict[Key, float] = field(default_factory=dict)
    image_groups: dict[str, str] = field(default_factory=dict)  # by sample, a name of its images
    evaluation: Evaluation = field(default_factory=Evaluation)
    train_s: float = 0.0
    evaluate_s: float = 0.0
    processes: int = 1  # GPUs, or processes on the CPU

    @property
    def is_done(self) -> bool:
        return not self.error

    def selection(self, name: str) -> float | None:
        """A number of evaluate.json's section relevance; None for a model without selection."""
        return number((self.evaluation.relevance or {}).get(name))

    @property
    def device_hours(self) -> float:
        """Return device-hours of training and evaluation together."""
        return (self.train_s + self.evaluate_s) * self.processes / HOUR_S


@dataclass(frozen=True)
class SweepResults:
    """The content of sweep.json, its trainings, and the seconds that its jobs took together."""

    content: dict[str, Any]
    trainings: list[Training]
    job_s: float


def read_results(run_uri: str) -> SweepResults:
    """Read what the sweep in that run's folder has left so far. A training that has not ended counts as failed."""
    store = open_storage(run_uri)
    content = read_record(store, SWEEP_FILE)
    trainings = [_training(one, content["metric"]) for one in content["trainings"]]
    return SweepResults(content, trainings, sum(_job_s(store, number) for number in range(len(content["jobs"]))))


def _job_s(store: Storage, job: int) -> float:
    record = read_step(store, f"{JOB_STEP}-{job}")
    return max(0.0, record.ended_s - record.started_s) if record else 0.0


def _training(one: dict[str, Any], metric: str) -> Training:
    store, known = open_storage(one["run_uri"]), (one["variant"], one["start"], one["run_uri"])
    if store.stat(OUTCOME) is None:
        return Training(*known, error="it has not ended")
    outcome = read_record(store, OUTCOME)
    if outcome["state"] != "done":
        return Training(*known, error=outcome["error"] or "it failed")
    try:
        evaluation, lines = Evaluation.read(store), read_lines(store, PREDICTIONS)
        summary = Summary.read_if_there(store) or Summary()
    except UserError as error:
        return Training(*known, error=error.found)
    return Training(
        *known,
        scores={_key(line): _score(line, metric) for line in lines},
        image_groups=known_image_groups(store, lines),
        evaluation=evaluation,
        train_s=number(outcome.get("train_s")) or 0.0,
        evaluate_s=number(outcome.get("evaluate_s")) or 0.0,
        processes=summary.world_size or 1,
    )


def _key(line: dict[str, Any]) -> Key:
    return str(line["id"]), int(line["turn"]), str(line["question"]), str(line["answer"])


def _score(line: dict[str, Any], metric: str) -> float:
    if metric in SIMILARITIES:
        return SIMILARITIES[metric](str(line["answer"]), str(line["prediction"]))
    return float(line["correct"])
