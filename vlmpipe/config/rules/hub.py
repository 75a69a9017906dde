"""Rules of register.hub: refuses models that could not be loaded from the Hugging Face hub, before training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.config.validation_errors import Problem, show

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields


def hub_problems(config: RunFields) -> Iterator[Problem]:
    """Yield a problem for an exported adapter whose base model is not on the Hugging Face hub."""
    model, base = config.model, config.model.pretrained
    if config.register_.hub is None or not model.exports_adapter or base is None or not base.weights:
        return
    if base.weights.startswith(("/", ".", "~", "gs:", "run:")):
        text = f"found with an adapter of {show(base.weights)}, which no reader of the hub can load"
        yield Problem("register.hub", f"{text}; expected model.pretrained.weights on the hub, or lora.export: merged")
