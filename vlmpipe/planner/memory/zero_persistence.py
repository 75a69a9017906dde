"""Small weights that ZeRO-3 keeps unsharded on every rank (`stage3_param_persistence_threshold`)."""

from __future__ import annotations

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.disk_cache import disk_cached
from vlmpipe.planner.workload import is_cached
from vlmpipe.trainer.sizing.model_shape import ModelShape


def persistent_elements(config: RunConfig, shape: ModelShape) -> int:
    """Persistent elements where a user has set the threshold, else 0: those of the trainer's own are biases and norms.

    Layers are equal, so models of one and of two of them give any number.
    """
    threshold = config.train.deepspeed.get("zero_optimization", {}).get("stage3_param_persistence_threshold")
    if threshold is None or config.train.strategy != "zero3":
        return 0
    model = config.model.model_dump_json()
    single, two = (
        _small(model, shape.vocabulary, layers, int(threshold), cached=is_cached(config)) for layers in (1, 2)
    )
    return single + (shape.language.layers - 1) * (two - single)


@disk_cached
def _small(model: str, vocabulary: int, language_layers: int, threshold: int, *, cached: bool) -> int:
    import torch

    from vlmpipe.trainer.config.model import ModelConfig
    from vlmpipe.trainer.models.registry import family_of

    section = ModelConfig.model_validate_json(model)
    family = family_of(section)
    with torch.device("meta"):
        skeleton = family.skeleton(section, vocabulary=vocabulary, language_layers=language_layers)
    module = family.training_module(section, skeleton, cached=cached)
    return sum(parameter.numel() for parameter in module.parameters() if parameter.numel() <= threshold)
