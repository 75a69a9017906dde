"""Pairs of a chosen and a rejected answer in packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PreferencePairs:
    """The pairs of one forward pass: chosen and rejected conversation in turn. No tuple, and its numbers are no
    arguments: module wrappers would round those to bf16."""

    label_sequences: Tensor  # (labels,) the conversation of each label token
    count: int  # of conversations: twice the pairs
    # (count,) log probabilities under the reference, fp32, any where there is none; None: these are asked for
    references: Tensor | None

    def to(self, device: torch.device, *, non_blocking: bool = False) -> PreferencePairs:
        moved = None if self.references is None else self.references.to(device, non_blocking=non_blocking)
        return replace(
            self, label_sequences=self.label_sequences.to(device, non_blocking=non_blocking), references=moved
        )

    def pin_memory(self) -> PreferencePairs:
        pinned = None if self.references is None else self.references.pin_memory()
        return replace(self, label_sequences=self.label_sequences.pin_memory(), references=pinned)


PairLoss = Callable[[Tensor, PreferencePairs], Tensor]  # (labels,) losses of tokens -> losses of pairs, (pairs,)


def log_probabilities(token_losses: Tensor, pairs: PreferencePairs) -> Tensor:
    """Return the log probability of each conversation's labelled answer: (labels,) losses -> (count,)."""
    return token_losses.new_zeros(pairs.count).index_add(0, pairs.label_sequences, -token_losses)


def answer_tokens(pairs: PreferencePairs) -> Tensor:
    """Labels of each conversation: (count,)"""
    sequences = pairs.label_sequences
    return sequences.new_zeros(pairs.count).index_add(0, sequences, torch.ones_like(sequences))
