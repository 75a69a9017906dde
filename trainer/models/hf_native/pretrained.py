"""Loads configurations and models of transformers from the hub or a folder, with errors for users."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoModel, PreTrainedConfig

from trainer.config.model import ModelConfig, WeightsConfig
from trainer.errors import ConfigError, ExitCode, UserError
from trainer.storage.regular_files import require_regular_files


def load_pretrained(loader: Any, part: WeightsConfig, **arguments: Any) -> Any:
    """`loader.from_pretrained`, models in fp32. Raises UserError (exit 69) when the files are out of reach.

    Raises DataError (65) for a folder with a file that is no regular file. Code beside the weights is never run.
    """
    require_regular_files(Path(part.weights).expanduser())
    if part.revision:
        arguments["revision"] = part.revision
    if loader not in (AutoConfig, AutoImageProcessor):
        arguments["dtype"] = torch.float32
    try:
        return loader.from_pretrained(part.weights, trust_remote_code=False, **arguments)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"cannot load {part.weights!r}: {str(error).splitlines()[0]}",
            expected="a hub id in reach, or a local folder with config, weights and (a tower) preprocessor_config.json",
            fix="download it once and give the folder, or check the network and HF_TOKEN",
            code=ExitCode.UNAVAILABLE,
        ) from error


def part_config(part: WeightsConfig) -> PreTrainedConfig:
    """The transformers configuration that a part of the run file names or holds."""
    if part.weights:
        return load_pretrained(AutoConfig, part)
    settings = dict(part.config)
    try:
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model configuration {part.config} is not valid: {error}") from error


def pretrained_config(config: ModelConfig) -> PreTrainedConfig:
    """A copy of a native model's transformers configuration. Raises ConfigError for another family's."""
    whole = copy.deepcopy(part_config(config.tower))
    if whole.model_type != config.family:
        raise ConfigError(
            f"model.pretrained is a {whole.model_type} model, and model.family is {config.family}",
            expected=f"a configuration with model_type {config.family}",
        )
    return whole


def weights_description(config: ModelConfig) -> dict[str, Any]:
    """Identifies the tower's weights, as plain JSON."""
    tower = config.tower
    if tower.weights:
        return {"weights": tower.weights, "revision": tower.revision}
    return {"config": tower.config, "seed": config.seed}


def load_tower(part: WeightsConfig, vision: PreTrainedConfig) -> nn.Module:
    """A vision model, or the vision half of a dual encoder such as CLIP. Raises ConfigError for missing weights."""
    with torch.device("meta"):
        tower_class = type(AutoModel.from_config(vision, trust_remote_code=False))
    tower, info = load_pretrained(tower_class, part, config=vision, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"model.tower.weights {part.weights!r} lacks {len(missing)} weights of {tower_class.__name__}, "
            f"for example {missing[0]}",
            expected="a vision model or a dual encoder such as CLIP or SigLIP",
        )
    return tower.eval()
