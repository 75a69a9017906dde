"""Time of the feature encoding and evaluation jobs. Both compute in fp32."""

from __future__ import annotations

import math

from trainer.sizing.flops import flops_per_sequence
from trainer.sizing.model_shape import ModelShape
from vlmpipe.catalog.machines import Gpu
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.parallel_layout import Layout
from vlmpipe.planner.time.communication import FP32_BYTES
from vlmpipe.planner.time.feature_cache import CacheAdvice
from vlmpipe.planner.time.step_time import reached
from vlmpipe.planner.workload import Workload


def cache_features_hours(config: RunConfig, cache: CacheAdvice) -> float | None:
    """0 without a cache. Images that have features already are not known here: all are encoded."""
    if cache.state == "off":
        return 0.0
    if cache.encode_gpu_hours is None:
        return None
    return cache.encode_gpu_hours / (config.cluster.features_replica_count * config.cluster.processes)


def evaluate_hours(
    config: RunConfig, shape: ModelShape, layout: Layout, load: Workload, gpu: Gpu | None, *, cached: bool
) -> float | None:
    """Answers to one question a sample, for the sample's own image and for each control, and the held-out loss.

    The prompt is a forward pass over the sample; then every token of an answer reads all weights of the language model
    once for a batch of questions, which the memory's bandwidth bounds. None where the number of samples is not known.
    """
    samples = held_out_samples(config, load)
    if gpu is None or samples is None:
        return None
    evaluate, cluster = config.evaluate, config.cluster
    asked = min(samples, evaluate.max_samples or samples)
    rounds = 1 + len(evaluate.controls)
    sample = flops_per_sequence(
        shape,
        sequence_length=load.useful_tokens_per_sequence / load.samples_per_sequence,
        images=load.images_per_sequence / load.samples_per_sequence,
        label_tokens=0,
        cached=cached,
        activation_checkpointing="none",
    )
    rates, _ = reached(config, shape, layout, gpu, cached=cached)
    forward_s = (asked * rounds + samples) * sample.forward / rates.fp32
    ranks = cluster.evaluate_replica_count * cluster.processes
    batches = rounds * math.ceil(asked / ranks / evaluate.batch_questions)
    weights = shape.parameters["language_layers"] + shape.language.hidden * shape.vocabulary
    token_s = weights * FP32_BYTES / (gpu.memory_gbytes_per_s * 1e9)
    return (forward_s / ranks + batches * evaluate.max_new_tokens * token_s) / 3600


def held_out_samples(config: RunConfig, load: Workload) -> int | None:
    """Samples kept for evaluation, as far as the training split tells; None where neither is known."""
    share = config.data.validation_fraction
    if load.samples is not None and share < 1:
        return round(load.samples * share / (1 - share))
    return config.evaluate.max_samples or None
