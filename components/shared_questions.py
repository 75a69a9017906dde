"""What two models answered to the same held-out questions, when the data has grown between them.

A sample's split follows from its id, so a question that both were asked was held out from both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from trainer.storage import Storage

PREDICTIONS = "predictions.jsonl"
LEAST_SHARE = 0.5  # of the champion's questions: on fewer, its record says little about the model that it is

Key = tuple[str, int, str, str]


@dataclass(frozen=True)
class SharedQuestions:
    """Exact match of both on the questions that both were asked."""

    questions: int
    exact_match: float
    champion: float


def shared_questions(run: Storage, champion: Storage) -> SharedQuestions | None:
    """Compare the predictions of two runs. None where either has left none, or too few questions are the same."""
    own, other = _right(run), _right(champion)
    both = own.keys() & other.keys()
    if not both or len(both) < LEAST_SHARE * len(other):
        return None
    count = len(both)
    return SharedQuestions(count, sum(own[key] for key in both) / count, sum(other[key] for key in both) / count)


def _right(store: Storage) -> dict[Key, bool]:
    """Each question with its expected answer, and whether it was answered right."""
    if store.stat(PREDICTIONS) is None:
        return {}
    lines = [json.loads(line) for line in store.read(PREDICTIONS).decode().splitlines()]
    return {(one["id"], one["turn"], one["question"], one["answer"]): bool(one["correct"]) for one in lines}
