"""Results of a sweep's trainings: scores, selections and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vlmpipe.registry.recorded_answers import PREDICTIONS, known_image_groups
from vlmpipe.report.load import number
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.evaluation.metrics import anls, vqa_accuracy
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.step import read_step
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.records.sweep import JOB_STEP, Outcome, Sweep, SweepTraining
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_lines

Key = tuple[str, int, str, str]  # id of the sample, turn, question, expected answer
HOUR_S = 3600
SIMILARITIES: dict[str, Callable[[str, str], float]] = {"vqa_accuracy": vqa_accuracy, "anls": anls}


@dataclass(frozen=True)
class Training:
    """One training of a variant. `error` is empty for one that is done; `scores` are then those of its answers.

    is_skipped: it was left out of a learning curve, and `error` says why.
    """

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
    is_skipped: bool = False

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
    """A sweep, its trainings, and the seconds that its jobs took together."""

    sweep: Sweep
    trainings: list[Training]
    job_s: float


def read_results(run_uri: str) -> SweepResults:
    """Read what the sweep in that run's folder has left so far. A training that has not ended counts as failed."""
    store = open_storage(run_uri)
    sweep = Sweep.read(store)
    trainings = [_training(training, sweep.metric) for training in sweep.trainings]
    return SweepResults(sweep, trainings, sum(_job_s(store, job) for job in range(len(sweep.jobs))))


def _job_s(store: Storage, job: int) -> float:
    record = read_step(store, f"{JOB_STEP}-{job}")
    return max(0.0, record.ended_s - record.started_s) if record else 0.0


def _training(training: SweepTraining, metric: str) -> Training:
    store, known = open_storage(training.run_uri), (training.variant, training.start, training.run_uri)
    outcome = Outcome.read_if_there(store)
    if outcome is None:
        return Training(*known, error="it has not ended")
    if outcome.state == "skipped":
        return Training(*known, error=outcome.error, is_skipped=True)
    if outcome.state != "done":
        return Training(*known, error=outcome.error or "it failed")
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
        train_s=outcome.train_s,
        evaluate_s=outcome.evaluate_s,
        processes=summary.world_size or 1,
    )


def _key(line: Mapping[str, object]) -> Key:
    return str(line["id"]), int(str(line["turn"])), str(line["question"]), str(line["answer"])


def _score(line: Mapping[str, object], metric: str) -> float:
    if metric in SIMILARITIES:
        return SIMILARITIES[metric](str(line["answer"]), str(line["prediction"]))
    correct = line["correct"]
    assert isinstance(correct, int | float)
    return float(correct)
