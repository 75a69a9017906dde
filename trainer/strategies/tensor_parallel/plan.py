"""Tensor-parallel plan of transformers' layers, by the names of their linear modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from trainer.config.model import ModelConfig
from trainer.errors import ConfigError
from trainer.models.base import ShardingUnits
from trainer.models.layers.lora import ADAPTER
from trainer.models.registry import family_of
from trainer.sizing.pipeline_partition import Stage
from trainer.strategies.tensor_parallel.sequence_parallel import (
    GatheredInput,
    ScatteredInputs,
    ScatteredOutput,
    SequenceParallel,
    scatter_sequence,
)
from trainer.strategies.tensor_parallel.styles import (
    ChunkedHeadLoss,
    ColwiseFusedLinear,
    ColwiseLinear,
    CopyToModelParallelHeads,
    CopyToModelParallelRegion,
    PartialSum,
    ReduceFromModelParallelRegion,
    RowwiseLinear,
    ShardedDropout,
    ShardingStyle,
    VocabParallelEmbedding,
    VocabParallelLoss,
    linear_of,
)

# Rows of the weight are split: each rank computes its heads, or its part of the inner width ...
SPLIT_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "linear_fc1")
# ... and here columns: each rank takes what it has computed, and the results are summed over ranks.
SPLIT_INPUTS = ("o_proj", "out_proj", "down_proj", "fc2", "linear_fc2")
# Attention whose `qkv` gives all queries, then all keys, then all values, and which counts its heads by `num_heads`.
# By class: others of this name have them in another order, in which a rank's rows would be those of other heads.
FUSED_ATTENTION = ("Qwen2_5_VLVisionAttention", "Qwen3VLVisionAttention")
FUSED_OUTPUTS, FUSED_INPUTS = "qkv", "proj"

Parameter = tuple[nn.Module, str]  # the module that has it, and its name there: FSDP puts another in its place


def parallelize(blocks: ShardingUnits, mesh: DeviceMesh, stage: Stage, *, sequence: bool) -> list[Parameter]:
    """Split the layers of a stage, and its embedding and head by vocabulary, over the ranks of `mesh`.

    Returns the parameters that are whole on each rank but work on its part of something: norms of queries and keys on
    its heads, of adapters the matrix that is not split, and with `sequence` parallelism the language layers' norms on
    its tokens. Their gradients have yet to be summed over ranks.
    """
    in_part: list[Parameter] = []
    for layer, shared in _layers(blocks, stage, sequence=sequence):
        plan = _plan(layer, shared=shared)
        parallelize_module(layer, mesh, {**plan.styles})
        in_part += plan.in_part
    for ends in _ends(blocks, stage) if sequence else ():
        scatter_sequence(*ends, SequenceParallel.of(mesh))
    is_tied = blocks.is_tied
    if blocks.has_embedding(stage):
        parallelize_module(blocks.embedding, mesh, VocabParallelEmbedding())
    if stage.is_last:
        if is_tied:
            blocks.head.weight = blocks.embedding.weight
        _shard_head(blocks, mesh)
    return in_part


def _shard_head(blocks: ShardingUnits, mesh: DeviceMesh) -> None:
    vocabulary, chunk_tokens = len(blocks.head.weight), blocks.loss.chunk_tokens
    parallelize_module(blocks.head, mesh, ChunkedHeadLoss(chunk_tokens) if chunk_tokens else ColwiseLinear())
    parallelize_module(blocks.head, mesh, CopyToModelParallelRegion())
    if not chunk_tokens:
        parallelize_module(blocks.loss, mesh, VocabParallelLoss(vocabulary))


def sum_partial_gradients(in_part: Sequence[Parameter], group: ProcessGroup) -> None:
    """Of what is whole on each rank and has seen a part: without this its copies drift apart, silently. `in_part` is
    what `split` gave, `group` the ranks that it split over."""
    parameters = [module.get_parameter(name) for module, name in in_part]
    gradients: list[Tensor] = [
        parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        for parameter in parameters
        if parameter.grad is not None
    ]
    if gradients:
        together = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(together, group=group)
        for gradient, total in zip(gradients, together.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))


def shard_first_rank(blocks: ShardingUnits, ranks: int, stage: Stage, *, sequence: bool) -> None:
    """Leave of a stage what the first rank has of it after `split`, to see what a step holds: its results are not those
    of any model."""
    for layer, shared in _layers(blocks, stage, sequence=sequence):
        for name, style in _plan(layer, shared=shared).styles.items():
            style.cut(layer.get_submodule(name), ranks)
    for ends in _ends(blocks, stage) if sequence else ():
        scatter_sequence(*ends, SequenceParallel(ranks))
    matrices = [blocks.embedding.weight] if blocks.has_embedding(stage) else []
    for weight in {*matrices, *([blocks.head.weight] if stage.is_last else [])}:
        weight.data = weight.data.chunk(ranks)[0].clone()


def require_shardable(config: ModelConfig, ranks: int, *, cached: bool, sequence: bool = False) -> None:
    """Raises ConfigError for a model whose layers `ranks` ranks cannot split between them, or with `sequence` not share
    the tokens of. Builds nothing large."""
    family = family_of(config)
    shape = family.shape(config)
    stacks = {"language model": shape.language} if cached else {"language model": shape.language, "tower": shape.tower}
    for part, stack in stacks.items():
        sizes = {"key-value heads": stack.kv_heads, "heads": stack.heads, "feed-forward width": stack.intermediate}
        for name, size in sizes.items():
            if size % ranks:
                raise ConfigError(
                    f"train.tensor_parallel {ranks} does not divide the {part}'s {name}, {size}",
                    expected="a number of ranks among which heads and feed-forward width divide",
                )
    with torch.device("meta"):
        model = family.skeleton(config, vocabulary=shape.vocabulary, language_layers=1)
    blocks = family.blocks(family.training_module(config, model, cached=cached))
    for layer, shared in _layers(blocks, Stage.whole(len(blocks.language_layers)), sequence=sequence):
        _plan(layer, shared=shared)


def _layers(blocks: ShardingUnits, stage: Stage, *, sequence: bool) -> list[tuple[nn.Module, bool]]:
    """The layers of a stage, and whether ranks share their tokens: not in the tower. An image has its tokens and often
    one more, which do not divide, and features are read off between layers, where each rank would have its share. Nor
    in the first language layers where images are added between them, by the places of whole rows."""
    language = [blocks.language_layers[number] for number in _shareable(blocks, stage)]
    return [(layer, sequence and layer in language) for layer in blocks.layers_in(stage)]


def _shareable(blocks: ShardingUnits, stage: Stage) -> list[int]:
    return [number for number in stage.layers if number >= blocks.image_layers]


def _ends(blocks: ShardingUnits, stage: Stage) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The first and the last of the shared layers that follow each other: of several stages in one, of each."""
    layers = _shareable(blocks, stage)
    firsts = [number for number in layers if number - 1 not in layers]
    lasts = [number for number in layers if number + 1 not in layers]
    for first, last in zip(firsts, lasts, strict=True):
        yield blocks.language_layers[first], blocks.language_layers[last]


