"""Answers that two runs have recorded to the same questions.

A sample's split follows from its id, so a question that both were asked was held out from both, also when the data has
grown between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.evaluation.metrics import image_group
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts, paired_counts
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_lines

PREDICTIONS = "predictions.jsonl"
MIN_SHARE = 0.5  # of the champion's questions: fewer are no fair comparison

Key = tuple[str, int, str, str]  # id of the sample, turn, question, answer


def recorded_answers(run: Storage, champion: Storage) -> PairedCounts | None:
    """Compare the predictions of two runs. None where either has left none, or too few questions are the same.

    Questions about the same images are not independent. Raises UserError where which these are cannot be read.
    """
    lines = _lines(run)
    ours, other = _right(lines), _right(_lines(champion))
    both = sorted(ours.keys() & other.keys())
    if not both or len(both) < MIN_SHARE * len(other):
        return None
    groups = image_groups(run, lines)
    return paired_counts([groups[key[0]] for key in both], [ours[key] for key in both], [other[key] for key in both])


def image_groups(run: Storage, predictions: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """Return the name of each sample's images (`trainer.evaluation.metrics.image_group`), by sample id.

    Names that another program has not recorded with its answers are computed from the run's prepared data. Raises
    UserError if that cannot be read.
    """
    groups = {
        str(prediction["id"]): str(prediction["image_group"])
        for prediction in predictions
        if prediction.get("image_group")
    }
    if missing := {str(prediction["id"]) for prediction in predictions} - groups.keys():
        # It imports Arrow, which runs that recorded the names need for nothing else.
        from vlmpipe.trainer.data.shards.index import Index

        split = Index.load(DataPointers.read(run).prepared_uri).split("eval")
        for identity in missing:
            sample = split.number(identity)
            groups[identity] = identity if sample is None else image_group(identity, split.image_sha256(sample))
    return groups


def known_image_groups(run: Storage, predictions: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """Return `image_groups`, or nothing if they cannot be read: another program answered, and the data is gone."""
    try:
        return image_groups(run, predictions)
    except UserError:
        return {}


def _lines(store: Storage) -> list[dict[str, object]]:
    return [] if store.stat(PREDICTIONS) is None else read_lines(store, PREDICTIONS)


def _right(predictions: Sequence[Mapping[str, Any]]) -> dict[Key, bool]:
    """Each question with its expected answer, and whether it was answered right."""
    return {
        (prediction["id"], prediction["turn"], prediction["question"], prediction["answer"]): bool(
            prediction["correct"]
        )
        for prediction in predictions
    }
