"""Answers that two runs have recorded to the same questions.

A sample's split follows from its id, so a question that both were asked was held out from both, also when the data has
grown between them.
"""

from __future__ import annotations

from vlmpipe.trainer.evaluation.significance.paired import PairedCounts, paired_counts
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_lines

PREDICTIONS = "predictions.jsonl"
LEAST_SHARE = 0.5  # of the champion's questions: fewer are no fair comparison

Key = tuple[str, int, str, str]  # id of the sample, turn, question, answer


def recorded_answers(run: Storage, champion: Storage) -> PairedCounts | None:
    """Compare the predictions of two runs. None where either has left none, or too few questions are the same."""
    own, other = _right(run), _right(champion)
    both = sorted(own.keys() & other.keys())
    if not both or len(both) < LEAST_SHARE * len(other):
        return None
    return paired_counts([key[0] for key in both], [own[key] for key in both], [other[key] for key in both])


def _right(store: Storage) -> dict[Key, bool]:
    """Each question with its expected answer, and whether it was answered right."""
    if store.stat(PREDICTIONS) is None:
        return {}
    predictions = read_lines(store, PREDICTIONS)
    return {(one["id"], one["turn"], one["question"], one["answer"]): bool(one["correct"]) for one in predictions}
