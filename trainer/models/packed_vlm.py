"""The half of a training module that all families share: packed sequences in, summed token loss out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NotRequired, TypedDict, Unpack

import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.attention.block_mask import block_diagonal_mask
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.varlen import use_varlen_attention
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.models.image_inputs import Grid, NamedImages
from vlmpipe.trainer.models.layers.image_placeholders import require_tokens
from vlmpipe.trainer.models.layers.pipeline_stage import reduce_to_stage, stage_view
from vlmpipe.trainer.models.layers.selection_inputs import SelectionInputs
from vlmpipe.trainer.models.loss.chunked_loss import TokenLoss, loss_at_labels
from vlmpipe.trainer.models.loss.pairs import PreferencePairs
from vlmpipe.trainer.sizing.pipeline_partition import Stage


class PackedInputs(TypedDict):
    """Packed sequences as arguments of a training module. Named, and no object of a type: FSDP and DeepSpeed cast the
    tensors that they find among the arguments.
    """

    input_ids: Tensor  # (sequences, tokens)
    # (sequences, tokens), restarting at 0 for each packed sample; families whose images keep their aspect ratio take
    # (4, sequences, tokens): these, then the model's own three axes.
    position_ids: Tensor
    label_index: Tensor  # (labels,) positions in the flattened sequences whose *next* token is a label
    label_ids: Tensor  # (labels,) that token
    # Cached features, or pixel values; shapes: see `encode`, and `feature_shape` of the family. Of hf by name.
    images: Tensor | NamedImages
    image_grids: NotRequired[Sequence[Grid]]  # of each image, for patches
    samples: NotRequired[CuSeqlens]  # bounds of the packed samples; without, positions separate them
    image_tokens: NotRequired[int]  # of all images together
    pairs: NotRequired[PreferencePairs]  # of the samples; the loss is then that of pairs (see `TokenLoss`)
    selection: NotRequired[SelectionInputs]  # of the images, where the model selects their tokens
    loss_sources: NotRequired[Tensor]  # (labels,) or (pairs,) index of the source, where losses are told apart by it


def loss_of(token_loss: TokenLoss, head: nn.Module | None, hidden: Tensor, inputs: PackedInputs) -> Tensor:
    """See `loss_at_labels`."""
    labels = inputs["label_index"], inputs["label_ids"]
    return loss_at_labels(token_loss, head, hidden, *labels, inputs.get("pairs"), inputs.get("loss_sources"))


class PackedVLM(nn.Module):
    """Training module that strategies wrap. Subclasses define `tower`, `tower_is_frozen`, `run_tower`, `project` and
    `embed`.
    """

    def __init__(self, config: ModelConfig, model: nn.Module) -> None:
        super().__init__()
        self.config, self.model, self.token_loss = config, model, TokenLoss()
        self.why_masked = use_varlen_attention(self.language_model)

    @property
    def language_part(self) -> str:
        """See `vlmpipe.trainer.models.layers.pipeline_stage.PackedModel`."""
        return "language_model"

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

    def forward(self, hidden: Tensor | None = None, **inputs: Unpack[PackedInputs]) -> Tensor:
        """Summed cross-entropy of the label tokens, a scalar in fp32. A pipeline stage without the head returns hidden
        states (sequences, tokens, hidden) instead.

        hidden: output of the previous pipeline stage, for a stage without the embedding. The projector also runs on 0
        images, so that every rank takes part in every collective. Raises DataError for another number of image tokens
        than `image_tokens`.
        """
        images = inputs["images"]
        levels: dict[str, object] = {}
        if hidden is None:
            assert isinstance(images, Tensor)
            features = images if self.tower is None else self.encode(images, inputs.get("image_grids"))
            projected = self.project(features)
            require_tokens(projected.shape[:-1].numel(), inputs.get("image_tokens"))
            hidden, levels = self.embed(inputs["input_ids"], projected)
        hidden = self.decode(hidden, inputs["position_ids"], inputs.get("samples"), **levels)
        return loss_of(self.token_loss, self.model.lm_head, hidden, inputs)

    def decode(self, hidden: Tensor, position_ids: Tensor, samples: CuSeqlens | None, **more: object) -> Tensor:
        """(sequences, tokens, hidden) behind the language model's layers, which keep samples apart.

        position_ids: see `PackedInputs`; of several axes, the first is that of samples. more: further arguments.
        """
        of_samples = position_ids if position_ids.ndim == 2 else position_ids[0]
        mask = block_diagonal_mask(self.language_model.config, of_samples, samples)
        output: Tensor = self.language_model(
            inputs_embeds=hidden, position_ids=position_ids, use_cache=False, **mask, **more
        ).last_hidden_state
        return output

    def encode(self, images: Tensor, image_grids: Sequence[Grid] | None = None) -> Tensor:
        """Tower features of pixel values, in bf16 when the tower is frozen.

        (images, 3, side, side) -> (images, tokens, tower_hidden), or with grids (patches, numbers) -> (tokens,
        levels x patches of a token x hidden).
        """
        with torch.set_grad_enabled(not self.tower_is_frozen and torch.is_grad_enabled()):
            features = self.run_tower(images, image_grids)
        return features.to(torch.bfloat16) if self.tower_is_frozen else features

    def reduce_to(self, stage: Stage) -> None:
        reduce_to_stage(self, stage)

    def sharding_units(
        self, tower_layers: Sequence[nn.Module], *, image_layers: int = 0, shards_tower: bool = True
    ) -> ShardingUnits:
        return ShardingUnits(
            language_layers=list(self.language_model.layers),
            tower_layers=tower_layers,
            embedding=self.model.get_input_embeddings(),
            head=self.model.get_output_embeddings(),
            loss=self.token_loss,
            reduce_to=self.reduce_to,
            view=functools.partial(stage_view, self),
            image_layers=image_layers,
            shards_tower=shards_tower,
        )
