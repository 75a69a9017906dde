"""The half of a training module that all families share: packed sequences in, summed token loss out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.attention.block_mask import block_diagonal_mask
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.varlen import use_varlen_attention
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.models.image_inputs import Grid
from vlmpipe.trainer.models.layers.image_placeholders import require_tokens
from vlmpipe.trainer.models.layers.pipeline_stage import reduce_to_stage, stage_view
from vlmpipe.trainer.models.loss.chunked_loss import TokenLoss, loss_at_labels
from vlmpipe.trainer.models.loss.pairs import PreferencePairs


class PackedVLM(nn.Module):
    """Training module that strategies wrap. Subclasses define `tower`, `tower_is_frozen`, `run_tower`, `project` and
    `embed`.
    """

    def __init__(self, config: ModelConfig, model: nn.Module, language_part: str) -> None:
        super().__init__()
        self.config, self.model, self.language_part, self.token_loss = config, model, language_part, TokenLoss()
        use_varlen_attention(self.language_model)

    @property
    def language_model(self) -> nn.Module:
        return getattr(self.model.model, self.language_part)

    @property
    def runs_frozen_tower(self) -> bool:
        return self.tower_is_frozen and self.tower is not None

    def train(self, mode: bool = True) -> PackedVLM:
        super().train(mode)
        if self.runs_frozen_tower:
            self.tower.eval()
        return self

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        label_index: Tensor,
        label_ids: Tensor,
        images: Tensor,
        image_grids: Sequence[Grid] | None = None,
        hidden: Tensor | None = None,
        samples: CuSeqlens | None = None,
        image_tokens: int | None = None,
        pairs: PreferencePairs | None = None,
        loss_sources: Tensor | None = None,
    ) -> Tensor:
        """Summed cross-entropy of the label tokens, a scalar in fp32. A pipeline stage without the head returns hidden
        states (sequences, tokens, hidden) instead.

        input_ids: (sequences, tokens).
        position_ids: (sequences, tokens), restarting at 0 for each packed sample; families whose images keep their
            aspect ratio take (4, sequences, tokens): these, then the model's own three axes.
        label_index: (labels,), positions in the flattened sequences whose *next* token is a label.
        label_ids: (labels,), that token.
        images: cached features, or pixel values; shapes: see `encode`, and `feature_shape` of the family. The
            projector also runs on 0 images, so that every rank takes part in every collective.
        image_grids: of each image, for patches.
        hidden: output of the previous pipeline stage, for a stage without the embedding.
        samples: bounds of the packed samples, where the host knows them; otherwise positions separate them.
        image_tokens: of all images together. Raises DataError when the images give another number.
        pairs: of the samples; the loss is then that of pairs (see `TokenLoss`).
        loss_sources: index of the source of each label, or of each pair.
        """
        sample_positions = position_ids if position_ids.ndim == 2 else position_ids[0]
        inputs: dict[str, Any] = block_diagonal_mask(self.language_model.config, sample_positions, samples)
        if hidden is None:
            features = images if self.tower is None else self.encode(images, image_grids)
            projected = self.project(features)
            require_tokens(projected.shape[:-1].numel(), image_tokens)
            hidden, levels = self.embed(input_ids, projected)
            inputs = inputs | levels
        hidden = self.language_model(
            inputs_embeds=hidden, position_ids=position_ids, use_cache=False, **inputs
        ).last_hidden_state
        return loss_at_labels(self.token_loss, self.model.lm_head, hidden, label_index, label_ids, pairs, loss_sources)

    def encode(self, images: Tensor, image_grids: Sequence[Grid] | None = None) -> Tensor:
        """Tower features of pixel values, in bf16 when the tower is frozen.

        (images, 3, side, side) -> (images, tokens, tower_hidden), or with grids (patches, numbers) -> (tokens,
        levels x patches of a token x hidden).
        """
        with torch.set_grad_enabled(not self.tower_is_frozen and torch.is_grad_enabled()):
            features = self.run_tower(images, image_grids)
        return features.to(torch.bfloat16) if self.tower_is_frozen else features

    def sharding_units(self, tower_layers: Sequence[nn.Module], *, image_layers: int = 0) -> ShardingUnits:
        return ShardingUnits(
            language_layers=list(self.language_model.layers),
            tower_layers=tower_layers,
            embedding=self.language_model.embed_tokens,
            head=self.model.lm_head,
            loss=self.token_loss,
            reduce_to=functools.partial(reduce_to_stage, self),
            view=functools.partial(stage_view, self),
            image_layers=image_layers,
        )
