"""Bounds of the gate on gain and forgetting of runs that ask no start weights, or no retention probe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.config.validation_errors import Problem
from vlmpipe.trainer.config.model import ModelConfig

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields


def asks_start(config: RunFields, *, is_later_stage: bool) -> bool:
    """Return whether the evaluation asks the start weights. A later stage starts from the export of the one before."""
    return not _obstacle(config, is_later_stage=is_later_stage)


def baseline_problems(config: RunFields, *, is_later_stage: bool) -> Iterator[Problem]:
    """Yield settings of a run file to check or start that need a baseline which its run does not have."""
    retention, obstacle = config.evaluate.retention, _obstacle(config, is_later_stage=is_later_stage)
    can_ask = any(file.format != "coco-captions" for file in config.evaluate.benchmarks) or bool(retention.prompts)
    if retention.probe == "auto" and not can_ask:
        text = "found no prompts and no evaluate.benchmarks but captions: the probe has no question; expected some, or"
        yield Problem("evaluate.retention.prompts", f"{text} evaluate.retention.probe off")
    if config.gate.min_gain is not None and obstacle:
        yield Problem("gate.min_gain", f"found {config.gate.min_gain:g}, {obstacle}, or null")
    if config.gate.max_forgetting is not None:
        bound = f"found {config.gate.max_forgetting:g}"
        if obstacle:
            yield Problem("gate.max_forgetting", f"{bound}, {obstacle}, or null")
        elif retention.probe == "off":
            text = f"{bound} with evaluate.retention.probe off, which asks nothing; expected auto, or null here"
            yield Problem("gate.max_forgetting", text)


def _obstacle(config: RunFields, *, is_later_stage: bool) -> str:
    """Why there is no baseline, and the setting to use instead; empty where there is one."""
    trainer = config.train.trainer
    if trainer and trainer.evaluate_command:
        return "but train.trainer.evaluate_command evaluates and asks no start weights; expected our evaluation"
    if config.evaluate.baseline == "off":
        return "but evaluate.baseline is off; expected auto"
    if drawn := _drawn(config.model, is_later_stage=is_later_stage):
        return f"but training starts from random weights: model.{drawn} names none; expected weights"
    return ""


def _drawn(model: ModelConfig, *, is_later_stage: bool) -> str:
    return "" if is_later_stage else next(iter(model.drawn_parts), "")
