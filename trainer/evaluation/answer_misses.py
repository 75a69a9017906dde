"""Exact match of answers from the forward passes of a validation.

Greedy decoding gives a reference answer token by token exactly where each of its tokens is the most probable one after
the tokens before it. So one forward pass over the references says which of them generating would give, whatever the
strategy, without generating.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class AnswerMisses:
    """Label tokens of each answer, and those that greedy decoding would not choose, of this rank.

    Ranks that hold one model replica may each add all of its labels, or a part of an answer's.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(2, 0, dtype=torch.int64, device=device)

    def begin(self, max_answers: int) -> None:
        """Begin a validation of answers with indexes below `max_answers`."""
        self._counts = self._counts.new_zeros(2, max_answers)

    def add(self, misses: Tensor, answers: Tensor) -> None:
        """misses: (labels,), whether the label is not the most probable token; answers: (labels,), their indexes. The
        host waits for nothing."""
        of_labels = misses.to(torch.int64)
        self._counts.index_add_(1, answers, torch.stack([torch.ones_like(of_labels), of_labels]))

    def exact_match(self) -> float:
        """Share of the answers of which no label is missed. Collective."""
        dist.all_reduce(self._counts)
        labels, missed = self._counts
        answered = labels > 0
        return float((answered & (missed == 0)).sum() / answered.sum())
