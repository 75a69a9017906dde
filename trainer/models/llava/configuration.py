"""transformers' configurations of a LLaVA's parts, and whether they fit each other and the run file."""

from __future__ import annotations

import copy

from transformers import LlavaConfig, PreTrainedConfig

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.hf_native.pretrained import part_config

SELECT_STRATEGY = {"full": "full", "drop_cls": "default"}  # the run file's word -> Hugging Face's


def vision_config(config: ModelConfig) -> PreTrainedConfig:
    """The tower's transformers configuration. Raises UserError for a hub id out of reach or a model without vision."""
    whole = part_config(config.tower)
    vision = copy.deepcopy(getattr(whole, "vision_config", whole))
    if not hasattr(vision, "patch_size"):
        raise ConfigError(
            f"model.tower is {whole.model_type!r}, which is no vision tower",
            expected="a vision model or a dual encoder such as CLIP or SigLIP",
        )
    if config.tower.weights and vision.image_size != config.image_size:
        raise ConfigError(
            f"model.image_size is {config.image_size}, but the tower's image_size is {vision.image_size}",
            fix=f"set model.image_size to {vision.image_size}",
        )
    vision.image_size = config.image_size
    if hasattr(vision, "use_mask_token"):
        vision.use_mask_token = False  # of DINOv2's own training; without a gradient, it would stop DDP
    return vision


def text_config(config: ModelConfig) -> PreTrainedConfig:
    whole = part_config(config.language_model)
    text = copy.deepcopy(getattr(whole, "text_config", whole))
    if isinstance(whole, LlavaConfig):
        text.tie_word_embeddings = whole.tie_word_embeddings
    return text


def counted_from_the_end(layer: int, vision: PreTrainedConfig) -> int:
    """Return the layer counted from the end: transformers mistakes layer 0 (the embeddings) for unset."""
    return layer if layer < 0 else layer - (int(vision.num_hidden_layers) + 1)


def projector_settings(config: ModelConfig, vision: PreTrainedConfig, text: PreTrainedConfig) -> dict[str, object]:
    """Settings of a pretrained projector. Raises ConfigError where the other parts are not what it was trained with."""
    if config.projector is None:
        return {}
    whole, source = part_config(config.projector), config.projector.weights
    if not isinstance(whole, LlavaConfig):
        raise ConfigError(
            f"{source} is a {whole.model_type} model, which has no projector to take",
            expected="a LLaVA (model_type llava), or an export of a vlmpipe run of family llava",
        )
    layer, layers = whole.vision_feature_layer, int(whole.vision_config.num_hidden_layers)
    if not isinstance(layer, int):
        raise ConfigError(
            f"the projector of {source} joins the tower's layers {layer}", expected="one that takes a single layer"
        )
    select = whole.vision_feature_select_strategy
    theirs = {
        "feature_layer": layer if layer >= 0 else layer + layers + 1,
        "feature_select": next((ours for ours, name in SELECT_STRATEGY.items() if name == select), select),
    }
    depth = int(vision.num_hidden_layers)
    ours = {"feature_layer": config.feature_layer % (depth + 1), "feature_select": config.feature_select}
    for name, value in theirs.items():
        if ours[name] != value:
            requested = layer if name == "feature_layer" else value
            raise ConfigError(
                f"model.{name} is {getattr(config, name)}, but the projector of {source} was trained with {requested}",
                fix=f"set model.{name} to {requested}",
            )
    widths = int(whole.vision_config.hidden_size), int(whole.text_config.hidden_size)
    if widths != (int(vision.hidden_size), int(text.hidden_size)):
        raise ConfigError(
            f"the projector of {source} leads from width {widths[0]} to {widths[1]}, but this tower's features have "
            f"{vision.hidden_size} and this language model's embeddings {text.hidden_size}",
            expected="a projector that was trained with models of these widths",
        )
    return {
        "projector_hidden_act": whole.projector_hidden_act,
        "multimodal_projector_bias": whole.multimodal_projector_bias,
    }
