"""The `llava` family: any Hugging Face vision tower, a two-layer projector and any causal language model.

The model is transformers' own `LlavaForConditionalGeneration`, so an export loads with plain `from_pretrained`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModel,
    BaseImageProcessor,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
)
from transformers.initialization import no_init_weights

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention.varlen import takes_samples
from vlmpipe.trainer.models.base import ShardingUnits, Weights
from vlmpipe.trainer.models.hf_native.family import TransformersFamily
from vlmpipe.trainer.models.hf_native.pretrained import load_pretrained, weights_description
from vlmpipe.trainer.models.hf_native.weights import DrawnWeights, fill
from vlmpipe.trainer.models.image_inputs import Grid
from vlmpipe.trainer.models.image_tokens import CLIP, class_tokens, square_tokens
from vlmpipe.trainer.models.layers.freeze import tower_layers_of
from vlmpipe.trainer.models.layers.image_placeholders import embedded
from vlmpipe.trainer.models.layers.lora import without_adapters
from vlmpipe.trainer.models.layers.parameter_counts import count_parameters, model_shape, vocabulary_of
from vlmpipe.trainer.models.llava.configuration import (
    SELECT_STRATEGY,
    counted_from_the_end,
    projector_settings,
    text_config,
    vision_config,
)
from vlmpipe.trainer.models.llava.initial_weights import (
    LANGUAGE_MODEL,
    PROJECTOR,
    TOWER,
    Part,
    PartWeights,
    drawn_projector,
    stored_language,
    stored_projector,
    stored_tower,
)
from vlmpipe.trainer.models.llava.model import LlavaVLM, project, tower_output
from vlmpipe.trainer.sizing.model_shape import ModelShape

IMAGE_CHANNELS = 3
# (tokens, tower_hidden) by tower, its settings and how they are taken: a start asks for the same tower several times.
_FEATURES: dict[tuple[object, ...], tuple[int, ...]] = {}
# Kinds of layers in transformers' `layer_types` that see no other sample under a mask.
MASKED = {"full_attention", "sliding_attention", "chunked_attention"}
BEHIND_LAYERS = ("post_layernorm", "layernorm", "head")  # names of a tower's modules after its last layer


class LlavaFamily(TransformersFamily):
    """See `vlmpipe.trainer.models.base.Family`."""

    def kind(self, model_type: str) -> type[LlavaForConditionalGeneration]:
        return LlavaForConditionalGeneration

    def whole_config(self, config: ModelConfig) -> LlavaConfig:
        vision, text = vision_config(config), text_config(config)
        return LlavaConfig(
            vision_config=vision,
            text_config=text,
            vision_feature_layer=counted_from_the_end(config.feature_layer, vision),
            vision_feature_select_strategy=SELECT_STRATEGY[config.feature_select],
            image_seq_length=self.feature_shape(config)[0],
            tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
            **projector_settings(config, vision, text),
        )

    def require_trainable(self, config: ModelConfig, *, pack: bool, cached: bool) -> str:
        """Builds a language model on the meta device, if it has layers other than attention."""
        text = text_config(config)
        kinds = set(getattr(text, "layer_types", None) or ())
        if not pack or kinds <= MASKED:
            return ""
        with torch.device("meta"):
            model = self.skeleton(config, vocabulary=vocabulary_of(config, text))
        if not takes_samples(self.training_module(config, model, cached=True).language_model.config):
            raise ConfigError(
                f"a {text.model_type} model lets samples in one sequence see each other (its layers are "
                f"{', '.join(sorted(kinds))})",
                fix="set data.pack to false",
            )
        return ""

    def unused(self, model: nn.Module, config: ModelConfig) -> list[nn.Module]:
        return _behind_features(model.model.vision_tower, config)

    def feature_shape(self, config: ModelConfig) -> tuple[int, int]:
        """(tokens, tower_hidden) of one image."""
        vision = vision_config(config)
        return square_tokens(config, str(vision.model_type), int(vision.patch_size)), int(vision.hidden_size)

    def feature_description(self, config: ModelConfig) -> dict[str, object]:
        """Everything that determines the frozen tower's output for given image bytes, as plain JSON."""
        description = {"layer": config.feature_layer, "select": config.feature_select, "image_size": config.image_size}
        return {**description, **weights_description(config)}

    def image_processor(self, config: ModelConfig) -> BaseImageProcessor:
        """Resize to the square, then rescale and normalise as in the tower's training (or its class's default).

        Always by Pillow: torchvision gives other pixels, and cached features would differ between machines.
        """
        square = {"size": {"height": config.image_size, "width": config.image_size}, "do_center_crop": False}
        if config.tower.weights:
            return load_pretrained(AutoImageProcessor, config.tower, backend="pil", **square)
        if vision_config(config).model_type == CLIP:
            return CLIPImageProcessorPil(**square)
        return SiglipImageProcessorPil(size=square["size"])

    def fill_other_parts(self, model: nn.Module, config: ModelConfig) -> None:
        model.model.vision_tower.load_state_dict(self.build_tower(config).state_dict())
        if config.projector:
            fill(model.model.multi_modal_projector, stored_projector(config.projector, model.config))

    @torch.no_grad()
    def encode(
        self,
        config: ModelConfig,
        tower: nn.Module,
        pixel_values: Tensor,
        grids: Sequence[Grid] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Features of images: (images, 3, side, side) -> (images, tokens, tower_hidden) in `dtype`.

        bf16 is what the cache stores; training without a cache rounds the same way where the tower is frozen.
        """
        return tower_output(config, tower, pixel_values).to(dtype)

    def tower(self, model: nn.Module) -> nn.Module:
        return model.model.vision_tower

    def project(self, model: nn.Module, features: Tensor) -> Tensor:
        """(images, feature tokens, tower_hidden) -> (images, tokens, hidden)."""
        return project(model.model.multi_modal_projector, features)

    def generation_inputs(
        self, model: nn.Module, input_ids: Tensor, projected: Tensor, grids: Tensor | None = None
    ) -> dict[str, object]:
        """The tokens' embeddings, with projected features in place of the image tokens'."""
        return {"inputs_embeds": embedded(model, input_ids, projected)}

    def training_module(self, config: ModelConfig, model: nn.Module, *, cached: bool) -> nn.Module:
        if not cached:
            _skip_behind_features(model.model.vision_tower, config)
        return LlavaVLM(config, model, cached=cached)

    def blocks(self, module: LlavaVLM) -> ShardingUnits:
        return module.sharding_units(tower_layers_of(module.tower) if module.tower is not None else [])

    def initial_weights(self, config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> Weights:
        """Equal to those of `build`. A projector or tower that is not stored is drawn by itself. Without a stored
        language model the model is built once and held: each drawn weight depends on all drawn before it."""
        plain = without_adapters(config)

        def tower() -> Weights:
            if config.tower.weights:
                return stored_tower(config.tower, vision_config(config))
            return DrawnWeights(lambda: self.build_tower(plain).state_dict())

        @functools.cache  # the head has a prefix of its own
        def language() -> Weights:
            if not config.language_model.weights:
                return DrawnWeights(lambda: self.build(plain, tokenizer).state_dict())
            return stored_language(config.language_model, self.config_for(plain, tokenizer), len(tokenizer))

        def projector() -> Weights:
            whole = self.config_for(plain, tokenizer)
            if config.projector:
                return stored_projector(config.projector, whole)
            return DrawnWeights(lambda: drawn_projector(whole, config.seed).state_dict())

        parts = {TOWER: Part(tower)}
        if config.language_model.weights:
            parts |= {PROJECTOR: Part(projector), LANGUAGE_MODEL: Part(language, "model.")}
        return PartWeights(parts, Part(language))

    def shape(self, config: ModelConfig) -> ModelShape:
        """Sizes, with the parameters counted on the meta device."""
        vision = vision_config(config)
        with torch.device("meta"):
            model = self.skeleton(config, vocabulary=vocabulary_of(config, text_config(config)))
        side = config.image_size // int(vision.patch_size)
        image_tokens, feature_width = self.feature_shape(config)
        tower = model.model.vision_tower
        _require_features(config, tower, (image_tokens, feature_width))
        return model_shape(
            config,
            model,
            tower_layers_of(tower),
            vision,
            tower_tokens=side * side + class_tokens(str(vision.model_type)),
            image_tokens=image_tokens,
            feature_width=feature_width,
            patch_pixels=int(getattr(vision, "num_channels", 3)) * int(vision.patch_size) ** 2,
            behind_features=sum(map(count_parameters, _behind_features(tower, config))),
        )

    def build_tower(self, config: ModelConfig) -> nn.Module:
        """The tower alone, on the CPU in fp32 and in evaluation mode. Drawn weights depend on the seed only."""
        vision = vision_config(config)
        if config.tower.weights:
            stored = stored_tower(config.tower, vision)
            with no_init_weights():
                tower = AutoModel.from_config(vision, trust_remote_code=False).float()
            fill(tower, stored)
        else:
            torch.manual_seed(config.seed)
            tower = AutoModel.from_config(vision, trust_remote_code=False).float()
        _skip_behind_features(tower, config)
        return tower.eval()

    def save_processor(self, config: ModelConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        vision = vision_config(config)
        processor = LlavaProcessor(
            image_processor=self.image_processor(config),
            tokenizer=tokenizer,
            patch_size=int(vision.patch_size),
            vision_feature_select_strategy=SELECT_STRATEGY[config.feature_select],
            chat_template=tokenizer.chat_template,
            num_additional_image_tokens=class_tokens(str(vision.model_type)),
        )
        processor.save_pretrained(folder)


def _require_features(config: ModelConfig, tower: nn.Module, expected: tuple[int, int]) -> None:
    """Let the tower look at an image that has a shape only. Raises ConfigError for other features than expected."""
    look = (type(tower), repr(vars(tower.config)), config.image_size, config.feature_layer, config.feature_select)
    if look not in _FEATURES:
        image = torch.empty(1, IMAGE_CHANNELS, config.image_size, config.image_size, device="meta")
        _FEATURES[look] = tuple(tower_output(config, tower, image).shape[1:])
    feature = _FEATURES[look]
    if feature != expected:
        raise ConfigError(
            f"the tower gives {feature[0]} tokens of width {feature[1]} for an image of {config.image_size} pixels",
            expected=f"{expected[0]} of width {expected[1]}, one for each patch and one more only for the class "
            "token of CLIP and DINOv2",
            fix="use another tower, or set model.feature_select to drop_cls for a tower with a class token and to "
            "full for others",
        )


def _behind_features(tower: nn.Module, config: ModelConfig) -> list[nn.Module]:
    """Modules of the tower after the layer whose output is used: they never get a gradient."""
    layers = tower_layers_of(tower)
    used = config.feature_layer if config.feature_layer >= 0 else len(layers) + 1 + config.feature_layer
    last = [part for name, part in tower.named_modules() if name.rpartition(".")[2] in BEHIND_LAYERS]
    return [*layers[used:], *last]


def _skip_behind_features(tower: nn.Module, config: ModelConfig) -> None:
    """Make modules after the used features pass on their input; they keep their weights, for checks and exports."""
    layers = tower_layers_of(tower)
    one_for_several = len(layers) < int(tower.config.num_hidden_layers)  # in traces: it may be used, too
    for module in _behind_features(tower, config):
        if not (one_for_several and module in layers):
            module.forward = _pass_on


def _pass_on(hidden: Tensor, *_: object, **__: object) -> Tensor:
    return hidden