@dataclass
class _Plan:
    styles: dict[str, ShardingStyle] = field(default_factory=dict)  # by the name of a module in the layer
    in_part: list[Parameter] = field(default_factory=list)  # see `split`


def _plan(layer: nn.Module, *, shared: bool) -> _Plan:
    """How to split one layer, and whether ranks have `shared` its tokens between its split parts.

    Raises ConfigError for a layer with anything else in it: what is not known to be right would be silently wrong.
    """
    plan = _Plan()
    linear: list[str] = []
    fused = {name for name, module in layer.named_modules() if type(module).__name__ in FUSED_ATTENTION}
    for name, module in layer.named_modules():
        is_adapted = hasattr(module, "lora_A")
        is_inside = any(name.startswith(f"{other}.") for other in linear)  # of an adapted one
        if is_inside or not (is_adapted or isinstance(module, nn.Linear)):
            continue
        parent, _, role = name.rpartition(".")
        splits_outputs = role == FUSED_OUTPUTS if parent in fused else role in SPLIT_OUTPUTS
        splits_inputs = role == FUSED_INPUTS if parent in fused else role in SPLIT_INPUTS
        if not (splits_outputs or splits_inputs) or (parent in fused and (is_adapted or shared)):
            raise _unknown(layer, name)
        linear.append(name)
        if is_adapted:
            _plan_adapted(plan, name, module, splits_outputs=splits_outputs, shared=shared)
        elif splits_outputs:
            plan.styles[name] = ColwiseFusedLinear() if parent in fused else ColwiseLinear()
        else:
            plan.styles[name] = ScatteredInputs() if shared else RowwiseLinear()
        if shared and splits_inputs and linear_of(module).bias is not None:
            plan.in_part.append((linear_of(module), "bias"))
    around = {name.rpartition(".")[0] for name in linear}
    for name, module in layer.named_modules():
        own = list(module.named_parameters(recurse=False))
        parent = name.rpartition(".")[0]
        if own and name not in plan.styles and (name in around or parent in around):
            head_dim = getattr(layer.get_submodule(parent), "head_dim", None)
            if any(tuple(parameter.shape) != (head_dim,) for _, parameter in own):
                raise _unknown(layer, name)
            plan.in_part += [(module, parameter) for parameter, _ in own]
        elif own and shared and not any(name.startswith(f"{part}.") for part in around):
            if any(parameter.ndim > 1 for _, parameter in own):
                raise _unknown(layer, name)
            plan.in_part += [(module, parameter) for parameter, _ in own]
    plan.styles |= {name: GatheredInput() if shared else CopyToModelParallelRegion() for name in around - fused}
    plan.styles |= {name: CopyToModelParallelHeads() for name in fused}
    return plan


def _plan_adapted(plan: _Plan, name: str, module: nn.Module, *, splits_outputs: bool, shared: bool) -> None:
    """B A is split as the weight W beside it is: B by outputs, or A by inputs. The other matrix is whole, and each rank
    has the part of its gradient that comes from its outputs or inputs; no sum beside those of W is needed in a pass."""
    base, a, b, dropout = (
        f"{name}.{part}" for part in ("base_layer", f"lora_A.{ADAPTER}", f"lora_B.{ADAPTER}", f"lora_dropout.{ADAPTER}")
    )
    if splits_outputs:
        plan.styles |= {base: ColwiseLinear(), b: ColwiseLinear()}
        whole = module.lora_A[ADAPTER]
    else:
        plan.styles |= {base: PartialSum(), a: PartialSum(), dropout: ShardedDropout()}
        plan.styles[name] = ScatteredOutput() if shared else ReduceFromModelParallelRegion()
        whole = module.lora_B[ADAPTER]
    plan.in_part.append((whole, "weight"))


def _unknown(layer: nn.Module, name: str) -> ConfigError:
    return ConfigError(
        f"tensor parallelism cannot split {name!r} of a {type(layer).__name__}",
        expected=f"linear layers named {', '.join((*SPLIT_OUTPUTS, *SPLIT_INPUTS))}, norms of each head, or the vision "
        "layers of Qwen2.5-VL and Qwen3-VL",
        fix="use fsdp, which slices any weight",
    )
