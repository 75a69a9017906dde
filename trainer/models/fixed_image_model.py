"""The module that strategies train for families whose images are all one square: packed rows in, summed loss out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.config.model import ModelConfig
from trainer.models.attention.block_mask import kept_apart
from trainer.models.attention.cu_seqlens import Samples
from trainer.models.attention.varlen import attend_by_sample
from trainer.models.base import Blocks
from trainer.models.layers.chunked_loss import TokenLoss
from trainer.models.layers.freeze import trains
from trainer.models.layers.image_placeholders import embedded, require_tokens
from trainer.models.layers.pipeline_stage import reduce_to_stage, stage_view


@dataclass(frozen=True)
class Wiring:
    """What transformers calls the parts of a family's model, below `model.model`, and how they are run."""

    tower: str
    projector: str
    language_model: str
    tower_output: Callable[[ModelConfig, nn.Module, Tensor], Tensor]  # pixel values -> what feeds the projector
    calls_tower: bool  # `tower_output` runs the tower by its own forward pass, or module by module


class SquareRowModel(nn.Module):
    """Packed rows in, summed token loss out. What strategies wrap."""

    def __init__(self, config: ModelConfig, model: nn.Module, wiring: Wiring, *, cached: bool) -> None:
        super().__init__()
        self.config, self.model, self.wiring, self.token_loss = config, model, wiring, TokenLoss()
        self.tower_is_frozen = not trains(getattr(model.model, wiring.tower))
        if cached:
            setattr(model.model, wiring.tower, None)  # its output is read from disk: no weights, no memory
        elif self.tower_is_frozen:
            getattr(model.model, wiring.tower).eval()
        attend_by_sample(self.language_model)

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
        """See `trainer.models.layers.pipeline_stage.RowModel`."""
        for part in (self.wiring.tower, self.wiring.projector):
            setattr(self.model.model, part, None)

    def train(self, mode: bool = True) -> SquareRowModel:
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
        samples: Samples | None = None,
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
        apart = kept_apart(self.language_model.config, position_ids, samples)
        if hidden is None:
            features = images if encoded or self.tower is None else self.encode(images)
            assert self.projector is not None
            projected = project(self.projector, features)
            require_tokens(len(projected) * projected.shape[1], image_tokens)
            hidden = embedded(self.model, input_ids, projected)
        hidden = self.language_model(
            inputs_embeds=hidden, position_ids=position_ids, use_cache=False, **apart
        ).last_hidden_state
        if self.model.lm_head is None:
            return hidden
        # Only label positions go through the head: logits of all tokens never exist.
        labelled = hidden.flatten(0, 1).index_select(0, label_index)  # (labels, hidden)
        loss: Tensor = self.token_loss(self.model.lm_head, labelled, label_ids)
        return loss

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


def project(projector: nn.Module, features: Tensor) -> Tensor:
    """(images, feature tokens, tower_hidden) -> (images, tokens, hidden)."""
    projected: Tensor = projector(features.to(next(projector.parameters()).dtype))
    return projected


def blocks_of(module: SquareRowModel) -> Blocks:
    """See `trainer.models.base.Blocks`."""
    return Blocks(
        language_layers=list(module.language_model.layers),
        tower_layers=tower_layers_of(module.tower) if module.tower is not None else [],
        embedding=module.language_model.embed_tokens,
        head=module.model.lm_head,
        loss=module.token_loss,
        reduce_to=functools.partial(reduce_to_stage, module),
        view=functools.partial(stage_view, module),
    )


def tower_layers_of(tower: nn.Module) -> list[nn.Module]:
    """The layers of a vision tower, by the name that transformers gives the class of all of them."""
    return [module for module in tower.modules() if type(module).__name__.endswith("EncoderLayer")]


def repeat_inner_layer(tower: nn.Module, layers: int) -> None:
    """Make a tower of three layers one of `layers`, in which all between the first and the last are the same module."""
    inner = tower_layers_of(tower)[1]
    stack = next(part for part in tower.modules() if isinstance(part, nn.ModuleList) and inner in part)
    for _ in range(layers - len(stack)):
        stack.insert(1, inner)
    tower.config.num_hidden_layers = layers
