"""Rules of features: what a run file with a feature cannot ask for as well, its warnings and the plan's notes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel

from vlmpipe.trainer.config.base import asked_features
from vlmpipe.trainer.hooks import table

if TYPE_CHECKING:
    from vlmpipe.trainer.config.job import JobSections
    from vlmpipe.trainer.config.model import ModelConfig

# What a run may ask for that a feature can rule out.
Use = Literal[
    "deploy", "endpoint", "lmms_eval", "native_video", "quantized_export", "replay", "shared_prefix", "shared_prompts"
]


class FeatureRules:
    """Base of a feature's rules, which are `RULES` of the module `rules` in its room. That module imports no torch."""

    obstacles: ClassVar[Mapping[Use, str]] = {}  # reasons in the words of the message for that use
    draws_weights = False  # at the start, by the model's seed

    def problems(self, job: JobSections) -> Iterator[tuple[str, str]]:
        """Yield fields with which the feature does not work, each with its problem."""
        yield from ()

    def warnings(self, job: JobSections, *, has_gpus: bool) -> Iterator[tuple[str, str]]:
        """Yield fields with a doubtful effect, each with its warning. has_gpus: whether the run file asks for GPUs."""
        yield from ()

    def plan_notes(self, job: JobSections, trainable_parameters: int) -> Iterator[str]:
        """Yield notes on the plan of a run with the feature."""
        yield from ()

    def effective(self, model: ModelConfig) -> ModelConfig:
        """The model section with defaults in the feature's fields that its other fields leave unread."""
        return model


def rules_of(section: BaseModel) -> list[FeatureRules]:
    """The rules of the features that a section's fields, or those of all sections, ask for. Imports no torch."""
    rooms = (table.FEATURES[name].rpartition(".")[0] for name in asked_features(section) if name in table.FEATURES)
    return [importlib.import_module(f"{room}.rules").RULES for room in rooms if find_spec(f"{room}.rules")]


def obstacles_to(use: Use, section: BaseModel) -> list[str]:
    """Reasons for which what a section asks for rules out this use. See `FeatureRules.obstacles`."""
    return [rules.obstacles[use] for rules in rules_of(section) if use in rules.obstacles]
