"""The run file's `model.relevance` section: which visual tokens of an image the language model gets."""

from __future__ import annotations

import difflib
from typing import Literal

from pydantic import Field, field_validator, model_validator

from vlmpipe.trainer.config.arr_coc.channels import CHANNELS, PRESETS, expand_channels
from vlmpipe.trainer.config.base import Fraction, NonNegative, Positive, Section

Scorer = Literal["propositional", "perspectival", "participatory"]
Allocation = Literal["full", "uniform", "random", "topk", "mass", "quadtree"]
LEARNING_SCORER = "participatory"  # the others have no parameters


class RelevanceConfig(Section):
    """Relevance of each visual token from textures of the image and the question, and the tokens that are kept."""

    channels: tuple[str, ...] = Field(
        ("arr13_unique",),
        min_length=1,
        description="Texture channels that the participatory scorer reads: names, and presets arr13, arr13_unique, "
        "rgb, rgb_lab and all.",
    )
    scorers: tuple[Scorer, ...] = Field(
        ("propositional", "perspectival", "participatory"),
        description="What relevance is made of: propositional is the entropy of grey levels in a token's cell, "
        "perspectival the strength of its edges, participatory the likeness of texture and question. Without any, all "
        "tokens are equally relevant.",
    )
    balancer: Literal["adaptive", "fixed"] = Field(
        "adaptive",
        description="adaptive learns the scorers' weights and the three tensions from scores and question; fixed "
        "gives scorers equal weights, with neutral tensions.",
    )
    allocation: Allocation = Field(
        "topk",
        description="Which tokens are kept: full all, uniform evenly spaced ones, random ones, topk the most relevant, "
        "mass the fewest that hold a share of relevance, quadtree means of square cells of which relevant ones are "
        "split.",
    )
    max_tokens: Positive | None = Field(
        None, description="Most tokens of an image. An image with fewer keeps all. For all allocations but full."
    )
    min_tokens: Positive | None = Field(
        None,
        description="Least tokens of an image. With topk, uniform, random and quadtree the balancer chooses a number "
        "between both; null is max_tokens, of mass 1.",
    )
    mass: Fraction = Field(0.6, description="Share of relevance that the kept tokens hold. For mass.")
    temperature: float = Field(
        0.1, gt=0, description="Temperature of the softmax over relevance; lower concentrates on fewer tokens."
    )
    explore: float = Field(
        1.0, gt=0, description="Scale of the noise with which training draws selections; higher tries more of them."
    )
    estimator: Literal["rloo", "none"] = Field(
        "rloo",
        description="How selections are trained: rloo draws some and favours those with better answers (REINFORCE "
        "leave-one-out), without a backward pass through the language model. none leaves the module as it is.",
    )
    samples: int = Field(4, ge=2, description="Selections that rloo draws for each sample.")
    token_cost: NonNegative = Field(
        0.0,
        description="What each kept token subtracts from a selection's reward, in nats. For a choice between "
        "min_tokens and max_tokens.",
    )
    centre_questions: bool = Field(
        False,
        description="Begin with questions seen from their mean over the first training samples. Where questions share "
        "most of their words it learns faster from most starts, and from some it settles on tokens of no question.",
    )
    width: Positive = Field(64, description="Width in which texture and question are compared.")

    @property
    def channel_names(self) -> tuple[str, ...]:
        return expand_channels(self.channels)

    @property
    def learns(self) -> bool:
        """Whether a training step changes the module."""
        return self.estimator == "rloo"

    @property
    def least_tokens(self) -> int:
        if self.allocation == "mass":
            return self.min_tokens or 1
        return self.min_tokens or self.most_tokens

    @property
    def most_tokens(self) -> int:
        assert self.max_tokens is not None, "checked below; full has no bound"
        return self.max_tokens

    def at_most(self, tokens: int) -> int:
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
            if given := [name for name in ("max_tokens", "min_tokens") if getattr(self, name) is not None]:
                raise ValueError(f"allocation full keeps all tokens: leave {given[0]} out, or choose topk")
            if self.learns:
                raise ValueError(
                    "allocation full keeps all tokens whatever their relevance, so estimator rloo could not learn: "
                    "choose topk, or set estimator to none"
                )
            return self
        if self.max_tokens is None:
            raise ValueError(f"allocation {self.allocation} needs max_tokens: the most tokens of an image")
        if self.least_tokens > self.max_tokens:
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
