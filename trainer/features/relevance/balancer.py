"""Weights of the scorers, and the three tensions of a selection."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.arr_coc.relevance import RelevanceConfig

TENSIONS = ("compress", "exploit", "focus")
HIDDEN = 32
SPAN = 4.0  # a tension of 0 or 1 divides or multiplies a temperature by this; 0.5 leaves it


class Balance(NamedTuple):
    weights: Tensor  # (scorers,), sum 1
    # Each in (0, 1), neutral at 0.5. compress: towards min_tokens, not max_tokens. exploit: less noise in training.
    # focus: a lower temperature of the softmax over relevance.
    compress: Tensor
    exploit: Tensor
    focus: Tensor

    def temperature(self, config: RelevanceConfig) -> Tensor:
        return config.temperature * SPAN ** (1 - 2 * self.focus)

    def noise(self, config: RelevanceConfig) -> Tensor:
        return config.explore * SPAN ** (1 - 2 * self.exploit)


class Balancer(nn.Module):
    """adaptive: an MLP on each scorer's mean, maximum and deviation and on the question, neutral at the start."""

    def __init__(self, config: RelevanceConfig, question_width: int) -> None:
        super().__init__()
        self.num_scorers = len(config.scorers)
        self.layers: nn.Sequential | None = None
        if config.balancer == "adaptive":
            last = nn.Linear(HIDDEN, self.num_scorers + len(TENSIONS))
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            self.layers = nn.Sequential(nn.Linear(3 * self.num_scorers + question_width, HIDDEN), nn.GELU(), last)

    def forward(self, scores: Tensor, question: Tensor) -> Balance:
        """scores: (scorers, tokens); question: (width,)."""
        if self.layers is None:
            neutral = scores.new_full((), 0.5)
            return Balance(
                scores.new_full((self.num_scorers,), 1 / max(1, self.num_scorers)), neutral, neutral, neutral
            )
        seen = scores if scores.shape[1] else scores.new_zeros(self.num_scorers, 1)
        statistics = torch.cat([seen.mean(1), seen.amax(1), seen.std(1, correction=0)])
        weights = self.layers(torch.cat([statistics.detach(), question]))
        tensions = torch.sigmoid(weights[self.num_scorers :])
        return Balance(torch.softmax(weights[: self.num_scorers], 0), *tensions)
