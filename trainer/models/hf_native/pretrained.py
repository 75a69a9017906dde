"""Loads configurations and weights from the hub or a folder, with errors for people."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from trainer.config.model import WeightsConfig
from trainer.errors import ConfigError, ExitCode, UserError


def load_pretrained(loader: Any, part: WeightsConfig, **arguments: Any) -> Any:
    """`loader.from_pretrained` in fp32. Raises UserError (69) when the weights are out of reach."""
    if part.revision:
        arguments["revision"] = part.revision
    if loader not in (AutoConfig, AutoImageProcessor):
        arguments["dtype"] = torch.float32
    try:
        return loader.from_pretrained(part.weights, **arguments)
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


def load_tower(part: WeightsConfig, vision: PreTrainedConfig) -> nn.Module:
    """The vision weights of a tower, or of a dual encoder such as CLIP; every one of them must be there."""
    with torch.device("meta"):
        tower_class = type(AutoModel.from_config(vision))
    tower, info = load_pretrained(tower_class, part, config=vision, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"model.tower.weights {part.weights!r} lacks {len(missing)} weights of {tower_class.__name__}, "
            f"for example {missing[0]}",
            expected="a vision model or a dual encoder such as CLIP or SigLIP",
        )
    return tower.eval()


class WeightFiles:
    """The safetensors files of pretrained weights, tensor by tensor in fp32."""

    def __init__(self, part: WeightsConfig) -> None:
        self._part = part

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        return tensor.float() if tensor.is_floating_point() else tensor

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Tensor -> file; empty where the weights are kept in another form."""
        if single := self._file(SAFE_WEIGHTS_NAME):
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        if index := self._file(SAFE_WEIGHTS_INDEX_NAME):
            weight_map = json.loads(index.read_text())["weight_map"]
            found = {file: self._file(file) for file in set(weight_map.values())}
            return {key: path for key, file in weight_map.items() if (path := found[file])}
        return {}

    def _file(self, name: str) -> Path | None:
        path = cached_file(
            self._part.weights,
            name,
            revision=self._part.revision or None,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return Path(path) if path else None


class LanguageWeights:
    """Weights of a pretrained language model in fp32, with a row for each of `num_tokens` tokens.

    `read` takes them one at a time from the safetensors files where these hold the names that the model has now; a
    model in another form is loaded whole, and held until this object goes.
    """

    def __init__(self, part: WeightsConfig, num_tokens: int) -> None:
        self._part, self._num_tokens, self._files = part, num_tokens, WeightFiles(part)

    def read(self, name: str) -> Tensor:
        """`head` (the output rows), or a weight by its name in the model below the head, such as `norm.weight`."""
        if name == "head" and "lm_head.weight" not in self._files and self._is_tied:
            name = "embed_tokens.weight"
        key = "lm_head.weight" if name == "head" else f"model.{name}"
        tensor = self._files.read(key) if key in self._files else self._whole[name]
        return with_rows(tensor, self._num_tokens) if name in ("head", "embed_tokens.weight") else tensor

    @cached_property
    def _is_tied(self) -> bool:
        config = load_pretrained(AutoConfig, self._part)
        return bool(getattr(getattr(config, "text_config", config), "tie_word_embeddings", False))

    @cached_property
    def _whole(self) -> dict[str, Tensor]:
        model = load_pretrained(AutoModelForCausalLM, self._part)
        return {**model.model.state_dict(), "head": model.get_output_embeddings().weight.detach()}


def with_rows(weight: Tensor, count: int) -> Tensor:
    """Rows of the tokens that the tokenizer has beyond the model's: the mean of all rows, as good a start as any.

    In double precision, so that it does not depend on the number of threads that add up.
    """
    missing = count - len(weight)
    if missing <= 0:
        return weight
    mean = weight.double().mean(dim=0, keepdim=True).to(weight.dtype)
    return torch.cat([weight, mean.expand(missing, -1)])


def save_model_settings(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the configuration of the model and of its generation, with the tokenizer's own control tokens."""
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.config.dtype, model.config.architectures = "float32", [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
