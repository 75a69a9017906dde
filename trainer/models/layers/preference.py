"""Direct preference optimization (DPO; Rafailov et al. 2023, arXiv 2305.18290) over pairs in packed sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)
class PreferencePairs:
    """The pairs of one forward pass: chosen and rejected conversation in turn. No tuple, and its numbers are no
    arguments: module wrappers would round those to bf16."""

    label_sequences: Tensor  # (labels,) the conversation of each label token
    count: int  # of conversations: twice the pairs
    references: Tensor | None  # (count,) log probabilities under the reference, fp32; None: these are asked for

    def to(self, device: torch.device, *, non_blocking: bool = False) -> PreferencePairs:
        moved = None if self.references is None else self.references.to(device, non_blocking=non_blocking)
        return replace(
            self, label_sequences=self.label_sequences.to(device, non_blocking=non_blocking), references=moved
        )

    def pin_memory(self) -> PreferencePairs:
        pinned = None if self.references is None else self.references.pin_memory()
        return replace(self, label_sequences=self.label_sequences.pin_memory(), references=pinned)


def log_probabilities(token_losses: Tensor, pairs: PreferencePairs) -> Tensor:
    """Of the labelled answer of each conversation: (labels,) losses -> (count,)"""
    return token_losses.new_zeros(pairs.count).index_add(0, pairs.label_sequences, -token_losses)


def dpo_loss(token_losses: Tensor, pairs: PreferencePairs, beta: float) -> Tensor:
    """-log sigmoid(beta * (reward of the chosen answer - that of the rejected one)), summed over pairs. A reward is the
    log probability beyond the reference's."""
    assert pairs.references is not None
    rewards = (log_probabilities(token_losses, pairs) - pairs.references).view(-1, 2)
    return -F.logsigmoid(beta * (rewards[:, 0] - rewards[:, 1])).sum()
