"""The model's sizes from its configuration: no weights are downloaded, parameters are counted on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipelines.config import RunConfig
from pipelines.planner.catalog import load_models
from trainer.config import ModelConfig, WeightsConfig
from trainer.models.shape import ModelShape


@dataclass(frozen=True)
class Architecture:
    """`model` is the run file's model section with the configurations in place of the weights that they belong to."""

    model: ModelConfig
    shape: ModelShape
    origin: str


def architecture(config: RunConfig) -> Architecture:
    """Sizes of the run file's model. Imports torch and transformers, which takes seconds.

    A configuration comes from the run file, a local folder, the Hugging Face cache, the catalogue of known models, or
    the hub, in this order. Raises UserError (69) for a hub id that none of them knows while the hub is out of reach.
    """
    tower, tower_from = _configuration(config.model.tower)
    language, language_from = _configuration(config.model.language_model)
    model = config.model.model_copy(update={"tower": tower, "language_model": language})
    from trainer.models.table import family_of

    origins = dict.fromkeys((tower_from, language_from))
    return Architecture(model, family_of(model).shape(model), " and ".join(origins))


def _configuration(part: WeightsConfig) -> tuple[WeightsConfig, str]:
    if part.config:
        return part, "the run file"
    if Path(part.weights).expanduser().is_dir():
        return part, "a local folder"
    if _in_cache(part):
        return part, "the Hugging Face cache"
    known = load_models().get(part.weights)
    if known:
        return WeightsConfig(config=dict(known.config)), f"the catalogue of {known.date}"
    return part, "the Hugging Face hub"


def _in_cache(part: WeightsConfig) -> bool:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(part.weights, "config.json", revision=part.revision or None)
    return isinstance(found, str)
