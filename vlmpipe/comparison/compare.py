"""Scores of runs on the questions that all of them were asked, with the paired bootstrap, and where they disagree.

Each run is compared with the first. Intervals are of 95 %, by 2,000 resamples in which the questions about the same
images are drawn together, and the same ones for all runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from vlmpipe.comparison.by_field import FieldDifference, field_differences
from vlmpipe.comparison.settings import SettingsRow, settings_rows
from vlmpipe.comparison.sides import Side
from vlmpipe.trainer.config.benchmarks import SCORES
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.records.evaluation import BenchmarkScores

if TYPE_CHECKING:
    from vlmpipe.trainer.evaluation.significance.bootstrap import Float64Array

Key = tuple[str, int, str, str]  # id of the sample, turn, question, expected answer
SEEDS = (
    "trainings of the same settings differ too, by their seeds: only a sweep with several starts tells recipes apart"
)
METRICS = ("exact_match", "vqa_accuracy", "anls")
Verdict = Literal["", "better", "worse", "no difference shown", "too few images"]


@dataclass(frozen=True)
class Measured:
    """A score of one run, and its difference from the first run's; None for the first run itself.

    difference_interval: None of one image, too.
    verdict: whether the difference is beyond chance; empty for the first run.
    """

    run: str
    value: float
    interval: tuple[float, float]
    difference: float | None = None
    difference_interval: tuple[float, float] | None = None
    verdict: Verdict = ""


@dataclass(frozen=True)
class ScoreRow:
    """One score of all runs. `slice` is empty for all questions; of a benchmark it is the benchmark's name.

    images: distinct ones, or sets of images, that the questions are about; a question without image counts as one.
    baseline: exact match of the majority baseline, by the first run's training data; None of other scores, and where
        that run was asked other questions too.
    """

    slice: str
    metric: str
    questions: int
    images: int
    runs: tuple[Measured, ...]
    baseline: float | None = None


@dataclass(frozen=True)
class Agreement:
    """How often a run and the first one were right on the same question."""

    run: str
    both_right: int
    only_first: int
    only_this: int
    both_wrong: int


@dataclass(frozen=True)
class Disagreement:
    """A question that some runs answered right and others wrong, with their answers in the order of runs."""

    id: str
    turn: int
    slice: str
    question: str
    answer: str
    predictions: tuple[str, ...]
    correct: tuple[bool, ...]


@dataclass(frozen=True)
class Comparison:
    """Comparison of two or more runs."""

    sides: tuple[Side, ...]
    settings: tuple[SettingsRow, ...]
    questions: int  # that all runs were asked
    scores: tuple[ScoreRow, ...]
    benchmarks: tuple[ScoreRow, ...]
    agreement: tuple[Agreement, ...]
    by_field: tuple[FieldDifference, ...]
    disagreements: tuple[Disagreement, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return {
            "runs": [
                {
                    "name": side.name,
                    "run_id": side.run_id,
                    "run_uri": side.run_uri,
                    "questions": len(side.predictions),
                    "start": side.evaluation.start.model_dump(mode="json") if side.evaluation.start else None,
                    **asdict(side.usage),
                }
                for side in self.sides
            ],
            "settings": [asdict(line) for line in self.settings],
            "questions": self.questions,
            "scores": [_row_json(line) for line in self.scores],
            "benchmarks": [_row_json(line) for line in self.benchmarks],
            "agreement": [asdict(agreement) for agreement in self.agreement],
            "by_field": [asdict(line) for line in self.by_field],
            "disagreements": [asdict(disagreement) for disagreement in self.disagreements],
            "notes": self.notes,
        }


def _row_json(row: ScoreRow) -> dict[str, object]:
    return {**asdict(row), "runs": [{**asdict(run), "verdict": run.verdict or None} for run in row.runs]}


def compare(sides: Sequence[Side]) -> Comparison:
    """Compare runs with the first. Raises DataError where they share no question."""
    answers = [{_key(line): line for line in side.predictions} for side in sides]
    shared = sorted(set(answers[0]).intersection(*answers[1:]))
    if not shared:
        counts = ", ".join(f"{side.name} {len(side.predictions):,}" for side in sides)
        raise DataError(
            f"the runs share no question: {counts}, of which none is in all with the same expected answer",
            expected="runs that were evaluated on the same data, or on data that has grown",
            fix="compare runs of the same data.source, data.validation_fraction and evaluate.max_samples",
        )
    lines = [[answer[key] for key in shared] for answer in answers]
    slices = [str(line["slice"]) for line in lines[0]]
    names = tuple(side.name for side in sides)
    tallies = [_scores(key[3], [of_run[number] for of_run in lines]) for number, key in enumerate(shared)]
    groups = [sides[0].image_groups.get(key[0], key[0]) for key in shared]
    rows = _rows(names, METRICS, groups, tallies, slices)
    rows = [replace(row, baseline=_baseline(sides[0], row)) for row in rows]
    benchmarks, notes = _benchmarks(sides)
    if not sides[0].image_groups:
        notes.append(f"which questions of {names[0]} share images is not known: samples are drawn in their place")
    elif rows[0].images < len(shared):
        notes.append(f"the {len(shared):,} questions are about {rows[0].images:,} images, which are what chance draws")
    if left := max(len(answer) for answer in answers) - len(shared):
        notes.insert(0, f"{left:,} questions that not all runs were asked are left out")
    by_field = field_differences(names, lines, groups)
    notes += [*by_field.notes, SEEDS]
    right = [tuple(bool(of_run[number]["correct"]) for of_run in lines) for number in range(len(shared))]
    disagreements = [
        Disagreement(
            *key[:2], slices[number], *key[2:], tuple(of_run[number]["prediction"] for of_run in lines), right[number]
        )
        for number, key in enumerate(shared)
        if len(set(right[number])) > 1
    ]
    return Comparison(
        tuple(sides),
        settings_rows(sides),
        len(shared),
        tuple(rows),
        tuple(benchmarks),
        tuple(
            _agreement(name, [(answers[0], answers[place]) for answers in right])
            for place, name in enumerate(names)
            if place
        ),
        by_field.rows,
        tuple(disagreements),
        tuple(notes),
    )


def _baseline(first: Side, row: ScoreRow) -> float | None:
    of_row = first.evaluation.slices.get(row.slice) if row.slice else first.evaluation
    if row.metric != "exact_match" or of_row is None or of_row.questions != row.questions:
        return None
    return of_row.chance


def _key(line: dict[str, Any]) -> Key:
    return str(line["id"]), int(line["turn"]), str(line["question"]), str(line["answer"])


def _scores(answer: str, lines: Sequence[dict[str, Any]]) -> list[float]:
    """METRICS of each run's answer to one question."""
    from vlmpipe.trainer.evaluation.metrics import anls, vqa_accuracy

    metrics: tuple[Callable[[str, str], float], ...] = (vqa_accuracy, anls)
    scores = []
    for line in lines:
        scores += [float(line["correct"]), *(metric(answer, str(line["prediction"])) for metric in metrics)]
    return scores


