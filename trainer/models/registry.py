"""The model families by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from trainer.gc_control import collector_off

if TYPE_CHECKING:
    from trainer.config.model import ModelConfig
    from trainer.models.base import Family

# Module and class of each `model.family`. Named, not imported: a family needs torch, and its name does not.
FAMILIES = {
    "llava": ("trainer.models.llava.family", "LlavaFamily"),
    "smolvlm": ("trainer.models.smolvlm.family", "SmolVlmFamily"),
    "qwen2_5_vl": ("trainer.models.qwen_vl.family", "QwenVlFamily"),
    "qwen3_vl": ("trainer.models.qwen_vl.family", "QwenVlFamily"),
}


def family_of(config: ModelConfig) -> Family:
    """The family that `model.family` names, which is imported here."""
    module, name = FAMILIES[config.family]
    with collector_off():
        family: Family = getattr(importlib.import_module(module), name)()
    return family
