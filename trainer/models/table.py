"""The table of model families."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.model_config import ModelConfig
    from trainer.models.family import Family


def family_of(config: ModelConfig) -> Family:
    """The family that `model.family` names. The import is here because a family needs torch."""
    with _without_collecting():
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


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Importing torch and transformers makes a million objects that stay; to search them for garbage again and again is
    a sixth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
