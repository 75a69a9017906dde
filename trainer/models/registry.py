"""Model families by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vlmpipe.trainer.gc_control import collector_off
from vlmpipe.trainer.hooks.features import features_of

if TYPE_CHECKING:
    from vlmpipe.trainer.config.model import ModelConfig
    from vlmpipe.trainer.models.base import Family

# `model.family` -> module and class, imported on use because families import torch.
FAMILIES = {
    "llava": ("vlmpipe.trainer.models.llava.family", "LlavaFamily"),
    "smolvlm": ("vlmpipe.trainer.models.hf.family", "HfFamily"),
    "qwen2_5_vl": ("vlmpipe.trainer.models.hf.family", "HfFamily"),
    "qwen3_vl": ("vlmpipe.trainer.models.hf.family", "HfFamily"),
    "hf": ("vlmpipe.trainer.models.hf.family", "HfFamily"),
}


def family_of(config: ModelConfig) -> Family:
    in_its_place = (feature.family for feature in features_of(config, "model") if feature.family)
    module, name = next(in_its_place, FAMILIES[config.family])
    with collector_off():
        family: Family = getattr(importlib.import_module(module), name)()
    return family
