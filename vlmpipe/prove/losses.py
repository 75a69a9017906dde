"""Losses of samples by their labels, their means, and the equality of two losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# What a trainer may label, the right one first.
SPANS = "the answers with their end marks"
LABELLINGS = (
    SPANS,
    "the answers, their end marks and the line end after each",
    "the answers without their end marks",
    "the last answer only",
    "all tokens but those of images",
)
RELATIVE = 2e-5  # fp32 sums in another order, and a few steps with them


@dataclass(frozen=True)
class SampleLoss:
    """Summed loss of a sample's labelled tokens, and their number."""

    total: float
    tokens: int


def token_mean(losses: Sequence[SampleLoss]) -> float:
    """Mean over all labelled tokens."""
    return sum(loss.total for loss in losses) / sum(loss.tokens for loss in losses)


def sample_mean(losses: Sequence[SampleLoss]) -> float:
    """Mean of the samples' means."""
    return sum(loss.total / loss.tokens for loss in losses) / len(losses)


def is_close(losses: Mapping[int, float], expected: Mapping[int, float]) -> bool:
    """Return whether both have the same steps and losses, as exactly as `found` was logged."""
    return losses.keys() == expected.keys() and all(
        abs(loss - expected[step])
        <= max(RELATIVE * abs(expected[step]), _resolution(loss), _resolution(expected[step]))
        for step, loss in losses.items()
    )


def difference(losses: Mapping[int, float], expected: Mapping[int, float]) -> float:
    """The largest one, infinite where steps are missing."""
    if losses.keys() != expected.keys():
        return math.inf
    return max(abs(loss - expected[step]) for step, loss in losses.items())


def _resolution(loss: float) -> float:
    """transformers' Trainer logs four digits after the point."""
    return 1e-4 if round(loss, 4) == loss else 0.0
