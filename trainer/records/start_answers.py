"""Answers of the weights that runs start from, which later runs with the same weights, data and settings reuse."""

from __future__ import annotations

from typing import ClassVar

from vlmpipe.trainer.records.record import Record


class StartAnswers(Record):
    """Answers in the order of the questions, whose digest is in the name of the folder.

    weights: what changes with the start weights, by the field that names them (`weights_identity`). asked_s: seconds
    that loading and asking took.
    """

    FILE: ClassVar[str] = "answers.json"
    STEP: ClassVar[str] = "evaluate"
    INDENT: ClassVar[int | None] = None

    weights: dict[str, str]
    answers: tuple[str, ...]
    probe: tuple[str, ...] = ()
    asked_s: float = 0.0

    def differences(self, weights: dict[str, str]) -> list[str]:
        """Return in words which of the start weights have changed."""
        names = sorted(self.weights.keys() | weights.keys())
        return [
            f"model.{name} was at {self.weights.get(name, 'no place')} and is at {weights.get(name, 'no place')}"
            for name in names
            if self.weights.get(name) != weights.get(name)
        ]
