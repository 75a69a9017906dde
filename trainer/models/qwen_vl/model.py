"""Training module of the Qwen-VL families: packed sequences in, summed token loss out."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from trainer.config.model import ModelConfig
from trainer.models.attention.block_mask import block_diagonal_mask
from trainer.models.attention.cu_seqlens import CuSeqlens
from trainer.models.attention.varlen import use_varlen_attention
from trainer.models.image_inputs import Grid
from trainer.models.layers.chunked_loss import TokenLoss, loss_at_labels
from trainer.models.layers.freeze import trains
from trainer.models.layers.image_placeholders import add_levels_at_places, places_of, put, require_tokens
from trainer.models.qwen_vl.vision_metadata import sizes_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
MERGERS = ("merger", "deepstack_merger_list")  # transformers' names


class QwenVLM(nn.Module):
    """Packed rows in, summed token loss out. What strategies wrap."""

    language_part = "language_model"

    def __init__(self, config: ModelConfig, model: nn.Module, *, cached: bool) -> None:
        super().__init__()
        self.config, self.model, self.token_loss = config, model, TokenLoss()
        self.sizes_of = sizes_of  # what traces of tensors without numbers put another in the place of
        use_varlen_attention(model.model.language_model)
        visual = model.model.visual
        if len(mergers_of(visual)) > 1:
            add_levels_at_places(model.model.language_model)
        self.tower_is_frozen = not trains(without_mergers(visual))
        # In a list, for it is no module of its own: its parts are `visual`'s, under the names that they have there.
        self._tower: list[nn.Module] = [] if cached else [without_mergers(visual)]
        if cached:
            for name in list(visual._modules):
                if name not in MERGERS:
                    setattr(visual, name, None)  # its output is read from disk: no weights, no memory
        self.train(self.training)

    def train(self, mode: bool = True) -> QwenVLM:
        super().train(mode)
        if self.tower_is_frozen:
            for tower in self._tower:
                tower.eval()
        return self

    def drop_images(self) -> None:
        """See `trainer.models.layers.pipeline_stage.PackedModel`."""
        self.model.model.visual, self._tower = None, []

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
        encoded: bool = False,
    ) -> Tensor:
        """Summed cross-entropy of the label tokens, a scalar in fp32; hidden states (rows, tokens, hidden) from a stage
        of the model that lacks the head.

        input_ids: (rows, tokens).
        position_ids: (4, rows, tokens): places that restart at 0 for each sample, which keeps packed samples apart, and
            the three axes of the model's own positions.
        label_index: (labels,), positions in the flattened rows whose *next* token is a label.
        label_ids: (labels,), that token.
        images: of all images cached features (tokens, numbers), or patches (patches, numbers). With 0 images the
            mergers still run, so that every rank takes part in every collective.
        image_grids: of each image. For patches.
        hidden: what the stage before gives, for a stage that lacks the embedding.
        samples: of these rows, where the host knows them; positions tell them apart where it does not.
        image_tokens: of all images in these rows. Raises DataError when the images give another number.
        encoded: the images are what `encode` gave.
        """
        base = self.model.model
        apart = block_diagonal_mask(base.language_model.config, position_ids[0], samples)
        levels: dict[str, Any] = {}
        if hidden is None:
            features = self.encode(images, image_grids) if self._tower and not encoded else images
            projected = project(base.visual, features)
            require_tokens(len(projected), image_tokens)
            first, *deeper = projected.chunk(len(mergers_of(base.visual)), dim=-1)
            places = places_of(input_ids == self.model.config.image_token_id, len(projected))
            hidden = put(self.model.get_input_embeddings()(input_ids), places, first)  # (rows, tokens, hidden)
            if deeper:  # see `add_levels_at_places`
                levels = {"visual_pos_masks": places, "deepstack_visual_embeds": deeper}
        hidden = base.language_model(
            inputs_embeds=hidden, position_ids=position_ids, use_cache=False, **apart, **levels
        ).last_hidden_state
        return loss_at_labels(self.token_loss, self.model.lm_head, hidden, label_index, label_ids)

    @property
    def runs_frozen_tower(self) -> bool:
        return self.tower_is_frozen and bool(self._tower)

    def encode(self, images: Tensor, image_grids: Sequence[Grid] | None) -> Tensor:
        """Features of patches, (patches, numbers) -> (tokens, levels x patches of a token x hidden)."""
        assert image_grids is not None
        patches, grids = images, image_grids
        (tower,), merge_size = self._tower, int(self.model.config.vision_config.spatial_merge_size)
        if not len(grids):
            # A blank image of one token whose features are dropped: towers cannot reshape nothing, and a tower that is
            # trained must take part in its collectives on every rank.
            patches = patches.new_zeros(merge_size**2, patches.shape[1])
            features = self._run(tower, patches, [(1, merge_size, merge_size)])[:0]
        else:
            features = self._run(tower, patches, grids)
        return features.to(torch.bfloat16) if self.tower_is_frozen else features

    def _run(self, tower: nn.Module, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        with torch.set_grad_enabled(not self.tower_is_frozen and torch.is_grad_enabled()):
            return tower_output(tower, patches, self.sizes_of(tower, grids, patches.device))


class Group(nn.Module):
    """Stands where a merger is: puts the patches of a token side by side, as a merger does first."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        self.patches = patches  # of a token

    def forward(self, hidden: Tensor) -> Tensor:
        """(patches, hidden) -> (tokens, patches of a token x hidden)."""
        return hidden.reshape(len(hidden) // self.patches, -1)


def mergers_of(visual: nn.Module) -> list[nn.Module]:
    """The merger, and those of the levels that reach deeper layers of the language model (DeepStack)."""
    return [visual.merger, *getattr(visual, "deepstack_merger_list", [])]


def without_mergers(visual: nn.Module) -> nn.Module:
    """The same vision encoder, made of the same modules, that gives what its mergers would get.

    The library's own forward pass runs, so its order of tokens (that of windows, within) is the library's matter.
    """
    tower = copy.copy(visual)
    group = Group(int(visual.config.spatial_merge_size) ** 2)
    tower._modules = dict(visual._modules)
    for hooks in HOOKS:  # of its own: those that a strategy puts on the encoder know only that one (DeepSpeed's ds_id)
        setattr(tower, hooks, OrderedDict())
    tower._modules["merger"] = group
    if "deepstack_merger_list" in tower._modules:
        tower._modules["deepstack_merger_list"] = nn.ModuleList([group for _ in visual.deepstack_merger_list])
    return tower


def tower_output(tower: nn.Module, patches: Tensor, sizes: dict[str, Any]) -> Tensor:
    """What the mergers get, level beside level: (tokens, levels x patches of a token x hidden). `sizes`: `sizes_of`."""
    # No grids for the library: one that did not take all that is told here would fail for want of them.
    output = tower(patches, grid_thw=None, **sizes)
    return torch.cat([output.pooler_output, *(getattr(output, "deepstack_features", None) or ())], dim=-1)


def project(visual: nn.Module, features: Tensor) -> Tensor:
    """Features (tokens, levels x numbers) -> (tokens, levels x hidden), by the merger of each level."""
    mergers = mergers_of(visual)
    dtype = next(mergers[0].parameters()).dtype
    hidden = int(visual.config.hidden_size)
    levels = features.to(dtype).chunk(len(mergers), dim=-1)
    return torch.cat([merger(level.reshape(-1, hidden)) for merger, level in zip(mergers, levels, strict=True)], dim=-1)


def encoder_output(projected: Tensor, visual: nn.Module) -> BaseModelOutputWithPooling:
    """Projected features in the form that the library's hook for precomputed encoder outputs takes."""
    first, *deeper = projected.chunk(len(mergers_of(visual)), dim=-1)
    output = BaseModelOutputWithPooling(pooler_output=[first])
    if deeper:
        output["deepstack_features"] = [[level] for level in deeper]
    return output
