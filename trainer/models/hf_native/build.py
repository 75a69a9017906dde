"""Builds native transformers models: the whole model, or its vision tower alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig
from transformers.initialization import no_init_weights

from trainer.config.model import IMAGE_TOKEN, ModelConfig
from trainer.errors import ConfigError
from trainer.models.hf_native.pretrained import part_config, save_model_settings
from trainer.models.hf_native.weights import InitialWeights, PretrainedModel, StoredWeights
from trainer.models.layers.lora import without_adapters


def pretrained_config(config: ModelConfig) -> PreTrainedConfig:
    """The model's transformers configuration. Raises ConfigError for that of another family."""
    whole = copy.deepcopy(part_config(config.tower))
    if whole.model_type != config.family:
        raise ConfigError(
            f"model.pretrained is a {whole.model_type} model, and model.family is {config.family}",
            expected=f"a configuration with model_type {config.family}",
        )
    return whole


def config_for(config: ModelConfig, tokenizer: Any) -> PreTrainedConfig:
    """The same with a place for each of the tokenizer's tokens, and with its control tokens."""
    whole = pretrained_config(config)
    text = whole.text_config
    text.vocab_size = max(len(tokenizer), text.vocab_size if config.tower.weights else 0)
    text.pad_token_id, text.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    text.bos_token_id = tokenizer.bos_token_id
    whole.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    return whole


def description(config: ModelConfig) -> dict[str, Any]:
    """Which weights the tower has, as plain JSON."""
    whole = config.tower
    if whole.weights:
        return {"weights": whole.weights, "revision": whole.revision}
    return {"config": whole.config, "seed": config.seed}


def build(config: ModelConfig, model: PretrainedModel, whole: PreTrainedConfig, num_tokens: int) -> nn.Module:
    """The whole model on the CPU in fp32: pretrained where weights are named, else drawn from the seed."""
    torch.manual_seed(config.seed)
    if config.tower.weights:
        with no_init_weights():
            built: nn.Module = model.kind(whole).float()
        built.tie_weights()  # left out with the drawing of weights
        weights = StoredWeights(config.tower, model, num_tokens)
        with torch.no_grad():
            for name, tensor in built.state_dict().items():
                tensor.copy_(weights.read(name))
    else:
        built = model.kind(whole).float()
        built.get_submodule(model.tower.removesuffix(".")).load_state_dict(_drawn_vision(config).state_dict())
    torch.manual_seed(config.seed)  # adapters start the same whatever was drawn before them
    return built


def initial_weights(
    config: ModelConfig, model: PretrainedModel, num_tokens: int, make: Callable[[ModelConfig], nn.Module]
) -> InitialWeights:
    """`make` builds the model."""
    plain = without_adapters(config)
    return InitialWeights(plain, model, num_tokens, lambda: dict(make(plain).state_dict()))


def build_vision(config: ModelConfig, model: PretrainedModel) -> nn.Module:
    """The vision encoder alone, on the CPU in fp32. Random weights depend on the seed only."""
    if not config.tower.weights:
        return _drawn_vision(config)
    with torch.device("meta"):
        vision = _vision(config)
    weights = StoredWeights(config.tower, model, 0)
    state: dict[str, Tensor] = {name: weights.read(f"{model.tower}{name}") for name in vision.state_dict()}
    with no_init_weights():
        vision = _vision(config).float()
    vision.load_state_dict(state)
    return vision


def save_settings(model: nn.Module, tokenizer: Any, image_processor: Any, folder: Path) -> None:
    """Write all that plain `from_pretrained` needs but the weights: configuration, tokenizer and image processor."""
    save_model_settings(model, tokenizer, folder)
    tokenizer.save_pretrained(folder)
    image_processor.save_pretrained(folder)


def _vision(config: ModelConfig) -> nn.Module:
    vision: nn.Module = AutoModel.from_config(pretrained_config(config).vision_config)
    return vision


def _drawn_vision(config: ModelConfig) -> nn.Module:
    torch.manual_seed(config.seed)
    return _vision(config).float()
