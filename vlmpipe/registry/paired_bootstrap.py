"""Paired bootstrap over the questions that two models both answered.

A sample's split follows from its id, so a question that both were asked was held out from both, also when the data has
grown between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.storage.base import Storage
from trainer.storage.records import read_lines

PREDICTIONS = "predictions.jsonl"
LEAST_SHARE = 0.5  # of the champion's questions: fewer are no fair comparison

RESAMPLES, SEED = 2000, 0
CONFIDENCE = 0.95

Key = tuple[str, int, str, str]  # id of the sample, turn, question, answer


@dataclass(frozen=True)
class PairedAnswers:
    """Exact match of both on the questions that both were asked.

    interval: of the difference exact_match - champion, see `paired_bootstrap`.
    """

    questions: int
    exact_match: float
    champion: float
    interval: tuple[float, float]


def shared_questions(run: Storage, champion: Storage) -> PairedAnswers | None:
    """Compare the predictions of two runs. None where either has left none, or too few questions are the same."""
    own, other = _right(run), _right(champion)
    both = own.keys() & other.keys()
    if not both or len(both) < LEAST_SHARE * len(other):
        return None
    count = len(both)
    scores = [sum(each[key] for key in both) / count for each in (own, other)]
    return PairedAnswers(count, scores[0], scores[1], paired_bootstrap({key: own[key] - other[key] for key in both}))


def paired_bootstrap(differences: Mapping[Key, int]) -> tuple[float, float]:
    """Where 95 % of the mean differences lie if the samples are drawn again, with replacement: the paired bootstrap
    (Koehn 2004, Statistical significance tests for machine translation evaluation), percentiles.

    Questions about one sample are drawn together, since a model that misreads an image misses several of them at once.
    The same draws each time.
    """
    of_samples: dict[str, list[int]] = {}
    for (sample, *_), difference in sorted(differences.items()):
        of_samples.setdefault(sample, []).append(difference)
    import numpy as np  # the gate's settings are read by commands that compute nothing

    sums, counts = (np.array([measure(each) for each in of_samples.values()]) for measure in (sum, len))
    draws = np.random.default_rng(SEED)
    means = []
    for _ in range(RESAMPLES):
        drawn = draws.integers(0, len(sums), len(sums))
        means.append(sums[drawn].sum() / counts[drawn].sum())
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def _right(store: Storage) -> dict[Key, bool]:
    """Each question with its expected answer, and whether it was answered right."""
    if store.stat(PREDICTIONS) is None:
        return {}
    predictions = read_lines(store, PREDICTIONS)
    return {(one["id"], one["turn"], one["question"], one["answer"]): bool(one["correct"]) for one in predictions}
