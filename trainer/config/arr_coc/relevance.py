"""The run file's `model.relevance` section: which visual tokens of an image the language model gets."""

from __future__ import annotations

import difflib
from typing import Literal

from pydantic import Field, field_validator, model_validator

from vlmpipe.trainer.config.arr_coc.channels import CHANNELS, PRESETS, expand_channels
from vlmpipe.trainer.config.base import Fraction, NonNegative, Positive, Section

Scorer = Literal["propositional", "perspectival", "participatory"]
Allocation = Literal["full", "uniform", "random", "topk", "mass", "quadtree"]
REWARD = "the mean probability of an answer's tokens"  # of a drawn selection; checkpoints record it
EARLIER_REWARD = "the summed log probability of an answer's tokens"  # of versions whose checkpoints record none
LEARNING_SCORER = "participatory"  # the others have no parameters


class RelevanceConfig(Section):
    """Relevance of visual tokens to the question, from textures of the image, and the selection of tokens."""

    channels: tuple[str, ...] = Field(
        ("arr13_unique",),
        min_length=1,
        description="Texture channels that the participatory scorer reads: names, and presets arr13, arr13_unique, "
        "rgb, rgb_lab and all.",
    )
    scorers: tuple[Scorer, ...] = Field(
        ("propositional", "perspectival", "participatory"),
        description="Terms of relevance: propositional is the entropy of grey levels in a token's cell, perspectival "
        "the strength of its edges, participatory the likeness of texture and question. Without any, all tokens are "
        "equally relevant.",
    )
    balancer: Literal["adaptive", "fixed"] = Field(
        "adaptive",
        description="Weights of the scorers: adaptive learns them and the three tensions from scores and question; "
        "fixed has equal weights and neutral tensions.",
    )
    allocation: Allocation = Field(
        "topk",
        description="Selection of tokens: full keeps all, uniform evenly spaced ones, random random ones, topk the "
        "most relevant, mass the fewest that hold a share of relevance, quadtree means of square cells of which "
        "relevant ones are split.",
    )
    max_tokens: Positive | None = Field(
        None, description="Maximum tokens of an image; an image with fewer keeps all. For all allocations but full."
    )
    min_tokens: Positive | None = Field(
        None,
        description="Minimum tokens of an image; null is max_tokens, or 1 for mass. With topk, uniform, random and "
        "quadtree the balancer chooses a number between both.",
    )
    mass: Fraction = Field(0.6, description="Share of relevance that the kept tokens hold. For mass.")
    temperature: float = Field(
        0.1, gt=0, description="Temperature of the softmax over relevance; lower concentrates on fewer tokens."
    )
    explore: float = Field(
        1.0, gt=0, description="Scale of the noise in selections drawn during training; higher explores more of them."
    )
    estimator: Literal["rloo", "none"] = Field(
        "rloo",
        description="Training of the selection: rloo draws several selections and favours those with better answers "
        "(REINFORCE leave-one-out), without a backward pass through the language model; none does not train it.",
    )
    samples: int = Field(4, ge=2, description="Selections that rloo draws for each sample.")
    token_cost: NonNegative = Field(
        0.0,
        description=f"Penalty of each kept token in a selection's reward, which is {REWARD}. "
        "For a choice between min_tokens and max_tokens.",
    )
    centre_questions: bool = Field(
        False,
        description="Subtract from questions their mean over the first training samples at the start; for questions "
        "that share most of their words.",
    )
    width: Positive = Field(64, description="Width of the space in which texture and question are compared.")

    @property
    def channel_names(self) -> tuple[str, ...]:
        return expand_channels(self.channels)

    @property
    def learns(self) -> bool:
        """Return whether a training step changes the module."""
        return self.estimator == "rloo"

    @property
    def lower_bound(self) -> int:
        if self.allocation == "mass":
            return self.min_tokens or 1
        return self.min_tokens or self.upper_bound

    @property
    def upper_bound(self) -> int:
        assert self.max_tokens is not None, "checked below; full has no bound"
        return self.max_tokens

    def kept_of(self, tokens: int) -> int:
        """Upper bound of the tokens that an image of `tokens` tokens keeps."""
        return tokens if self.max_tokens is None else min(tokens, self.max_tokens)

    @field_validator("channels")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in CHANNELS and name not in PRESETS:
                close = difflib.get_close_matches(name, (*PRESETS, *CHANNELS), n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ValueError(f"found channel {name!r}, expected one of {', '.join((*PRESETS, *CHANNELS))}{hint}")
        return names

    @model_validator(mode="after")
    def _can_work(self) -> RelevanceConfig:
        if self.allocation == "full":
            if bounds := [name for name in ("max_tokens", "min_tokens") if getattr(self, name) is not None]:
                raise ValueError(f"allocation full keeps all tokens: leave {bounds[0]} out, or choose topk")
            if self.learns:
                raise ValueError(
                    "allocation full keeps all tokens whatever their relevance, so estimator rloo could not learn: "
                    "choose topk, or set estimator to none"
                )
            return self
        if self.max_tokens is None:
            raise ValueError(f"allocation {self.allocation} needs max_tokens: the most tokens of an image")
        if self.lower_bound > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.learns and self.balancer == "fixed" and LEARNING_SCORER not in self.scorers:
            raise ValueError(
                f"scorers {list(self.scorers)} with balancer fixed have no parameters, so estimator rloo has nothing "
                f"to learn: add {LEARNING_SCORER}, set balancer to adaptive, or estimator to none"
            )
        if self.learns and self.allocation in ("uniform", "random"):
            raise ValueError(
                f"allocation {self.allocation} ignores relevance, so estimator rloo has nothing to train: "
                "choose topk, mass or quadtree, or set estimator to none"
            )
        return self
