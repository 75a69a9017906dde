"""Models that can be split into pipeline stages."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.pipeline_partition import Stage


def require_stages(config: ModelConfig) -> None:
    """Raise ConfigError for a model that cannot be split into stages. Builds it of fake tensors only."""
    family = family_of(config)
    vocabulary = family.shape(config).vocabulary
    with FakeTensorMode():
        model = family.skeleton(config, vocabulary=vocabulary)
        blocks = family.blocks(family.training_module(config, model, cached=False))
        blocks.reduce_to(Stage(range(1), is_first=True, is_last=False))
