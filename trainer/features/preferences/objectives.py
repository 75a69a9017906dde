"""Losses over pairs in packed sequences: direct preference optimization (DPO; Rafailov et al. 2023, arXiv 2305.18290)
and, without a reference, simple preference optimization (SimPO; Meng et al. 2024, arXiv 2405.14734)."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn import functional as F

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.models.loss.pairs import PairLoss, PreferencePairs, answer_tokens, log_probabilities


def pair_loss_of(train: TrainConfig) -> PairLoss | None:
    """Return the loss over preference pairs, or None for an objective without pairs."""
    if train.objective == "simpo":
        return partial(simpo_loss, beta=train.simpo_beta, gamma=train.simpo_gamma)
    return partial(dpo_loss, beta=train.dpo_beta) if train.objective == "dpo" else None


def dpo_loss(token_losses: Tensor, pairs: PreferencePairs, beta: float) -> Tensor:
    """-log sigmoid(beta * (reward of the chosen answer - that of the rejected one)) of each pair. A reward is the log
    probability beyond the reference's."""
    assert pairs.references is not None
    rewards = (log_probabilities(token_losses, pairs) - pairs.references).view(-1, 2)
    return -F.logsigmoid(beta * (rewards[:, 0] - rewards[:, 1]))


def simpo_loss(token_losses: Tensor, pairs: PreferencePairs, beta: float, gamma: float) -> Tensor:
    """-log sigmoid(reward of the chosen answer - that of the rejected one - gamma) of each pair. A reward is beta
    times the mean log probability of the answer's tokens: equation 6 of the paper."""
    rewards = beta * log_probabilities(token_losses, pairs) / answer_tokens(pairs).clamp(min=1)
    rewards = rewards.view(-1, 2)
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - gamma)