def _rows(
    names: Sequence[str],
    metrics: Sequence[str],
    groups: Sequence[str],
    tallies: Sequence[Sequence[float]],
    slices: Sequence[str],
) -> list[ScoreRow]:
    """All questions, then each slice where there are several. tallies: (questions, runs x metrics)."""
    import numpy as np

    values, of_slice = np.asarray(tallies, np.float64), np.array(slices)
    subsets = [("", np.full(len(values), True))]
    if len(distinct := sorted(set(slices))) > 1:
        subsets += [(name, of_slice == name) for name in distinct]
    rows = []
    for name, mask in subsets:
        drawn = [group for group, is_in in zip(groups, mask, strict=True) if is_in]
        measured, images = _measured(names, len(metrics), drawn, values[mask]), len(set(drawn))
        rows += [
            ScoreRow(name, metric, len(drawn), images, runs) for metric, runs in zip(metrics, measured, strict=True)
        ]
    return rows


def _measured(
    names: Sequence[str], metrics: int, groups: Sequence[str], values: Float64Array
) -> list[tuple[Measured, ...]]:
    """The runs' means of each metric, with the bootstrap's intervals."""
    import numpy as np

    from vlmpipe.trainer.evaluation.significance.bootstrap import difference_interval, interval, resampled_sums

    count = len(set(groups))
    sums = resampled_sums(groups, np.column_stack([values, np.ones(len(values))]))
    means, resampled = values.mean(axis=0), sums[:, :-1] / sums[:, -1:]
    measured = []
    for metric in range(metrics):
        runs = [Measured(names[0], float(means[metric]), interval(resampled[:, metric], count))]
        for place in range(1, len(names)):
            column = place * metrics + metric
            difference = float(means[column] - means[metric])
            between = difference_interval(difference, resampled[:, column] - resampled[:, metric], count)
            measured_interval = interval(resampled[:, column], count)
            runs.append(
                Measured(
                    names[place], float(means[column]), measured_interval, difference, between, _verdict(between, count)
                )
            )
        measured.append(tuple(runs))
    return measured


def _verdict(between: tuple[float, float] | None, images: int) -> Verdict:
    from vlmpipe.trainer.evaluation.significance.bootstrap import MIN_GROUPS

    if between is None or images < MIN_GROUPS:
        return "too few images"
    low, high = between
    return "better" if low > 0 else "worse" if high < 0 else "no difference shown"


def _benchmarks(sides: Sequence[Side]) -> tuple[list[ScoreRow], list[str]]:
    """The first score of each benchmark that all runs have answered with equal questions, and the scores left out."""
    rows, notes = [], list[str]()
    of_each = [side.evaluation.benchmarks for side in sides]
    for name in dict.fromkeys(name for scores in of_each for name in scores):
        described = [scores.get(name) or BenchmarkScores() for scores in of_each]
        if len({entry.questions_sha256 for entry in described}) > 1:
            notes.append(f"benchmark {name} is left out: not all runs were asked the same questions")
            continue
        metric = described[0].compared
        if metric is None:
            metric = next((scores[0] for form, scores in SCORES.items() if form == described[0].format), "")
        if not metric:
            notes.append(f"benchmark {name} is left out: none of its scores is a mean over questions")
            continue
        answers = [side.benchmark(name) for side in sides]
        lines = [line for line in zip(*answers, strict=True) if line[0]["score"] is not None]  # that the score counts
        groups = [first["image"] for first, *_ in lines]
        tallies = [[line["score"] for line in of_runs] for of_runs in lines]
        whole, *_ = _rows([side.name for side in sides], (metric,), groups, tallies, [""] * len(groups))
        rows.append(replace(whole, slice=name))
    return rows, notes


def _agreement(name: str, pairs: Sequence[tuple[bool, bool]]) -> Agreement:
    counts = Counter(pairs)
    return Agreement(name, counts[True, True], counts[True, False], counts[False, True], counts[False, False])
