"""Rules of a model that selects visual tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from vlmpipe.trainer.config.arr_coc.relevance import LEARNING_SCORER, RelevanceConfig
from vlmpipe.trainer.config.job import JobSections
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import PARTS
from vlmpipe.trainer.hooks.rules import FeatureRules, Use

# zero3 gathers weights in each call, and a rank calls the module once for each of its own images.
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2")


class RelevanceRules(FeatureRules):
    draws_weights = True
    obstacles: ClassVar[Mapping[Use, str]] = {
        "deploy": "found with model.relevance, which vLLM and transformers serve ignore: they give the model all "
        "tokens of an image; expected no deploy: vlmpipe predict and evaluate select tokens",
        "endpoint": "servers leave out a relevance module; vlmpipe predict selects tokens",
        "lmms_eval": "found with model.relevance, which the served base does not have: all its tokens are kept; "
        "expected null",
        "native_video": "with model.relevance, which selects from images; expected frames",
        "quantized_export": "model.relevance, which no server of quantized models opens; expected one of the two",
        "replay": "found self with model.relevance, which is drawn at random at the start; expected neither",
        "shared_prefix": "model.relevance, whose kept image tokens depend on the question",
        "shared_prompts": "the kept image tokens depend on the question",
    }

    def problems(self, job: JobSections) -> Iterator[tuple[str, str]]:
        model, train, relevance = job.model, job.train, _relevance_of(job.model)
        is_frozen = set(PARTS) <= set(model.freeze) and not model.train_parameters
        if is_frozen and train.epochs and not relevance.learns:
            yield (
                "model.relevance",
                "could not learn: all parts of the base are frozen and relevance.estimator is none; set it to rloo, or "
                "freeze less",
            )
        if train.strategy not in STRATEGIES:
            text = f"found {train.strategy} with model.relevance, expected one of {', '.join(STRATEGIES)}"
            yield "train.strategy", text
        if train.context_parallel > 1:
            text = f"found {train.context_parallel} with model.relevance, which selects from whole images; expected 1"
            yield "train.context_parallel", text
        if train.objective != "sft":
            text = f"found {train.objective} with model.relevance, which learns from answers; expected sft"
            yield "train.objective", text
        if train.trainer:
            yield "train.trainer", "found with model.relevance, which only vlmpipe's trainer knows; expected null"

    def plan_notes(self, job: JobSections, trainable_parameters: int) -> Iterator[str]:
        if set(PARTS) <= set(job.model.freeze):
            yield (
                f"Only the relevance module learns, {trainable_parameters:,} parameters: sharding and a Reduction "
                "Server gain nothing, and further GPUs only share the forward passes."
            )

    def effective(self, model: ModelConfig) -> ModelConfig:
        relevance, unread = _relevance_of(model), set[str]()
        if LEARNING_SCORER not in relevance.scorers:
            unread |= {"channels", "width"}
        if relevance.allocation in ("full", "uniform", "random"):
            unread |= {"channels", "width", "scorers", "balancer", "temperature"}
        if relevance.allocation != "mass":
            unread.add("mass")
        if not relevance.learns:
            unread |= {"samples", "explore", "token_cost"}
        defaults = {name: RelevanceConfig.model_fields[name].default for name in unread}
        content = relevance.model_copy(update={"channels": relevance.channel_names} | defaults)
        return model.model_copy(update={"relevance": content})


def _relevance_of(model: ModelConfig) -> RelevanceConfig:
    assert model.relevance
    return model.relevance


RULES = RelevanceRules()
