"""Whether a model's layers can be sharded over ranks, by the trainer's own check, cached."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.model import ModelConfig
from trainer.errors import ConfigError
from vlmpipe.planner.disk_cache import disk_cached


@dataclass(frozen=True)
class Verdict:
    """The fields of a ConfigError; empty for shardable models."""

    found: str = ""
    expected: str = ""
    fix: str = ""


def require_shardable(model: ModelConfig, ranks: int, *, cached: bool, sequence: bool) -> None:
    """As `trainer.strategies.tensor_parallel.plan.require_shardable`, but needs no torch for a cached verdict."""
    verdict = _verdict(model.model_dump_json(), ranks, cached=cached, sequence=sequence)
    if verdict.found:
        raise ConfigError(verdict.found, expected=verdict.expected, fix=verdict.fix)


@disk_cached
def _verdict(model: str, ranks: int, *, cached: bool, sequence: bool) -> Verdict:
    """`model` is the model section as JSON."""
    from trainer.strategies.tensor_parallel import plan as split

    try:
        split.require_shardable(ModelConfig.model_validate_json(model), ranks, cached=cached, sequence=sequence)
    except ConfigError as error:
        return Verdict(error.found, error.expected, error.fix)
    return Verdict()
