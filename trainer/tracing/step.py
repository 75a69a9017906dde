"""Memory of a training step, by running it on fake tensors.

The module that strategies wrap runs forward and backward under torch's fake tensors, which have shapes and no values.
So the largest model is traced in a second on any machine, and the code itself is measured instead of a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.hooks.features import features_of
from vlmpipe.trainer.models.attention.context_parallel import ContextParallel
from vlmpipe.trainer.models.hf.model import HfVLM
from vlmpipe.trainer.models.hf.vision_attention import Pieces, sizes_of
from vlmpipe.trainer.models.image_inputs import Grid
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.llava.model import LlavaVLM
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.pipeline_partition import Stage
from vlmpipe.trainer.sizing.trace_results import Category, Compute, Held, StepTrace
from vlmpipe.trainer.strategies.context_parallel import split_tokens
from vlmpipe.trainer.strategies.deepspeed.linear_regather import recompute_gathered_linear
from vlmpipe.trainer.strategies.tensor_parallel.plan import shard_first_rank
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape, inputs_of, tensors_of
from vlmpipe.trainer.tracing.memory_tracker import MemoryTracker, cast_weights
from vlmpipe.trainer.tracing.traced_images import Encoded, VisionBytes
from vlmpipe.trainer.tracing.vision_pass import vision_bytes


def trace_step(
    config: ModelConfig,
    shape: SequenceShape,
    *,
    vocabulary: int,
    cached: bool,
    compute: Compute,
    recompute: Recompute,
    language_layers: int,
    gathered: bool = False,
    sliced: bool = False,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    context_parallel: int = 1,
    every_layer: bool = False,
) -> StepTrace:
    """Trace one micro-batch of the model with the first `language_layers` layers of its language model.

    Gradients exist before the step, as from the second micro-batch on and as in the buckets of DDP.

    Args:
        gathered: no layer saves gathered weights (`vlmpipe.trainer.strategies.deepspeed.linear_regather`).
        sliced: gradients outside of layers are allocated in the step and sliced at its end (FSDP).
        every_layer: run also frozen layers whose memory equals another's; slower, with the same result.
    """
    with FakeTensorMode():
        family = family_of(config)
        model = family.skeleton(
            config,
            vocabulary=vocabulary,
            language_layers=language_layers,
            one_inner_tower_layer=has_equal_tower_layers(config) and not every_layer,  # `pass_through` runs some
        )
        for feature in features_of(config, "model"):
            feature.change_model(model, has_values=False)
        module = family.training_module(config, model, cached=cached).train()
        recompute.apply(family, module)
        if tensor_parallel > 1:
            blocks = family.blocks(module)
            whole = Stage.whole(len(blocks.language_layers))
            shard_first_rank(blocks, tensor_parallel, whole, sequence=sequence_parallel)
        if context_parallel > 1:
            split_tokens(module, ContextParallel(context_parallel))
        if gathered:
            recompute_gathered_linear(module)
        if not every_layer:
            pass_through(family.blocks(module).tower_layers)
        cast_weights(module, compute)
        without_numbers(module)
        blocks = family.blocks(module)
        in_layers = {
            id(parameter)
            for layer in (*blocks.language_layers, *blocks.tower_layers)
            for parameter in layer.parameters()
        }
        inputs = inputs_of(config, shape, vocabulary, cached=cached, context_parallel=context_parallel)
        add_vision_bytes(config, module, inputs["images"], compute, recompute)
        return trace_module(module, inputs, compute, lambda parameter: not sliced or id(parameter) in in_layers)


def add_vision_bytes(
    config: ModelConfig,
    module: nn.Module,
    images: Tensor | Mapping[str, Tensor],
    compute: Compute,
    recompute: Recompute,
) -> None:
    """Have a training module of family hf that gets pixels allocate what its vision encoder would."""
    if isinstance(module, HfVLM) and not isinstance(images, Tensor):
        size = VisionBytes()
        if len(pixels := images.get("pixel_values", ())):
            size = vision_bytes(config.model_dump_json(), len(pixels), compute, recomputes=recompute.tower)
        module.encoded = lambda projected: Encoded.apply(projected, size)


def without_numbers(module: nn.Module) -> None:
    """Have a training module that gets grids of patches run on fake tensors."""
    if isinstance(module, HfVLM) and module.knows_grids:
        module.sizes_of = fake_sizes_of


def fake_sizes_of(tower: nn.Module, grids: Sequence[Grid], device: torch.device) -> dict[str, object]:
    """Return `sizes_of` for traces: tensors of equal sizes and types, without values.

    Windowed attention then runs as one product over all patches. Its inputs and outputs have the same size; its FLOPs
    cannot be counted this way.
    """
    patches = sum(map(math.prod, grids))
    whole = Pieces(((0, patches, 1),), torch.empty(0, dtype=torch.int32), patches)
    with unset_fake_temporarily():
        sizes = sizes_of(tower, grids, torch.device("cpu"))

    def without_values(size: object) -> object:
        if isinstance(size, Tensor):
            return torch.zeros(size.shape, dtype=size.dtype)
        return whole if isinstance(size, Pieces) else patches

    return {name: without_values(size) for name, size in sizes.items()}


def has_equal_tower_layers(config: ModelConfig) -> bool:
    """Return whether all layers of the tower are surely frozen."""
    return "tower" in config.freeze and not config.train_parameters


def pass_through(layers: Sequence[nn.Module]) -> None:
    """Have frozen layers between the first and the last only allocate their output.

    Nothing else of them lives on, and their peak is below that of the last layer, which runs while all outputs exist.
    """
    if any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
        return
    for layer in layers[1:-1]:
        layer.forward = lambda hidden, *_, **__: torch.empty_like(hidden)


def trace_module(
    module: nn.Module,
    inputs: Mapping[str, object],
    compute: Compute,
    has_gradient: Callable[[nn.Parameter], bool] = lambda parameter: True,
) -> StepTrace:
    """Trace forward and backward of a training module, with real or fake tensors.

    has_gradient: which parameters have a gradient before the step.
    """
    with tracker_of(module, tensors_of(inputs), has_gradient) as tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=compute == "autocast"):
            loss = module(**inputs)
        forward = tracker.take_peak(next_category="backward")
        turn: list[Held] = []

        def arrived(_: Tensor) -> None:
            if not turn:
                turn.append(tracker.take_peak(next_category="backward"))

        hooks = [parameter.register_hook(arrived) for parameter in module.parameters() if parameter.requires_grad]
        loss.backward()
        backward = tracker.take_peak(next_category="backward")
        for hook in hooks:
            hook.remove()
    return StepTrace(forward, turn[0], backward, sum(tensor.nbytes for tensor in tensors_of(inputs)))


def tracker_of(
    module: nn.Module,
    inputs: Sequence[Tensor],
    has_gradient: Callable[[nn.Parameter], bool] = lambda parameter: True,
) -> MemoryTracker:
    """A tracker of what `module` allocates for `inputs`. Creates gradients, which are not counted."""
    held = [*module.parameters(), *module.buffers(), *inputs]
    for parameter in module.parameters():
        if parameter.requires_grad and has_gradient(parameter):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            held.append(parameter.grad)
    return MemoryTracker(held, module.parameters(), regions_of(module))


def regions_of(module: nn.Module) -> list[tuple[nn.Module, Category]]:
    """Modules of a model or pipeline stage with a category of their own; the rest is the head and the loss."""
    vision: list[nn.Module] = []
    if isinstance(module, HfVLM):
        vision += [module] if module.has_images else []  # all before the language model is vision
    elif isinstance(module, LlavaVLM):
        vision += [part for part in (module.projector, module.tower) if part is not None]
    return [*((part, "vision") for part in vision), (module.language_model, "language")]
