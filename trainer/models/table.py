"""The table of model families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.garbage import collector_off

if TYPE_CHECKING:
    from trainer.model_config import ModelConfig
    from trainer.models.family import Family


def family_of(config: ModelConfig) -> Family:
    """The family that `model.family` names. The import is here because a family needs torch."""
    with collector_off():
        family: Family
        if config.family == "llava":
            from trainer.models.llava import LlavaFamily

            family = LlavaFamily()
        elif config.family == "smolvlm":
            from trainer.models.smolvlm import SmolVlmFamily

            family = SmolVlmFamily()
        else:
            from trainer.models.qwen_vl import QwenVlFamily

            family = QwenVlFamily()
    return family
