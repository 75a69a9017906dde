"""The `llava` family: any Hugging Face vision tower, a two-layer projector and any causal language model.

The model is transformers' own `LlavaForConditionalGeneration`, so an export loads with plain `from_pretrained`.
Projected features enter through the library's hook for precomputed encoder outputs, whether the tower ran now or long
ago.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModel,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedConfig,
    SiglipImageProcessorPil,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from trainer.config.model import ModelConfig
from trainer.errors import ConfigError
from trainer.models.fixed_image_model import (
    SquareFamily,
    Wiring,
    square_skeleton,
    tower_layers_of,
)
from trainer.models.hf_native import build as native
from trainer.models.hf_native.pretrained import (
    LanguageWeights,
    load_pretrained,
    load_tower,
    part_config,
    save_model_settings,
)
from trainer.models.image_tokens import square_tokens
from trainer.models.layers.lora import freeze_and_adapt, without_adapters
from trainer.models.layers.parameter_counts import (
    count_parameters,
    model_shape,
    stack_of,
    vocabulary_of,
)
from trainer.sizing.model_shape import ModelShape

if not sys.stderr.isatty():
    transformers_logging.disable_progress_bar()  # in a log, every redraw of a bar is a line

SELECT_STRATEGY = {"full": "full", "drop_cls": "default"}  # our word -> Hugging Face's
# What the names of weights begin with in the whole model.
TOWER = "model.vision_tower."
LANGUAGE_MODEL = "model.language_model."
HEAD = "lm_head.weight"


def tower_output(config: ModelConfig, tower: nn.Module, pixel_values: Tensor) -> Tensor:
    """Hidden states that feed the projector: (images, 3, side, side) -> (images, tokens, tower_hidden)."""
    hidden = tower(pixel_values, output_hidden_states=True).hidden_states[config.feature_layer]
    return hidden[:, 1:] if config.feature_select == "drop_cls" else hidden


WIRING = Wiring("vision_tower", "multi_modal_projector", "language_model", tower_output, True)


class LlavaFamily(SquareFamily):
    """See `trainer.models.base.Family`."""

    wiring = WIRING

    def image_tokens(self, config: ModelConfig, width: int, height: int) -> int:
        """Language-model tokens of one image. Constant: every image is resized to one square."""
        vision = vision_config(config)
        return square_tokens(config, str(vision.model_type), int(vision.patch_size))

    def feature_shape(self, config: ModelConfig) -> tuple[int, int]:
        """Of one image (tokens, tower_hidden): all images are of one size."""
        tokens = self.image_tokens(config, config.image_size, config.image_size)
        return tokens, int(vision_config(config).hidden_size)

    def feature_description(self, config: ModelConfig) -> dict[str, Any]:
        """All that decides what the frozen tower outputs for given image bytes, as plain JSON."""
        description = {"layer": config.feature_layer, "select": config.feature_select, "image_size": config.image_size}
        return {**description, **native.description(config)}

    def image_processor(self, config: ModelConfig) -> Any:
        """Resize to the square, then rescale and normalise as the tower was trained with (or as its class does).

        Always by Pillow: a machine with torchvision must give the pixels of one without, or cached features differ.
        """
        square = {"size": {"height": config.image_size, "width": config.image_size}, "do_center_crop": False}
        if config.tower.weights:
            return load_pretrained(AutoImageProcessor, config.tower, backend="pil", **square)
        if vision_config(config).model_type == "clip_vision_model":
            return CLIPImageProcessorPil(**square)
        return SiglipImageProcessorPil(size=square["size"])

    def build(self, config: ModelConfig, tokenizer: Any) -> nn.Module:
        """The whole model on the CPU in fp32: pretrained parts where weights are named, else drawn from the seed."""
        whole = self._config_for(config, tokenizer)
        torch.manual_seed(config.seed)
        model = LlavaForConditionalGeneration(whole).float()
        model.model.vision_tower.load_state_dict(self.build_tower(config).state_dict())
        if config.language_model.weights:
            _load_language_model(model, LanguageWeights(config.language_model, len(tokenizer)))
        torch.manual_seed(config.seed)  # adapters start the same whatever was drawn before them
        return _freeze(model, config, is_whole=True)

    def blueprint(self, config: ModelConfig, tokenizer: Any) -> nn.Module:
        """What `build` makes, without numbers: on the meta device."""
        with torch.device("meta"), no_init_weights():
            model = LlavaForConditionalGeneration(self._config_for(config, tokenizer)).float()
            return _freeze(model, config, is_whole=True)

    def initial_weights(self, config: ModelConfig, tokenizer: Any) -> InitialWeights:
        return InitialWeights(self, without_adapters(config), tokenizer)

    def skeleton(
        self,
        config: ModelConfig,
        *,
        vocabulary: int,
        language_layers: int | None = None,
        one_inner_tower_layer: bool = False,
    ) -> nn.Module:
        """What `build` makes, but for the numbers in it: for the meta device and for tensors without data.

        `one_inner_tower_layer`: the tower's layers between the first and the last are one, which is quicker to make.
        """
        whole = self._whole_config(config, _text_config(config), image_token=vocabulary - 1)
        model = square_skeleton(
            LlavaForConditionalGeneration, whole, WIRING, vocabulary, language_layers, one_inner_tower_layer
        )
        return _freeze(model, config, is_whole=language_layers is None and not one_inner_tower_layer)

    def shape(self, config: ModelConfig) -> ModelShape:
        """Sizes, with the parameters counted on the meta device."""
        vision, text = vision_config(config), _text_config(config)
        with torch.device("meta"):
            model = self.skeleton(config, vocabulary=vocabulary_of(config, text))
        tower = model.model.vision_tower
        side = config.image_size // int(vision.patch_size)
        return model_shape(
            config,
            model,
            tower_layers_of(tower),
            tower_parameters=count_parameters(tower),
            projector_parameters=count_parameters(model.model.multi_modal_projector),
            tower=stack_of(vision, tower_layers_of(tower)[0]),
            tower_tokens=side * side + (1 if vision.model_type == "clip_vision_model" else 0),
            image_tokens=self.image_tokens(config, config.image_size, config.image_size),
            feature_width=self.feature_shape(config)[1],
            patch_pixels=int(getattr(vision, "num_channels", 3)) * int(vision.patch_size) ** 2,
            behind_features=sum(count_parameters(part) for part in _behind_the_features(tower, config)),
        )

    def build_tower(self, config: ModelConfig) -> nn.Module:
        """The tower alone, on the CPU in fp32 and in evaluation mode. Random weights depend on the seed only."""
        vision = vision_config(config)
        if config.tower.weights:
            return load_tower(config.tower, vision)
        torch.manual_seed(config.seed)
        return AutoModel.from_config(vision).float().eval()

    def save_settings(self, config: ModelConfig, model: nn.Module, tokenizer: Any, folder: Path) -> None:
        """Write all that plain `from_pretrained` needs but the weights: configuration, tokenizer and processor."""
        save_model_settings(model, tokenizer, folder)
        processor = LlavaProcessor(
            image_processor=self.image_processor(config),
            tokenizer=tokenizer,
            patch_size=int(vision_config(config).patch_size),
            vision_feature_select_strategy=SELECT_STRATEGY[config.feature_select],
            chat_template=tokenizer.chat_template,
            num_additional_image_tokens=1 if vision_config(config).model_type == "clip_vision_model" else 0,
        )
        processor.save_pretrained(folder)

    def _config_for(self, config: ModelConfig, tokenizer: Any) -> LlavaConfig:
        text = _text_config(config)
        text.vocab_size = max(len(tokenizer), text.vocab_size if config.language_model.weights else 0)
        text.pad_token_id, text.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
        text.bos_token_id = tokenizer.bos_token_id
        return self._whole_config(config, text, image_token=tokenizer.convert_tokens_to_ids("<image>"))

    def _whole_config(self, config: ModelConfig, text: PreTrainedConfig, *, image_token: int) -> LlavaConfig:
        vision = vision_config(config)
        return LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=image_token,
            vision_feature_layer=_counted_from_the_end(config.feature_layer, vision),
            vision_feature_select_strategy=SELECT_STRATEGY[config.feature_select],
            image_seq_length=self.image_tokens(config, config.image_size, config.image_size),
            tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        )

    def load(self, folder: Path) -> nn.Module:
        """An exported model."""
        return LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def vision_config(config: ModelConfig) -> PreTrainedConfig:
    """The tower's transformers configuration. Raises UserError for a hub id out of reach or a model without vision."""
    whole = part_config(config.tower)
    vision = copy.deepcopy(getattr(whole, "vision_config", whole))
    if not hasattr(vision, "patch_size"):
        raise ConfigError(
            f"model.tower is {whole.model_type!r}, which is no vision tower",
            expected="a vision model or a dual encoder such as CLIP or SigLIP",
        )
    vision.image_size = config.image_size
    return vision


