"""The table of model families."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.models.family import Family


def family_of(config: ModelConfig) -> Family:
    """The family that `model.family` names. The import is here because a family needs torch."""
    from trainer.models.llava import LlavaFamily

    families: dict[str, type[Family]] = {"llava": LlavaFamily}
    return families[config.family]()
