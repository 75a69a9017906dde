"""The run file's `tune` section: which fields are searched, in the terms of Vertex AI's StudySpec."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from vlmpipe.trainer.config.base import Positive, Section
from vlmpipe.trainer.config.train_fields import ONE_OF_TWO
from vlmpipe.trainer.monitoring.hypertune import VALIDATION_LOSS

Value = float | int | str
# Beside fields of train: what neither prepared data nor features depend on, which all trials share.
OF_ADAPTERS = ("model.lora.rank", "model.lora.alpha", "model.lora.dropout")
Scale = Literal["UNIT_LINEAR_SCALE", "UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE"]


class DoubleSpec(Section):
    """A range of real numbers."""

    min_value: float = Field(description="Smallest value.")
    max_value: float = Field(description="Largest value.")


class IntegerSpec(Section):
    """A range of whole numbers."""

    min_value: int = Field(description="Smallest value.")
    max_value: int = Field(description="Largest value.")


class DiscreteSpec(Section):
    """A choice of numbers."""

    values: tuple[float, ...] = Field(
        min_length=1, max_length=1000, description="Numbers to choose from, in rising order."
    )


class CategoricalSpec(Section):
    """A choice of texts."""

    values: tuple[str, ...] = Field(min_length=1, description="Texts to choose from.")


class ParameterSpec(Section):
    """The values of one field: exactly one of the four kinds."""

    double_value_spec: DoubleSpec | None = Field(None, description="A range of real numbers.")
    integer_value_spec: IntegerSpec | None = Field(None, description="A range of whole numbers.")
    discrete_value_spec: DiscreteSpec | None = Field(None, description="A choice of numbers.")
    categorical_value_spec: CategoricalSpec | None = Field(None, description="A choice of texts.")
    scale_type: Scale = Field("UNIT_LINEAR_SCALE", description="Scale of a range; log scales need numbers above 0.")

    @property
    def range(self) -> DoubleSpec | IntegerSpec | None:
        """The range, if it is one."""
        return self.double_value_spec or self.integer_value_spec

    @property
    def points(self) -> Sequence[Value]:
        """Every value; for a range of real numbers, its ends."""
        if self.integer_value_spec:  # not as a list: a range may have more numbers than memory
            return range(self.integer_value_spec.min_value, self.integer_value_spec.max_value + 1)
        if self.double_value_spec:
            return [self.double_value_spec.min_value, self.double_value_spec.max_value]
        return list((self.discrete_value_spec or self.categorical_value_spec).values)  # type: ignore[union-attr]

    @property
    def extremes(self) -> list[Value]:
        """Values that stand for all in a check: every value of a choice, the ends of a range, and one between them.

        That one is no whole number in a range of real numbers, and the smallest but one in a range of whole numbers:
        a field may take both ends alone, such as a batch that the ranks divide.
        """
        if not self.range:
            return list(dict.fromkeys(self.points))
        low, high = self.range.min_value, self.range.max_value
        between = low + 1 if self.integer_value_spec else low + (high - low) / math.pi
        return list(dict.fromkeys((low, min(between, high), high)))

    @model_validator(mode="after")
    def _one_kind(self) -> ParameterSpec:
        kinds = (self.range, self.discrete_value_spec, self.categorical_value_spec)
        kinds_given = [kind for kind in kinds if kind] + (
            [1] if self.double_value_spec and self.integer_value_spec else []
        )
        if len(kinds_given) != 1:
            raise ValueError(
                "give one of double_value_spec, integer_value_spec, discrete_value_spec and categorical_value_spec"
            )
        if (ends := self.range) and ends.min_value >= ends.max_value:
            raise ValueError(f"min_value {ends.min_value} is not below max_value {ends.max_value}")
        if self.discrete_value_spec and list(self.points) != sorted(set(self.discrete_value_spec.values)):
            raise ValueError(f"values {self.points} are not in rising order")
        if self.scale_type != "UNIT_LINEAR_SCALE" and (not self.range or self.range.min_value <= 0):
            raise ValueError(f"scale_type {self.scale_type} takes a range above 0")
        return self


class TuneConfig(Section):
    """A search for good settings: many short trainings on the data of one run."""

    metric: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] = Field(
        "exact_match",
        description="Number in evaluate.json to optimize, for example exact_match or loss; or validation_loss, which "
        "training measures every train.validate_every_steps steps.",
    )
    goal: Literal["MAXIMIZE", "MINIMIZE"] = Field(
        "MAXIMIZE", description="Whether to maximize or to minimize the metric."
    )
    algorithm: Literal["ALGORITHM_UNSPECIFIED", "GRID_SEARCH", "RANDOM_SEARCH"] = Field(
        "ALGORITHM_UNSPECIFIED", description="Choice of values; unspecified is Vertex AI's own, Bayesian search."
    )
    parameters: dict[str, ParameterSpec] = Field(
        min_length=1,
        max_length=100,
        description="Fields of train to search, by dotted name, each with its possible values; also model.lora.rank, "
        "alpha and dropout.",
    )
    max_trial_count: Positive = Field(10, description="Number of trials.")
    parallel_trial_count: Positive = Field(
        1, description="Most trials at the same time on Vertex AI; local trials run one by one."
    )
    max_failed_trial_count: int = Field(
        0,
        ge=0,
        description="Failed trials that end the search; 0 leaves it to Vertex AI, and a local search runs all trials. "
        "Set it to end a search whose trials cannot train.",
    )
    stopping: Literal["none", "median", "decay_curve"] = Field(
        "none",
        description="Early end of unpromising trials on Vertex AI: by the median of earlier trials, or by "
        "extrapolating their curves; none ends none. Needs metric validation_loss.",
    )
    seed: int = Field(0, ge=0, description="Seed of a random search on this machine.")

    @model_validator(mode="after")
    def _search(self) -> TuneConfig:
        others = [name for name in self.parameters if not name.startswith("train.") and name not in OF_ADAPTERS]
        if others:
            raise ValueError(
                f"parameters {', '.join(others)}: a trial shares data and features with the others, so only fields of "
                f"train and {', '.join(OF_ADAPTERS)} can be searched"
            )
        of_one = {f"train.{name}": f"train.{other}" for name, other in ONE_OF_TWO.items()}
        both = [name for name in self.parameters if of_one.get(name) in self.parameters]
        if both:
            raise ValueError(f"parameters {' and '.join(both)} say the same in two forms: search one of them")
        ranges = [name for name, spec in self.parameters.items() if spec.double_value_spec]
        if self.algorithm == "GRID_SEARCH" and ranges:
            raise ValueError(f"GRID_SEARCH takes no double_value_spec, which {', '.join(ranges)} has: give values")
        if self.stopping != "none" and self.metric != VALIDATION_LOSS:
            raise ValueError(
                f"stopping {self.stopping} needs a metric that is measured during training: set metric to "
                f"{VALIDATION_LOSS}, not {self.metric}"
            )
        if self.metric == VALIDATION_LOSS and self.goal != "MINIMIZE":
            raise ValueError(f"a smaller {VALIDATION_LOSS} is better: set goal to MINIMIZE")
        if self.parallel_trial_count > self.max_trial_count:
            raise ValueError(f"parallel_trial_count is more than max_trial_count {self.max_trial_count}")
        return self