def _text_config(config: ModelConfig) -> PreTrainedConfig:
    whole = part_config(config.language_model)
    return copy.deepcopy(getattr(whole, "text_config", whole))


def _load_language_model(model: nn.Module, weights: LanguageWeights) -> None:
    for name, tensor in model.model.language_model.state_dict().items():
        tensor.copy_(weights.read(name))
    model.lm_head.weight.detach().copy_(weights.read("head"))


def _counted_from_the_end(layer: int, vision: PreTrainedConfig) -> int:
    """The same hidden state as a negative number: transformers takes layer 0 (the embeddings) for none asked for."""
    return layer if layer < 0 else layer - (int(vision.num_hidden_layers) + 1)


def _freeze(model: nn.Module, config: ModelConfig, *, is_whole: bool) -> nn.Module:
    unused = _behind_the_features(model.model.vision_tower, config)
    return freeze_and_adapt(model, config, unused=unused, is_whole=is_whole)


def _behind_the_features(tower: nn.Module, config: ModelConfig) -> list[nn.Module]:
    """Parts of the tower that come after the layer whose output is used: they never get a gradient."""
    layers = tower_layers_of(tower)
    used = config.feature_layer if config.feature_layer >= 0 else len(layers) + 1 + config.feature_layer
    last = [part for name, part in tower.named_modules() if name.rpartition(".")[2] in ("post_layernorm", "head")]
    return [*layers[used:], *last]


