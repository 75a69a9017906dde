"""Rules of quantized exports (`evaluate.quantize`), found before training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.config.validation_errors import Problem
from vlmpipe.trainer.hooks.rules import obstacles_to

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields


def quantize_problems(config: RunFields) -> Iterator[Problem]:
    """Yield the settings with which no quantized export can be made or asked."""
    asked = config.evaluate.quantize
    if asked:
        yield from (Problem("evaluate.quantize", f"found with {reason}") for reason in _reasons(config))
    form = config.deploy.quantized if config.deploy else None
    if form and (asked is None or form not in asked.formats):
        there = " and ".join(asked.formats) if asked else "none"
        text = f"found {form}, and evaluate.quantize.formats has {there}; expected it there, or null here"
        yield Problem("deploy.quantized", text)
    if form and config.register_.serving:
        text = "with register.serving, a container that chooses by itself what it serves; expected null here"
        yield Problem("deploy.quantized", f"found {form} {text}")


def _reasons(config: RunFields) -> Iterator[str]:
    if config.model.exports_adapter:
        yield "model.lora.export adapter, beside which there is no whole model; expected merged, or null here"
    yield from obstacles_to("quantized_export", config)
    if config.train.trainer:
        yield "train.trainer, whose export is its own; expected null here, and a program that quantizes it"
    for section in ("sweep", "tune"):
        if getattr(config, section):
            yield f"{section}, whose trainings register no model; expected null here, and it in the run of the best"
