"""Scores of validation pairs."""

from __future__ import annotations

import torch


def preference_scores(log_probs: torch.Tensor, references: torch.Tensor | None, beta: float) -> dict[str, float]:
    """Return the DPO scores of validation pairs. An answer's reward is its log probability minus the reference's.

    log_probs, references: (pairs, 2), chosen and rejected. references: None if the training program left none.
    """
    scores = {"preference_accuracy": _share(log_probs[:, 0] > log_probs[:, 1])}
    if references is None:
        return scores
    rewards = log_probs - references
    margins = rewards[:, 0] - rewards[:, 1]
    return {
        **scores,
        "reference_preference_accuracy": _share(references[:, 0] > references[:, 1]),
        "reward_accuracy": _share(margins > 0),
        "dpo_loss": float(-torch.nn.functional.logsigmoid(beta * margins).mean()),
    }


def simpo_scores(log_probs: torch.Tensor, tokens: torch.Tensor, beta: float, gamma: float) -> dict[str, float]:
    """Return the SimPO scores of validation pairs. An answer's reward is its mean log probability per token.

    log_probs, tokens: (pairs, 2), chosen and rejected; tokens of the answers.
    """
    rewards = log_probs / tokens.clamp(min=1)
    margins = rewards[:, 0] - rewards[:, 1]
    return {
        "preference_accuracy": _share(log_probs[:, 0] > log_probs[:, 1]),
        "reward_accuracy": _share(margins > 0),
        "simpo_loss": float(-torch.nn.functional.logsigmoid(beta * margins - gamma).mean()),
    }


def _share(holds: torch.Tensor) -> float:
    return float(holds.double().mean())
