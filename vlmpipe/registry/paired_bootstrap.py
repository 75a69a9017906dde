"""Paired bootstrap over the questions that two models both answered.

A sample's split follows from its id, so a question that both were asked was held out from both, also when the data has
grown between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_lines

PREDICTIONS = "predictions.jsonl"
LEAST_SHARE = 0.5  # of the champion's questions: fewer are no fair comparison

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
    from vlmpipe.trainer.evaluation.bootstrap import (  # the gate's settings are read without numpy
        interval,
        resampled_sums,
    )

    ordered = sorted(differences.items())
    sums = resampled_sums([key[0] for key, _ in ordered], [(difference, 1) for _, difference in ordered])
    return interval(sums[:, 0] / sums[:, 1])


def _right(store: Storage) -> dict[Key, bool]:
    """Each question with its expected answer, and whether it was answered right."""
    if store.stat(PREDICTIONS) is None:
        return {}
    predictions = read_lines(store, PREDICTIONS)
    return {(one["id"], one["turn"], one["question"], one["answer"]): bool(one["correct"]) for one in predictions}
