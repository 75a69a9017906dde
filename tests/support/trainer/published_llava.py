"""A tiny LLaVA in the layout of llava-hf's repositories, and model sections that start from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    CLIPImageProcessorPil,
    LlavaConfig,
)

from vlmpipe.trainer.config.model import ModelConfig

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
PUBLISHED = {  # names of today -> those of llava-hf's repositories
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}
NUM_SHARDS = 3
START = {"features.cache": "off", "train.max_steps": 1, "train.micro_batch_size": 4}


def write_published(
    folder: Path, config: LlavaConfig, state: dict[str, torch.Tensor], num_shards: int = NUM_SHARDS
) -> None:
    folder.mkdir(exist_ok=True)
    stored = {}
    for name, tensor in state.items():
        new, old = next((new, old) for new, old in PUBLISHED.items() if name.startswith(new))
        stored[name.replace(new, old, 1)] = tensor.clone()
    names = sorted(stored)
    files = {f"model-{n + 1:05d}-of-{num_shards:05d}.safetensors": names[n::num_shards] for n in range(num_shards)}
    for file, members in files.items():
        save_file({name: stored[name] for name in members}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, members in files.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    content = config.to_dict() | {"architectures": ["LlavaForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(content, default=str))


def config_of(**changes: Any) -> ModelConfig:
    settings = {"tokenizer": "train:300", "image_size": 32, "feature_layer": -2, "feature_select": "drop_cls"}
    return ModelConfig.model_validate(settings | changes)


def whole_of(place: Path | str) -> dict[str, Any]:
    """The model section that starts from a whole LLaVA and trains all of it."""
    return config_of(pretrained={"weights": str(place)}, freeze=[]).model_dump(mode="json")


def with_processor(published: Path, folder: Path) -> Path:
    shutil.copytree(published, folder)
    CLIPImageProcessorPil(size={"height": 32, "width": 32}, do_center_crop=False).save_pretrained(folder)
    return folder
