"""Answers that two runs have recorded to the same questions.

A sample's split follows from its id, so a question that both were asked was held out from both, also when the data has
grown between them.
"""

from __future__ import annotations

from vlmpipe.trainer.config.job import DataPointers
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts, paired_counts
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_lines, read_record

PREDICTIONS = "predictions.jsonl"
MIN_SHARE = 0.5  # of the champion's questions: fewer are no fair comparison

Key = tuple[str, int, str, str]  # id of the sample, turn, question, answer


def recorded_answers(run: Storage, champion: Storage) -> PairedCounts | None:
    """Compare the predictions of two runs. None where either has left none, or too few questions are the same.

    Questions about the same images, by the run's prepared data, are not independent. Raises UserError where that cannot
    be read.
    """
    own, other = _right(run), _right(champion)
    both = sorted(own.keys() & other.keys())
    if not both or len(both) < MIN_SHARE * len(other):
        return None
    images = _images(run)
    return paired_counts(
        [images.get(key[0], key[0]) for key in both], [own[key] for key in both], [other[key] for key in both]
    )


def _images(run: Storage) -> dict[str, tuple[str, ...] | str]:
    """Of each validation sample its images, or its id if it has none."""
    pointers = DataPointers.model_validate(read_record(run, "prepared.json"))
    split = Index.load(pointers.prepared_uri).split("eval")
    return {identity: tuple(split.image_sha256(number)) or identity for number, identity in enumerate(split.ids)}


def _right(store: Storage) -> dict[Key, bool]:
    """Each question with its expected answer, and whether it was answered right."""
    if store.stat(PREDICTIONS) is None:
        return {}
    predictions = read_lines(store, PREDICTIONS)
    return {(one["id"], one["turn"], one["question"], one["answer"]): bool(one["correct"]) for one in predictions}
