"""GPU time of a question to a served model, by the evaluation's estimate of time."""

from __future__ import annotations

import dataclasses

from vlmpipe.catalog.machines import Gpu
from vlmpipe.planner.jobs.shared_prompts import MeanPrompt
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.communication import BF16_BYTES, FP32_BYTES
from vlmpipe.planner.time.computing import reached
from vlmpipe.trainer.sizing.flops import flops_per_sequence
from vlmpipe.trainer.sizing.model_shape import ModelShape

QUESTIONS_AT_ONCE = 16  # of a replica; a server answers more at once where its memory takes them


def question_seconds(case: Scenario, gpu: Gpu, gpus: int) -> float:
    """Time of a replica with this number of GPUs for a question as long as a sample, with the longest answer.

    The answers of QUESTIONS_AT_ONCE questions are computed together. What a server does besides is not in it.
    """
    tokens = case.load.sample_tokens
    prompt = MeanPrompt(tokens, case.load.sample_images, tokens**2)
    answer_s = case.config.evaluate.max_new_tokens * token_seconds(case, gpu)
    return (prompt_seconds(case, gpu, prompt, cached=False) + answer_s) / gpus


def prompt_seconds(case: Scenario, gpu: Gpu, prompt: MeanPrompt, *, cached: bool) -> float:
    """A forward pass over a prompt's tokens and images; with `cached` features are read instead of computed."""
    sample = flops_per_sequence(
        dataclasses.replace(case.shape, selections=1),
        sequence_length=prompt.tokens,
        images=prompt.images,
        label_tokens=0,
        cached=cached,
        activation_checkpointing="none",
        sample_pairs=prompt.pairs,
    )
    rates, _ = reached(case.config, case.shape, case.layout, gpu, cached=cached)
    return sample.forward / rates.beside


def token_seconds(case: Scenario, gpu: Gpu) -> float:
    """A question's share of a token for QUESTIONS_AT_ONCE answers."""
    return weights_seconds(case.shape, case.config.train.precision, gpu) / QUESTIONS_AT_ONCE


def weights_seconds(shape: ModelShape, precision: str, gpu: Gpu) -> float:
    """One read of the language model's weights, which memory bandwidth bounds."""
    weights = shape.parameters["language_layers"] + shape.language.hidden * shape.vocabulary
    number_bytes = BF16_BYTES if precision == "bf16" else FP32_BYTES
    return weights * number_bytes / (gpu.memory_gbytes_per_s * 1e9)
