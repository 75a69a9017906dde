"""Rules of samples that share the prefix of their images (`data.share_prefix`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.config.validation_errors import Problem

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields

FAMILIES = ("llava", "hf")
STRATEGIES = ("ddp", "fsdp")


def shared_prefix_problems(config: RunFields) -> Iterator[Problem]:
    """Yield the settings with which samples cannot share a prefix."""
    if not config.data.share_prefix:
        return
    yield from (Problem("data.share_prefix", f"found true with {reason}") for reason in _reasons(config))


def _reasons(config: RunFields) -> Iterator[str]:
    data, model, train = config.data, config.model, config.train
    if not data.pack:
        yield "data.pack false, which gives each sample its own sequence; expected pack true"
    if model.family not in FAMILIES:
        yield f"model.family {model.family}; expected {' or '.join(FAMILIES)}, or share_prefix false"
    if model.relevance:
        yield "model.relevance, whose kept image tokens depend on the question; expected one of the two"
    if model.lora and model.lora.dropout:
        yield "model.lora.dropout, which would be drawn once for all samples of a prefix; expected dropout 0"
    if train.in_pairs:
        yield f"train.objective {train.objective}; expected sft, or share_prefix false"
    if train.strategy not in STRATEGIES:
        yield f"train.strategy {train.strategy}; expected {' or '.join(STRATEGIES)}, or share_prefix false"
    if train.context_parallel > 1:
        yield f"train.context_parallel {train.context_parallel}; expected 1, or share_prefix false"
    if train.router_loss:
        yield "train.router_loss, which would count the tokens of a prefix once; expected one of the two"
    if train.trainer:
        yield "train.trainer, whose program packs by itself; expected share_prefix false"
