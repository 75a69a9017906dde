"""Training module of families whose images all have one size: packed sequences in, summed loss out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from trainer.config.model import ModelConfig
from trainer.models.attention.block_mask import block_diagonal_mask
from trainer.models.attention.cu_seqlens import CuSeqlens
from trainer.models.attention.varlen import use_varlen_attention
from trainer.models.base import ShardingUnits
from trainer.models.image_inputs import Grid
from trainer.models.layers.chunked_loss import TokenLoss, loss_at_labels
from trainer.models.layers.freeze import trains
from trainer.models.layers.image_placeholders import embedded, require_tokens
from trainer.models.layers.parameter_counts import skeleton_of
from trainer.models.layers.pipeline_stage import reduce_to_stage, stage_view


@dataclass(frozen=True)
class Wiring:
    """What transformers calls the parts of a family's model, below `model.model`, and how they are run."""

    tower: str
    projector: str
    language_model: str
    tower_output: Callable[[ModelConfig, nn.Module, Tensor], Tensor]  # pixel values -> what feeds the projector
    calls_tower: bool  # `tower_output` runs the tower by its own forward pass, or module by module


class FixedImageVLM(nn.Module):
    """Packed rows in, summed token loss out. What strategies wrap."""

    def __init__(self, config: ModelConfig, model: nn.Module, wiring: Wiring, *, cached: bool) -> None:
        super().__init__()
        self.config, self.model, self.wiring, self.token_loss = config, model, wiring, TokenLoss()
        self.tower_is_frozen = not trains(getattr(model.model, wiring.tower))
        if cached:
            setattr(model.model, wiring.tower, None)  # its output is read from disk: no weights, no memory
        elif self.tower_is_frozen:
            getattr(model.model, wiring.tower).eval()
        use_varlen_attention(self.language_model)

    @property
    def tower(self) -> nn.Module | None:
        """None with cached features, and in a stage without it."""
        return getattr(self.model.model, self.wiring.tower)

    @property
    def projector(self) -> nn.Module | None:
        """None in a stage without it."""
        return getattr(self.model.model, self.wiring.projector)

    @property
    def language_part(self) -> str:
        return self.wiring.language_model

    @property
    def language_model(self) -> nn.Module:
        return getattr(self.model.model, self.language_part)

    def drop_images(self) -> None:
        """See `trainer.models.layers.pipeline_stage.PackedModel`."""
        for part in (self.wiring.tower, self.wiring.projector):
            setattr(self.model.model, part, None)

    def train(self, mode: bool = True) -> FixedImageVLM:
        super().train(mode)
        if self.tower_is_frozen and self.tower is not None:
            self.tower.eval()
        return self

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        label_index: Tensor,
        label_ids: Tensor,
        images: Tensor,
        hidden: Tensor | None = None,
        samples: CuSeqlens | None = None,
        image_tokens: int | None = None,
        encoded: bool = False,
    ) -> Tensor:
        """Summed cross-entropy of the label tokens, a scalar in fp32; hidden states (rows, tokens, hidden) from a stage
        of the model that lacks the head.

        input_ids: (rows, tokens).
        position_ids: (rows, tokens), restarting at 0 for each sample, which keeps packed samples apart.
        label_index: (labels,), positions in the flattened rows whose *next* token is a label.
        label_ids: (labels,), that token.
        images: cached features (images, tokens, tower_hidden), or pixel values (images, 3, side, side); of images that
            are cut into tiles, each tile is one here. With 0 images the projector still runs, so that every rank takes
            part in every collective.
        hidden: what the stage before gives, for a stage that lacks the embedding.
        samples: of these rows, where the host knows them; positions tell them apart where it does not.
        image_tokens: of all images in these rows. Raises DataError when the images give another number.
        encoded: the images are what `encode` gave.
        """
        apart = block_diagonal_mask(self.language_model.config, position_ids, samples)
        if hidden is None:
            features = images if encoded or self.tower is None else self.encode(images)
            assert self.projector is not None
            projected = project(self.projector, features)
            require_tokens(len(projected) * projected.shape[1], image_tokens)
            hidden = embedded(self.model, input_ids, projected)
        hidden = self.language_model(
            inputs_embeds=hidden, position_ids=position_ids, use_cache=False, **apart
        ).last_hidden_state
        return loss_at_labels(self.token_loss, self.model.lm_head, hidden, label_index, label_ids)

    @property
    def runs_frozen_tower(self) -> bool:
        return self.tower_is_frozen and self.tower is not None

    def encode(self, images: Tensor) -> Tensor:
        """Features of pixel values: (images, 3, side, side) -> (images, tokens, tower_hidden)."""
        num_images = len(images)
        if not num_images:
            # A blank image whose features are dropped: towers cannot reshape nothing, and a tower that is trained must
            # take part in its collectives on every rank.
            images = images.new_zeros(1, *images.shape[1:])
        assert self.tower is not None
        with torch.set_grad_enabled(not self.tower_is_frozen and torch.is_grad_enabled()):
            features = self.wiring.tower_output(self.config, self.tower, images)[:num_images]
        return features.to(torch.bfloat16) if self.tower_is_frozen else features


