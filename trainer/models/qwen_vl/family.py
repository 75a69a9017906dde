"""The families `qwen2_5_vl` and `qwen3_vl`: native vision-language models of transformers.

Images keep their shape, so they differ in tokens. The parts have the names that the other families use: the tower is
the vision encoder without its merger, and the merger, which makes a token of `merge` x `merge` patches, is the
projector. Features are what the merger gets: a frozen tower leaves it to training.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    PreTrainedConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLForConditionalGeneration,
)
from transformers.initialization import no_init_weights

from trainer.config.model import ModelConfig
from trainer.models.base import ShardingUnits
from trainer.models.hf_native import build as native
from trainer.models.hf_native.build import pretrained_config
from trainer.models.hf_native.pretrained import load_pretrained
from trainer.models.hf_native.weights import InitialWeights, PretrainedModel
from trainer.models.image_inputs import Grid
from trainer.models.image_tokens import VISION_END, VISION_START, image_form_of
from trainer.models.layers.lora import freeze_and_adapt
from trainer.models.layers.parameter_counts import count_parameters, model_shape, skeleton_of, stack_of, vocabulary_of
from trainer.models.layers.pipeline_stage import reduce_to_stage, stage_view
from trainer.models.qwen_vl.model import (
    QwenVLM,
    encoder_output,
    mergers_of,
    project,
    tower_output,
    without_mergers,
)
from trainer.models.qwen_vl.vision_metadata import sizes_of
from trainer.sizing.model_shape import ModelShape, Windows

VISUAL = "model.visual."
MODELS = {
    name: PretrainedModel(
        kind,
        tower=VISUAL,
        embedding="model.language_model.embed_tokens.weight",
        # The hub's first releases lack a level that transformers has put in since.
        older={VISUAL: "visual.", "model.language_model.": "model."},
    )
    for name, kind in {
        "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
        "qwen3_vl": Qwen3VLForConditionalGeneration,
    }.items()
}


class QwenVlFamily:
    """See `trainer.models.base.Family`."""

    def image_tokens(self, config: ModelConfig, width: int, height: int) -> int:
        """Language-model tokens of an image of `width` x `height` pixels."""
        grids = image_form_of(config).grids
        assert grids is not None
        return grids.tokens(width, height)

    def feature_shape(self, config: ModelConfig) -> tuple[int]:
        """(numbers,) of a token: of all its patches, and of each level that reaches the language model."""
        vision = pretrained_config(config).vision_config
        levels = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
        return (int(vision.hidden_size) * int(vision.spatial_merge_size) ** 2 * levels,)

    def feature_description(self, config: ModelConfig) -> dict[str, Any]:
        """All that decides what the frozen tower outputs for given image bytes, as plain JSON."""
        return native.description(config)

    def image_processor(self, config: ModelConfig) -> Any:
        """Always by Pillow, as that of `llava`: a machine with torchvision must give the pixels of one without."""
        vision, grids = pretrained_config(config).vision_config, image_form_of(config).grids
        assert grids is not None
        settings = {
            "size": {"shortest_edge": grids.min_pixels, "longest_edge": grids.max_pixels},
            "patch_size": grids.patch,
            "temporal_patch_size": int(vision.temporal_patch_size),
            "merge_size": grids.merge,
        }
        if config.tower.weights:
            return load_pretrained(AutoImageProcessor, config.tower, backend="pil", **settings)
        return Qwen2VLImageProcessorPil(**settings)

    def build(self, config: ModelConfig, tokenizer: Any) -> nn.Module:
        """The whole model on the CPU in fp32: pretrained where weights are named, else drawn from the seed."""
        whole = _config_for(config, tokenizer)
        return freeze_and_adapt(
            native.build(config, MODELS[config.family], whole, len(tokenizer)), config, is_whole=True
        )

    def blueprint(self, config: ModelConfig, tokenizer: Any) -> nn.Module:
        """What `build` makes, without numbers: on the meta device."""
        with torch.device("meta"), no_init_weights():
            model = MODELS[config.family].kind(_config_for(config, tokenizer)).float()
            return freeze_and_adapt(model, config, is_whole=True)

    def initial_weights(self, config: ModelConfig, tokenizer: Any) -> InitialWeights:
        model = MODELS[config.family]
        return native.initial_weights(config, model, len(tokenizer), lambda plain: self.build(plain, tokenizer))

    def skeleton(
        self,
        config: ModelConfig,
        *,
        vocabulary: int,
        language_layers: int | None = None,
        one_inner_tower_layer: bool = False,
    ) -> nn.Module:
        """What `build` makes, but for the numbers in it.

        `one_inner_tower_layer`: the tower's layers between the first and the last are one, which is quicker to make.
        """
        whole = pretrained_config(config)
        more_layers = max(0, int(whole.vision_config.depth) - 3) if one_inner_tower_layer else 0
        whole.vision_config.depth -= more_layers
        model = skeleton_of(MODELS[config.family].kind, whole, vocabulary, language_layers)
        layers = model.model.visual.blocks
        for _ in range(more_layers):
            layers.insert(1, layers[1])
        return freeze_and_adapt(model, config, is_whole=language_layers is None and not one_inner_tower_layer)

    def shape(self, config: ModelConfig) -> ModelShape:
        """Sizes, with the parameters counted on the meta device; tokens of an image are the most it can have."""
        whole, grids = pretrained_config(config), image_form_of(config).grids
        assert grids is not None
        vision, text = whole.vision_config, whole.text_config
        with torch.device("meta"):
            model = self.skeleton(config, vocabulary=vocabulary_of(config, text))
        visual = model.model.visual
        in_mergers = sum(count_parameters(merger) for merger in mergers_of(visual))
        windows = None
        if full_layers := getattr(vision, "fullatt_block_indexes", None):
            windows = Windows(int(vision.window_size) // grids.merge // grids.patch, len(full_layers))
        return model_shape(
            config,
            model,
            visual.blocks,
            tower_parameters=count_parameters(visual) - in_mergers,
            projector_parameters=in_mergers,
            tower=stack_of(vision, visual.blocks[0]),
            tower_tokens=grids.most_tokens * grids.merge**2,
            image_tokens=grids.most_tokens,
            feature_width=self.feature_shape(config)[0],
            patch_pixels=patch_numbers(config),
            merge=grids.merge,
            levels=len(mergers_of(visual)),
            windows=windows,
        )

    def build_tower(self, config: ModelConfig) -> nn.Module:
        """The tower alone, on the CPU in fp32 and in evaluation mode. Random weights depend on the seed only."""
        return without_mergers(native.build_vision(config, MODELS[config.family])).eval()

    @torch.no_grad()
    def encode(
        self, config: ModelConfig, tower: nn.Module, pixel_values: Tensor, grids: Sequence[Grid] | None = None
    ) -> list[Tensor]:
        """Features of each image, (tokens, numbers) in bf16: what the mergers get.

        pixel_values: (patches, numbers) of all images; grids: of each. bf16 is what the cache stores; the online
        path rounds the same way, so both train on the same numbers.
        """
        assert grids is not None
        sizes = sizes_of(tower, grids, pixel_values.device)
        features = tower_output(tower, pixel_values, sizes).to(torch.bfloat16)
        return list(features.split([math.prod(grid) // int(tower.config.spatial_merge_size) ** 2 for grid in grids]))

    def tower(self, model: nn.Module) -> nn.Module:
        return without_mergers(model.model.visual)

    def project(self, model: nn.Module, features: Tensor) -> Tensor:
        """(tokens, numbers) -> (tokens, hidden), or the levels that reach the language model side by side."""
        return project(model.model.visual, features)

    def generation_inputs(
        self, model: nn.Module, input_ids: Tensor, projected: Tensor, grids: Tensor | None = None
    ) -> dict[str, Any]:
        """Tokens and projected features by the library's own hook: it works out three-axis positions from `grids`."""
        return {
            "input_ids": input_ids,
            "mm_token_type_ids": (input_ids == model.config.image_token_id).int(),
            "image_grid_thw": grids,
            "mm_encoder_outputs": {"image": encoder_output(projected, model.model.visual)},
        }

    def training_module(self, config: ModelConfig, model: nn.Module, *, cached: bool) -> nn.Module:
        return QwenVLM(config, model, cached=cached)

    def blocks(self, module: nn.Module) -> ShardingUnits:
        model = module.model
        visual = model.model.visual
        return ShardingUnits(
            language_layers=list(model.model.language_model.layers),
            tower_layers=list(dict.fromkeys(visual.blocks or [])),  # in a trace, inner ones are one
            embedding=model.model.language_model.embed_tokens,
            head=model.lm_head,
            loss=module.token_loss,
            reduce_to=functools.partial(reduce_to_stage, module),
            view=functools.partial(stage_view, module),
            image_layers=len(mergers_of(visual)) - 1,  # DeepStack adds a level behind each
        )

    def save_settings(self, config: ModelConfig, model: nn.Module, tokenizer: Any, folder: Path) -> None:
        """Write all that plain `from_pretrained` needs but the weights: configuration, tokenizer and processor."""
        native.save_settings(model, tokenizer, self.image_processor(config), folder)

    def load(self, folder: Path) -> nn.Module:
        """An exported model."""
        whole = AutoConfig.from_pretrained(folder)
        return MODELS[whole.model_type].kind.from_pretrained(folder, dtype=torch.float32)


def patch_numbers(config: ModelConfig) -> int:
    """Numbers of one patch as the tower takes it: a still image is repeated to fill its time."""
    vision = pretrained_config(config).vision_config
    return int(vision.in_channels) * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2


def _config_for(config: ModelConfig, tokenizer: Any) -> PreTrainedConfig:
    whole = native.config_for(config, tokenizer)
    whole.vision_start_token_id = tokenizer.convert_tokens_to_ids(VISION_START)
    whole.vision_end_token_id = tokenizer.convert_tokens_to_ids(VISION_END)
    return whole
