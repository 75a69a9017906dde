"""Training module of the Qwen-VL families, and their vision encoder split into tower and mergers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.hf import encoder
from vlmpipe.trainer.models.hf.encoder import merger_parts, mergers_of
from vlmpipe.trainer.models.hf.vision_attention import use_attention_by_piece
from vlmpipe.trainer.models.image_inputs import Grid
from vlmpipe.trainer.models.layers.freeze import trains
from vlmpipe.trainer.models.layers.image_placeholders import add_levels_at_places, places_of, put
from vlmpipe.trainer.models.packed_vlm import PackedVLM
from vlmpipe.trainer.models.qwen_vl.vision_metadata import sizes_of


class QwenVLM(PackedVLM):
    def __init__(self, config: ModelConfig, model: nn.Module, *, cached: bool) -> None:
        super().__init__(config, model, "language_model")
        self.sizes_of = sizes_of  # replaced in traces with fake tensors
        visual = model.model.visual
        if len(mergers_of(visual)) > 1:
            add_levels_at_places(self.language_model)
        self.tower_is_frozen = not trains(without_mergers(visual))
        # In a list because it is no submodule: its parts already belong to `visual`, under their names in checkpoints.
        self._tower: list[nn.Module] = [] if cached else [without_mergers(visual)]
        if cached:
            for name in list(visual._modules):
                if name not in merger_parts(visual):
                    setattr(visual, name, None)  # its output is read from disk
        self.train(self.training)

    @property
    def tower(self) -> nn.Module | None:
        """The vision encoder; None with cached features, and in a pipeline stage without it."""
        return self._tower[0] if self._tower else None

    def drop_images(self) -> None:
        """See `vlmpipe.trainer.models.layers.pipeline_stage.PackedModel`."""
        self.model.model.visual, self._tower = None, []

    def run_tower(self, patches: Tensor, grids: Sequence[Grid] | None) -> Tensor:
        assert grids is not None
        (tower,), side = self._tower, int(self.model.config.vision_config.spatial_merge_size)
        if not len(grids):
            # Encode one blank token and drop its features: towers cannot reshape an empty batch, and a trained tower
            # must take part in its collectives on every rank.
            patches, blank = patches.new_zeros(side**2, patches.shape[1]), [(1, side, side)]
            return tower_output(tower, patches, self.sizes_of(tower, blank, patches.device))[:0]
        return tower_output(tower, patches, self.sizes_of(tower, grids, patches.device))

    def project(self, features: Tensor) -> Tensor:
        return project(self.model.model.visual, features)

    def embed(self, input_ids: Tensor, projected: Tensor) -> tuple[Tensor, dict[str, object]]:
        """(sequences, tokens, hidden), and the language model's arguments for deeper levels (DeepStack)."""
        first, *deeper = projected.chunk(len(mergers_of(self.model.model.visual)), dim=-1)
        config = self.model.config
        is_seen = (input_ids == config.image_token_id) | (input_ids == config.video_token_id)
        places = places_of(is_seen, len(projected))
        hidden = put(self.model.get_input_embeddings()(input_ids), places, first)
        return hidden, {"visual_pos_masks": places, "deepstack_visual_embeds": deeper} if deeper else {}


def without_mergers(visual: nn.Module) -> nn.Module:
    """`vlmpipe.trainer.models.hf.encoder.without_mergers`, with attention in few launches."""
    use_attention_by_piece(visual)
    return encoder.without_mergers(visual, int(visual.config.spatial_merge_size) ** 2)


def tower_output(tower: nn.Module, patches: Tensor, sizes: dict[str, object]) -> Tensor:
    """Input of the mergers: (tokens, levels x patches of a token x hidden). sizes: see `sizes_of`."""
    # Without grids, a release of the library that ignores one of `sizes` fails instead of waiting for the device.
    output = tower(patches, grid_thw=None, **sizes)
    return torch.cat([output.pooler_output, *(getattr(output, "deepstack_features", None) or ())], dim=-1)


def project(visual: nn.Module, features: Tensor) -> Tensor:
    """Apply each level's merger: (tokens, levels x numbers) -> (tokens, levels x hidden)."""
    mergers = mergers_of(visual)
    dtype = next(mergers[0].parameters()).dtype
    hidden = int(visual.config.hidden_size)
    levels = features.to(dtype).chunk(len(mergers), dim=-1)
    return torch.cat([merger(level.reshape(-1, hidden)) for merger, level in zip(mergers, levels, strict=True)], dim=-1)


def encoder_output(projected: Tensor, visual: nn.Module) -> BaseModelOutputWithPooling:
    """Projected features as the library's hook for precomputed encoder outputs takes them."""
    first, *deeper = projected.chunk(len(mergers_of(visual)), dim=-1)
    output = BaseModelOutputWithPooling(pooler_output=[first])
    if deeper:
        output["deepstack_features"] = [[level] for level in deeper]
    return output
