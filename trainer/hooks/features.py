"""Loads the features that a run file asks for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel

from vlmpipe.trainer.config.base import asked_features
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.hooks import table
from vlmpipe.trainer.hooks.feature import Feature, WeightsAverage

if TYPE_CHECKING:
    from torch import Tensor


def features_of(section: BaseModel, path: str = "") -> list[Feature]:
    """The features that fields of a section ask for, in the order of the table.

    Raises ConfigError for a feature that has no line in the table. path: the section's field, for the error.
    """
    asked = asked_features(section, path)
    for name, field in asked.items():
        if name not in table.FEATURES:
            raise ConfigError(
                f"{field} asks for {name}, a feature that this trainer has been built without",
                expected=f"fields of {', '.join(table.FEATURES) or 'no feature'} only",
                fix=f"leave {field} out, or use a trainer that has {name} in {table.__name__}",
            )
    return [_load(module) for name, module in table.FEATURES.items() if name in asked]


def _load(module: str) -> Feature:
    feature: Feature = importlib.import_module(module).FEATURE
    return feature


def average_of(train: TrainConfig, weights: Callable[[], Sequence[Tensor]]) -> WeightsAverage | None:
    """The average of this rank's trained weights; None where no feature keeps one."""
    averages = (feature.average(train, weights) for feature in features_of(train, "train"))
    return next((average for average in averages if average is not None), None)
