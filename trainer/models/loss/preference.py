"""Losses over pairs in packed sequences: direct preference optimization (DPO; Rafailov et al. 2023, arXiv 2305.18290)
and, without a reference, simple preference optimization (SimPO; Meng et al. 2024, arXiv 2405.14734)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from vlmpipe.trainer.config.train import TrainConfig


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


def pair_loss_of(train: TrainConfig) -> PairLoss | None:
    """Return the loss over preference pairs, or None for an objective without pairs."""
    if train.objective == "simpo":
        return partial(simpo_loss, beta=train.simpo_beta, gamma=train.simpo_gamma)
    return partial(dpo_loss, beta=train.dpo_beta) if train.objective == "dpo" else None


def log_probabilities(token_losses: Tensor, pairs: PreferencePairs) -> Tensor:
    """Return the log probability of each conversation's labelled answer: (labels,) losses -> (count,)."""
    return token_losses.new_zeros(pairs.count).index_add(0, pairs.label_sequences, -token_losses)


def dpo_loss(token_losses: Tensor, pairs: PreferencePairs, beta: float) -> Tensor:
    """-log sigmoid(beta * (reward of the chosen answer - that of the rejected one)) of each pair. A reward is the log
    probability beyond the reference's."""
    assert pairs.references is not None
    rewards = (log_probabilities(token_losses, pairs) - pairs.references).view(-1, 2)
    return -F.logsigmoid(beta * (rewards[:, 0] - rewards[:, 1]))


def answer_tokens(pairs: PreferencePairs) -> Tensor:
    """Labels of each conversation: (count,)"""
    sequences = pairs.label_sequences
    return sequences.new_zeros(pairs.count).index_add(0, sequences, torch.ones_like(sequences))


def simpo_loss(token_losses: Tensor, pairs: PreferencePairs, beta: float, gamma: float) -> Tensor:
    """-log sigmoid(reward of the chosen answer - that of the rejected one - gamma) of each pair. A reward is beta
    times the mean log probability of the answer's tokens: equation 6 of the paper."""
    rewards = beta * log_probabilities(token_losses, pairs) / answer_tokens(pairs).clamp(min=1)
    rewards = rewards.view(-1, 2)
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - gamma)
