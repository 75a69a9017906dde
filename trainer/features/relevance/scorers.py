"""Scores of an image's visual tokens, each in [0, 1] within the image.

No score depends on other images: a batch is a list of images, scored one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vlmpipe.trainer.config.arr_coc.channels import CHANNELS
from vlmpipe.trainer.config.arr_coc.relevance import RelevanceConfig

OF_TEXTURE = {"propositional": "entropy", "perspectival": "sobel_magnitude"}  # scorer -> its channel
FLAT = 1e-6  # scores that differ by less are equal


class Scorers(nn.Module):
    """The scorers of a run, in its order."""

    def __init__(self, config: RelevanceConfig, question_width: int) -> None:
        super().__init__()
        self.names = config.scorers
        self.participatory = Participatory(config, question_width) if "participatory" in config.scorers else None

    def forward(self, textures: Tensor, question: Tensor) -> Tensor:
        """(scorers, tokens) in fp32. textures: (tokens, channels); question: (width,)."""
        scores = [
            self.participatory(textures, question)
            if name == "participatory" and self.participatory
            else normalised(textures[:, CHANNELS.index(OF_TEXTURE[name])])
            for name in self.names
        ]
        return torch.stack(scores) if scores else textures.new_zeros(0, len(textures))


class Participatory(nn.Module):
    """Likeness of a token's texture and the question: cosine of both, projected."""

    def __init__(self, config: RelevanceConfig, question_width: int) -> None:
        super().__init__()
        self.register_buffer(
            "channels", torch.tensor([CHANNELS.index(name) for name in config.channel_names]), persistent=False
        )
        count = len(config.channel_names)
        self.texture = nn.Sequential(nn.Linear(count, config.width), nn.GELU(), nn.Linear(config.width, config.width))
        self.question = nn.Linear(question_width, config.width, bias=False)

    def forward(self, textures: Tensor, question: Tensor) -> Tensor:
        """(tokens,) in [0, 1]"""
        projected = self.texture(textures.index_select(1, self.channels))
        likeness: Tensor = F.cosine_similarity(projected, self.question(question)[None], dim=-1)
        return (likeness + 1) / 2


def normalised(scores: Tensor) -> Tensor:
    """(tokens,) from 0 to 1 within the image; 0.5 where all are equal."""
    if not len(scores):
        return scores
    low, high = scores.min(), scores.max()
    spread = high - low
    return torch.where(spread > FLAT, (scores - low) / spread.clamp(min=FLAT), torch.full_like(scores, 0.5))
