"""Memory of a pipeline stage for one micro-batch, by tracing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.pipeline_partition import Stage
from vlmpipe.trainer.sizing.trace_results import Compute, StageTrace
from vlmpipe.trainer.strategies.tensor_parallel.plan import shard_first_rank
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape, inputs_of, tensors_of
from vlmpipe.trainer.tracing.memory_tracker import cast_weights
from vlmpipe.trainer.tracing.step import (
    add_vision_bytes,
    has_equal_tower_layers,
    pass_through,
    tracker_of,
    without_numbers,
)


def trace_stage(
    config: ModelConfig,
    shape: SequenceShape,
    stage: Stage,
    *,
    vocabulary: int,
    cached: bool,
    compute: Compute,
    recompute: Recompute,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
) -> StageTrace:
    """Trace a stage on the first of the ranks that split it.

    Only the number of its layers matters, unless patterns choose trained parameters. Gradients, received hidden states
    and received gradients exist before: all have permanent buffers.
    """
    with FakeTensorMode():
        family = family_of(config)
        layers = stage.layers if config.has_patterns else range(len(stage.layers))
        model = family.skeleton(
            config,
            vocabulary=vocabulary,
            language_layers=max(0, *layers) + 1 if layers else 1,
            # Without a tower in this stage, or with one that `pass_through` runs in part.
            one_inner_tower_layer=not stage.is_first or has_equal_tower_layers(config),
        )
        module = family.training_module(config, model, cached=cached).train()
        recompute.apply(family, module)
        blocks = family.blocks(module)
        width = int(blocks.embedding.weight.shape[1])
        if not stage.is_first and not config.has_patterns:
            blocks = dataclasses.replace(blocks, image_layers=0)  # its layers are later ones than their numbers say
        like_it = Stage(layers, stage.is_first, stage.is_last)
        blocks.reduce_to(like_it)
        if stage.is_first:
            pass_through(blocks.tower_layers)
        if tensor_parallel > 1:
            shard_first_rank(blocks, tensor_parallel, like_it, sequence=sequence_parallel)
        inputs = inputs_of(config, shape, vocabulary, cached=cached)
        sent_dtype = torch.float32
        if compute != "fp32":
            sent_dtype = torch.bfloat16
            cast_weights(module, compute)
        passed_on = (shape.sequences, shape.tokens, width)
        if stage.is_first:
            without_numbers(module)
            add_vision_bytes(config, module, inputs["images"], compute, recompute)
        else:
            hidden = torch.zeros(passed_on, dtype=sent_dtype, requires_grad=True)
            inputs |= {"images": _no_images(inputs["images"]), "hidden": hidden}
            inputs.pop("image_grids", None)
        gradient = None if stage.is_last else torch.zeros(passed_on, dtype=sent_dtype)
        return _trace(module, inputs, gradient, sent_dtype.itemsize * math.prod(passed_on))


def _no_images(images: Tensor | Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
    if isinstance(images, Tensor):
        return images[:0].clone()
    return {name: value[:0].clone() for name, value in images.items()}


def _trace(module: nn.Module, inputs: dict[str, Any], gradient: Tensor | None, passed_on_bytes: int) -> StageTrace:
    received = [*tensors_of(inputs), *([] if gradient is None else [gradient])]
    with tracker_of(module, received) as tracker:
        hidden = inputs.pop("hidden", None)
        if hidden is not None:
            hidden = hidden.to(next(module.language_model.parameters()).dtype)
        output = module(**inputs, hidden=hidden)
        if gradient is not None:
            output = output.to(gradient.dtype)
        saved = tracker.held
        forward = tracker.take_peak(next_category="backward")
        if output.requires_grad:
            output.backward(gradient)
        backward = tracker.take_peak(next_category="backward")
    of_sequences = {name: value for name, value in inputs.items() if name != "hidden"}
    input_bytes = sum(tensor.nbytes for tensor in tensors_of(of_sequences))
    return StageTrace(forward, saved, backward, passed_on_bytes, input_bytes)
