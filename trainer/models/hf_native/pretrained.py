"""Loads configurations and models of transformers from the hub or a folder, with errors for users."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.models.published import settings_folder
from vlmpipe.trainer.models.safetensors_header import require_whole_folder
from vlmpipe.trainer.storage.hub.client import readable_hub_errors
from vlmpipe.trainer.storage.model_folders import CONFIG, bucket_address, local_folder, revision_of

# Bounds of images in settings of earlier releases, which go before the size of this one that says the same.
OLDER_BOUNDS = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
OWN_CODE = "contains custom code"  # in transformers' words
PICKLES = ("mm_projector.bin", "pytorch_model.bin", "pytorch_model.bin.index.json")

if not sys.stderr.isatty():
    transformers_logging.disable_progress_bar()  # in a log every redraw is a line, on Vertex AI an error


def load_pretrained(loader: Any, part: WeightsConfig, **arguments: object) -> Any:
    """`loader.from_pretrained`, models in fp32. Raises UserError (exit 69) when the files are out of reach.

    Raises as `local_folder` does for a folder that cannot be used. Code beside the weights is never run. A size among
    the arguments replaces that of the files, under whatever name they hold it.
    """
    is_model = loader not in (AutoConfig, AutoImageProcessor, AutoTokenizer)
    folder = local_folder(part.weights, part.revision, weights=is_model)
    if part.revision and folder is None:
        arguments["revision"] = part.revision
    if isinstance(size := arguments.get("size"), Mapping):
        arguments = {name: None for edge, name in OLDER_BOUNDS.items() if edge in size} | arguments
    if is_model:
        arguments |= {"dtype": torch.float32, "use_safetensors": True}  # other files are pickles
        if folder:
            require_whole_folder(folder)
            _require_safetensors(folder, part.weights)
    try:
        with readable_hub_errors(part.weights, part.revision, CONFIG):
            if folder is None and loader in (AutoImageProcessor, AutoTokenizer):
                folder = settings_folder(part)
                arguments.pop("revision", None)
            return loader.from_pretrained(folder or part.weights, trust_remote_code=False, **arguments)
    except (OSError, ValueError, RuntimeError) as error:
        if OWN_CODE in str(error):
            raise ConfigError(
                f"{part.weights} is a model with code of its own, which is never run here",
                expected=f"a model type that transformers {transformers.__version__} has",
                fix="take a copy of the model in transformers' own format, if there is one",
            ) from error
        raise UserError(
            f"cannot load {part.weights!r}: {str(error).splitlines()[0]}",
            expected="a hub id in reach, or a local folder with config, weights and (a tower) preprocessor_config.json",
            fix="correct the address, or download the model once and give its folder",
            code=ExitCode.UNAVAILABLE,
        ) from error


def part_config(part: WeightsConfig) -> PreTrainedConfig:
    """The transformers configuration that a part of the run file names or holds, for a model in fp32."""
    if part.weights:
        config = load_pretrained(AutoConfig, part)
    else:
        settings = dict(part.config)
        try:
            config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"model configuration {part.config} is not valid: {error}") from error
    set_dtype(config, torch.float32)
    return config


def set_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Set the type of weights in a configuration and those of its parts.

    transformers computes constants of a part, such as Gemma's scale of embeddings, in the type that its configuration
    names: a bf16 one would round them in a model that is in fp32 otherwise.
    """
    config.dtype = dtype
    for name in config.sub_configs:
        if (section := getattr(config, name, None)) is not None:
            set_dtype(section, dtype)


def pretrained_config(config: ModelConfig) -> PreTrainedConfig:
    """A copy of a native model's transformers configuration. Raises ConfigError for another family's."""
    whole = copy.deepcopy(part_config(config.tower))
    if whole.model_type != config.family:
        raise ConfigError(
            f"model.pretrained is a {whole.model_type} model, and model.family is {config.family}",
            expected=f"a configuration with model_type {config.family}",
        )
    return whole


def weights_description(config: ModelConfig) -> dict[str, object]:
    """Identifies the tower's weights, as plain JSON."""
    tower = config.tower
    if tower.weights:
        address = bucket_address(tower.weights)
        return {"weights": tower.weights, "revision": tower.revision or (revision_of(address) if address else "")}
    return {"config": tower.config, "seed": config.seed}


def _require_safetensors(folder: Path, weights: str) -> None:
    """Raise ConfigError for a folder whose weights are a pickle alone."""
    pickle = next((name for name in PICKLES if (folder / name).exists()), "")
    if pickle and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{weights} has no .safetensors file; {pickle} is a pickle, which may run code, and is not read",
            expected="weights in safetensors files",
            fix="take a repository that has them, or convert the pickle once where you trust it: from_pretrained, then "
            "save_pretrained",
        )


def load_complete(kind: type[PreTrainedModel], part: WeightsConfig, **arguments: object) -> nn.Module:
    """A model of transformers, with all its weights. Raises ConfigError where some are missing: they would be drawn."""
    model, info = load_pretrained(kind, part, output_loading_info=True, **arguments)
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"{part.weights} lacks {len(missing)} weights of {type(model).__name__}, for example {missing[0]}",
            expected="the whole model",
        )
    return model