class InitialWeights:
    """See `trainer.models.base.Weights`. Equal to what `build` puts there.

    The tower is held whole while it is read, a pretrained language model is not. Weights that are drawn at random
    depend on all those drawn before them, so for these the model is built once: only small models have frozen ones.
    """

    def __init__(self, family: LlavaFamily, config: ModelConfig, tokenizer: Any) -> None:
        self._family, self._config, self._tokenizer = family, config, tokenizer
        self._held: tuple[str, dict[str, Tensor]] = ("", {})
        self._language = LanguageWeights(config.language_model, len(tokenizer))

    def read(self, name: str) -> Tensor:
        if name.startswith(TOWER):
            return self._hold("tower")[name.removeprefix(TOWER)]
        if self._config.language_model.weights and (name == HEAD or name.startswith(LANGUAGE_MODEL)):
            return self._language.read("head" if name == HEAD else name.removeprefix(LANGUAGE_MODEL))
        return self._hold("drawn")[name]

    def _hold(self, part: str) -> dict[str, Tensor]:
        if self._held[0] != part:
            self._held = ("", {})  # let go of the other first
            tower = part == "tower"
            module = (
                self._family.build_tower(self._config) if tower else self._family.build(self._config, self._tokenizer)
            )
            self._held = (part, dict(module.state_dict()))
        return self._held[1]
