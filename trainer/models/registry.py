"""The table of model families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.gc_control import collector_off

if TYPE_CHECKING:
    from trainer.config.model import ModelConfig
    from trainer.models.base import Family


def family_of(config: ModelConfig) -> Family:
    """The family that `model.family` names. The import is here because a family needs torch."""
    with collector_off():
        family: Family
        if config.family == "llava":
            from trainer.models.llava.family import LlavaFamily

            family = LlavaFamily()
        elif config.family == "smolvlm":
            from trainer.models.smolvlm.family import SmolVlmFamily

            family = SmolVlmFamily()
        else:
            from trainer.models.qwen_vl.family import QwenVlFamily

            family = QwenVlFamily()
    return family
