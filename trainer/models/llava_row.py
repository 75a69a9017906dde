"""The module that strategies train for the `llava` family: packed rows in, summed token loss out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from trainer.model_config import ModelConfig
from trainer.models.loss import TokenLoss


class LlavaRowModel(nn.Module):
    """Packed rows in, summed token loss out. What strategies wrap."""

    def __init__(self, config: ModelConfig, model: nn.Module, *, cached: bool) -> None:
        super().__init__()
        self.config, self.model, self.token_loss = config, model, TokenLoss()
        self.tower_is_frozen = "tower" in config.freeze
        if cached:
            model.model.vision_tower = None  # its output is read from disk: no weights, no memory
        elif self.tower_is_frozen:
            model.model.vision_tower.eval()

    def train(self, mode: bool = True) -> LlavaRowModel:
        super().train(mode)
        if self.tower_is_frozen and self.model.model.vision_tower is not None:
            self.model.model.vision_tower.eval()
        return self

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        label_index: Tensor,
        label_ids: Tensor,
        images: Tensor,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Summed cross-entropy of the label tokens, a scalar in fp32; hidden states (rows, tokens, hidden) from a stage
        of the model that lacks the head.

        input_ids: (rows, tokens).
        position_ids: (rows, tokens), restarting at 0 for each sample, which keeps packed samples apart.
        label_index: (labels,), positions in the flattened rows whose *next* token is a label.
        label_ids: (labels,), that token.
        images: cached features (images, tokens, tower_hidden), or pixel values (images, 3, side, side). With 0 images
            the projector still runs, so that every rank takes part in every collective.
        hidden: what the stage before gives, for a stage that lacks the embedding.
        """
        if hidden is None:
            hidden = self._from_the_embedding(input_ids, position_ids, images)
        else:
            language_model = self.model.model.language_model
            hidden = language_model(inputs_embeds=hidden, position_ids=position_ids, use_cache=False).last_hidden_state
        if self.model.lm_head is None:
            return hidden
        # Only label positions go through the head: logits of all tokens never exist.
        labelled = hidden.flatten(0, 1).index_select(0, label_index)  # (labels, hidden)
        loss: Tensor = self.token_loss(self.model.lm_head, labelled, label_ids)
        return loss

    def _from_the_embedding(self, input_ids: Tensor, position_ids: Tensor, images: Tensor) -> Tensor:
        base = self.model.model
        features = images if base.vision_tower is None else self._encode(images)  # (images, tokens, tower_hidden)
        weight = base.multi_modal_projector.linear_1.weight
        projected = base.multi_modal_projector(features.to(weight.dtype))  # (images, tokens, hidden)
        # No mask and no cache: with either, transformers no longer keeps packed samples apart by their positions.
        return base(
            input_ids=input_ids,
            position_ids=position_ids,
            mm_encoder_outputs={"image": BaseModelOutputWithPooling(pooler_output=[projected.flatten(0, 1)])},
            use_cache=False,
        ).last_hidden_state  # (rows, tokens, hidden)

    def _encode(self, pixel_values: Tensor) -> Tensor:
        tower, num_images = self.model.model.vision_tower, len(pixel_values)
        if not num_images:
            # A blank image whose features are dropped: towers cannot reshape nothing, and a tower that is trained must
            # take part in its collectives on every rank.
            pixel_values = pixel_values.new_zeros(1, *pixel_values.shape[1:])
        with torch.set_grad_enabled(not self.tower_is_frozen and torch.is_grad_enabled()):
            features = tower_output(self.config, tower, pixel_values)[:num_images]
        return features.to(torch.bfloat16) if self.tower_is_frozen else features


def tower_output(config: ModelConfig, tower: nn.Module, pixel_values: Tensor) -> Tensor:
    """Hidden states that feed the projector: (images, 3, side, side) -> (images, tokens, tower_hidden)."""
    hidden = tower(pixel_values, output_hidden_states=True).hidden_states[config.feature_layer]
    return hidden[:, 1:] if config.feature_select == "drop_cls" else hidden