class SquareFamily:
    """The shared half of families whose images, or tiles of images, are all one square. See `Family`."""

    wiring: ClassVar[Wiring]

    @torch.no_grad()
    def encode(
        self, config: ModelConfig, tower: nn.Module, pixel_values: Tensor, grids: Sequence[Grid] | None = None
    ) -> Tensor:
        """Features of images: (images, 3, side, side) -> (images, tokens, tower_hidden) in bf16.

        bf16 is what the cache stores; the online path rounds the same way, so both train on the same numbers.
        """
        return self.wiring.tower_output(config, tower, pixel_values).to(torch.bfloat16)

    def tower(self, model: nn.Module) -> nn.Module:
        return getattr(model.model, self.wiring.tower)

    def project(self, model: nn.Module, features: Tensor) -> Tensor:
        """(images, tokens, tower_hidden) -> (images, projected tokens, hidden)."""
        return project(getattr(model.model, self.wiring.projector), features)

    def generation_inputs(
        self, model: nn.Module, input_ids: Tensor, projected: Tensor, grids: Tensor | None = None
    ) -> dict[str, Any]:
        """The tokens' embeddings, with projected features in place of the image tokens'."""
        return {"inputs_embeds": embedded(model, input_ids, projected)}

    def training_module(self, config: ModelConfig, model: nn.Module, *, cached: bool) -> nn.Module:
        return FixedImageVLM(config, model, self.wiring, cached=cached)

    def blocks(self, module: FixedImageVLM) -> ShardingUnits:
        return ShardingUnits(
            language_layers=list(module.language_model.layers),
            tower_layers=tower_layers_of(module.tower) if module.tower is not None else [],
            embedding=module.language_model.embed_tokens,
            head=module.model.lm_head,
            loss=module.token_loss,
            reduce_to=functools.partial(reduce_to_stage, module),
            view=functools.partial(stage_view, module),
        )


def project(projector: nn.Module, features: Tensor) -> Tensor:
    """(images, feature tokens, tower_hidden) -> (images, tokens, hidden)."""
    projected: Tensor = projector(features.to(next(projector.parameters()).dtype))
    return projected


def tower_layers_of(tower: nn.Module) -> list[nn.Module]:
    """The layers of a vision tower, by the name that transformers gives the class of all of them."""
    return [module for module in tower.modules() if type(module).__name__.endswith("EncoderLayer")]


def square_skeleton(
    kind: Callable[[PreTrainedConfig], nn.Module],
    whole: PreTrainedConfig,
    wiring: Wiring,
    vocabulary: int,
    language_layers: int | None,
    one_inner_tower_layer: bool,
) -> nn.Module:
    """See `skeleton_of`. `one_inner_tower_layer`: the tower's layers between the first and the last are one module."""
    tower_layers = int(whole.vision_config.num_hidden_layers)
    repeats = one_inner_tower_layer and tower_layers > 3
    if repeats:
        whole.vision_config.num_hidden_layers = 3
    model = skeleton_of(kind, whole, vocabulary, language_layers)
    if repeats:
        tower = getattr(model.model, wiring.tower)
        inner = tower_layers_of(tower)[1]
        stack = next(part for part in tower.modules() if isinstance(part, nn.ModuleList) and inner in part)
        for _ in range(tower_layers - len(stack)):
            stack.insert(1, inner)
        tower.config.num_hidden_layers = tower_layers
    return model
