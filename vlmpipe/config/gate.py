"""The run file's `gate` section: the conditions for registering a model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from trainer.config.base import Fraction, NonNegative, Section

MOST_SCORES = {"vqa_accuracy": 1.0, "anls": 1.0, "cider_d": 10.0, "preference_accuracy": 1.0}


class GateConfig(Section):
    """The conditions for registering a model."""

    min_exact_match: Fraction = Field(0.0, description="Least held-out exact match, as a share of the questions.")
    max_loss: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Largest evaluation loss in nats a label token; null does not check.",
    )
    per_slice: dict[str, Fraction] = Field(
        default_factory=dict, description="Least exact match of single slices, for example {digit: 0.9}."
    )
    min_scores: dict[Literal["vqa_accuracy", "anls", "cider_d", "preference_accuracy"], NonNegative] = Field(
        default_factory=dict,
        description="Least other scores of the evaluation: vqa_accuracy, anls and preference_accuracy (the share of "
        "held-out pairs of which the chosen answer is likelier) from 0 to 1, cider_d from 0 to 10, for example "
        "{cider_d: 0.8}.",
    )
    max_regression: Fraction | None = Field(
        0.0,
        description="Largest drop of exact match against the champion on the questions that both were asked; null does "
        "not check.",
    )
    regression_by: Literal["estimate", "interval"] = Field(
        "estimate",
        description="What max_regression bounds: the measured drop, or the upper end of its 95 % interval, which "
        "rejects a model unless there are enough questions.",
    )
    when_not_comparable: Literal["skip", "reject"] = Field(
        "skip",
        description="If most of the champion's questions were others: skip relies on the other checks, reject "
        "refuses the model.",
    )
    min_margin_over_chance: Fraction | None = Field(
        None, description="Least exact match above always giving the commonest training answer; null does not check."
    )
    min_margin_over_shuffled_image: Fraction | None = Field(
        None, description="Least exact match above the same model shown another sample's image; null does not check."
    )

    max_images_also_in_train: Fraction | None = Field(
        None, description="Largest share of held-out images that are also in the training split; null does not check."
    )

    @field_validator("min_scores")
    @classmethod
    def _can_be_reached(cls, floors: dict[str, float]) -> dict[str, float]:
        for metric, floor in floors.items():
            if floor > MOST_SCORES[metric]:  # probably a percentage
                raise ValueError(f"{metric} {floor:g} is more than its largest value, {MOST_SCORES[metric]:g}")
        return floors

    @property
    def checks_something(self) -> bool:
        """Whether any threshold could reject a first model, which has no champion."""
        bounds = (self.max_loss, self.min_margin_over_chance, self.min_margin_over_shuffled_image)
        return bool(self.min_exact_match or self.per_slice or self.min_scores) or any(
            bound is not None for bound in bounds
        )
