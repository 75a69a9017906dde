"""Tensor-parallel plan of transformers layers, by the names of their linear modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.models.layers.lora import ADAPTER
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.pipeline_partition import Stage
from vlmpipe.trainer.strategies.tensor_parallel.replicated_gradients import Parameter
from vlmpipe.trainer.strategies.tensor_parallel.rowwise import RowwiseLinear
from vlmpipe.trainer.strategies.tensor_parallel.sequence_parallel import (
    GatheredInput,
    ScatteredOutput,
    SequenceParallel,
    scatter_sequence,
)
from vlmpipe.trainer.strategies.tensor_parallel.styles import (
    SCALE,
    ChunkedHeadLoss,
    ColwiseFusedLinear,
    ColwiseLinear,
    CopyToModelParallelHeads,
    CopyToModelParallelRegion,
    PartialSum,
    ReduceFromModelParallelRegion,
    ShardedDropout,
    ShardingStyle,
    VocabParallelEmbedding,
    VocabParallelLoss,
    linear_of,
)

# Column-parallel: each rank computes its heads, or its part of the inner width ...
SPLIT_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "linear_fc1")
# ... row-parallel: each rank multiplies what it computed, and the products are summed over ranks.
SPLIT_INPUTS = ("o_proj", "out_proj", "down_proj", "fc2", "linear_fc2")
# Attention whose `qkv` computes all queries, then all keys, then all values, with `num_heads` heads. By class: other
# modules of this name use another order, in which a rank's rows would belong to other heads.
FUSED_ATTENTION = ("Qwen2_5_VLVisionAttention", "Qwen3VLVisionAttention")
FUSED_OUTPUTS, FUSED_INPUTS = "qkv", "proj"


def parallelize(blocks: ShardingUnits, mesh: DeviceMesh, stage: Stage, *, sequence: bool) -> list[Parameter]:
    """Shard the layers of a stage, its embedding and its head over the ranks of `mesh`.

    Returns the replicated parameters whose gradients must be summed over ranks (`ReplicatedGradients`), because each
    rank uses them on a part only: query and key norms on its heads, the unsharded matrix of each adapter, and with
    `sequence` parallelism the language layers' norms on its tokens.
    """
    partial_gradients: list[Parameter] = []
    for layer, shared in _layers(blocks, stage, sequence=sequence):
        blocks.fill(layer)
        plan = _plan(layer, shared=shared)
        parallelize_module(layer, mesh, {**plan.styles})
        partial_gradients += plan.partial_gradients
    for ends in _ends(blocks, stage) if sequence else ():
        scatter_sequence(*ends, SequenceParallel.of(mesh))
    is_tied = blocks.is_tied
    if blocks.has_embedding(stage):
        blocks.fill(blocks.embedding)
        parallelize_module(blocks.embedding, mesh, VocabParallelEmbedding())
    if stage.is_last:
        if is_tied:
            blocks.head.weight = blocks.embedding.weight
        blocks.fill(blocks.head)
        _shard_head(blocks, mesh)
    return partial_gradients


def _shard_head(blocks: ShardingUnits, mesh: DeviceMesh) -> None:
    vocabulary, chunk_tokens = len(blocks.head.weight), blocks.loss.chunk_tokens
    parallelize_module(blocks.head, mesh, ChunkedHeadLoss(chunk_tokens) if chunk_tokens else ColwiseLinear())
    parallelize_module(blocks.head, mesh, CopyToModelParallelRegion())
    if not chunk_tokens:
        parallelize_module(blocks.loss, mesh, VocabParallelLoss(vocabulary))


def shard_first_rank(blocks: ShardingUnits, ranks: int, stage: Stage, *, sequence: bool) -> None:
    """Reduce a stage to the first rank's shard, without other ranks, to trace its memory. Its outputs mean nothing."""
    for layer, shared in _layers(blocks, stage, sequence=sequence):
        for name, style in _plan(layer, shared=shared).styles.items():
            style.cut(layer.get_submodule(name), ranks)
    for ends in _ends(blocks, stage) if sequence else ():
        scatter_sequence(*ends, SequenceParallel(ranks))
    matrices = [blocks.embedding.weight] if blocks.has_embedding(stage) else []
    for weight in {*matrices, *([blocks.head.weight] if stage.is_last else [])}:
        weight.data = weight.data.chunk(ranks)[0].clone()


def require_shardable(config: ModelConfig, ranks: int, *, cached: bool, sequence: bool = False) -> None:
    """Raise ConfigError for a model whose layers `ranks` ranks cannot shard, by tokens too with `sequence`. Builds it
    on the meta device only."""
    family = family_of(config)
    shape = family.shape(config)
    stacks = {"language model": shape.language}
    if shape.shards_tower and not cached:
        stacks["tower"] = shape.tower
    for part, stack in stacks.items():
        sizes = {"key-value heads": stack.kv_heads, "heads": stack.heads, "feed-forward width": stack.intermediate}
        for name, size in sizes.items():
            if size % ranks:
                raise ConfigError(
                    f"train.tensor_parallel {ranks} does not divide the {part}'s {name}, {size}",
                    expected="a number of ranks among which heads and feed-forward width divide",
                )
    with torch.device("meta"):
        num_layers = None if config.family in ("hf", "llava") else 1  # whose layers may differ
        model = family.skeleton(config, vocabulary=shape.vocabulary, language_layers=num_layers)
    blocks = family.blocks(family.training_module(config, model, cached=cached))
    for layer, shared in _layers(blocks, Stage.whole(len(blocks.language_layers)), sequence=sequence):
        _plan(layer, shared=shared)
    embedding = type(blocks.embedding)
    if embedding.forward is not nn.Embedding.forward and not hasattr(blocks.embedding, SCALE):
        raise ConfigError(f"tensor parallelism cannot split a {embedding.__name__}", fix="use fsdp")


def _layers(blocks: ShardingUnits, stage: Stage, *, sequence: bool) -> list[tuple[nn.Module, bool]]:
    """The layers of a stage, and whether ranks shard their tokens. Never in the tower, whose number of tokens does not
    divide and whose features are read between layers; nor in the first language layers of models that add image
    features between them, at positions of the whole sequence."""
    language = [blocks.language_layers[number] for number in _shareable(blocks, stage)]
    layers = blocks.layers_in(stage)
    if not blocks.shards_tower:
        layers = layers[: len(stage.layers)]
    return [(layer, sequence and layer in language) for layer in layers]


def _shareable(blocks: ShardingUnits, stage: Stage) -> list[int]:
    return [number for number in stage.layers if number >= blocks.image_layers]


def _ends(blocks: ShardingUnits, stage: Stage) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The first and last layer of each run of consecutive token-sharded layers."""
    layers = _shareable(blocks, stage)
    firsts = [number for number in layers if number - 1 not in layers]
    lasts = [number for number in layers if number + 1 not in layers]
    for first, last in zip(firsts, lasts, strict=True):
        yield blocks.language_layers[first], blocks.language_layers[last]


@dataclass
class _Plan:
    styles: dict[str, ShardingStyle] = field(default_factory=dict)  # by name of a module in the layer
    partial_gradients: list[Parameter] = field(default_factory=list)  # see `parallelize`


def _plan(layer: nn.Module, *, shared: bool) -> _Plan:
    """How to shard one layer. `shared`: tokens are sharded between its sharded parts.

    Raises ConfigError for a layer with unknown modules, which might be silently wrong.
    """
    plan = _Plan()
    linear: list[str] = []
    fused = {name for name, module in layer.named_modules() if type(module).__name__ in FUSED_ATTENTION}
    for name, module in layer.named_modules():
        is_adapted = hasattr(module, "lora_A")
        is_inside = any(name.startswith(f"{other}.") for other in linear)  # an adapted layer
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
            plan.styles[name] = RowwiseLinear(scatter=shared)
        if shared and splits_inputs and linear_of(module).bias is not None:
            plan.partial_gradients.append((linear_of(module), "bias"))
    around = {name.rpartition(".")[0] for name in linear}
    for name, module in layer.named_modules():
        parameters = list(module.named_parameters(recurse=False))
        parent = name.rpartition(".")[0]
        if parameters and name not in plan.styles and (name in around or parent in around):
            head_dim = getattr(layer.get_submodule(parent), "head_dim", None)
            if any(tuple(parameter.shape) != (head_dim,) for _, parameter in parameters):
                raise _unknown(layer, name)
            plan.partial_gradients += [(module, parameter) for parameter, _ in parameters]
        elif parameters and not any(name.startswith(f"{part}.") for part in around):
            if any(parameter.ndim > 1 for _, parameter in parameters):
                raise _unknown(layer, name)
            if shared:
                plan.partial_gradients += [(module, parameter) for parameter, _ in parameters]
    plan.styles |= {name: GatheredInput() if shared else CopyToModelParallelRegion() for name in around - fused}
    plan.styles |= {name: CopyToModelParallelHeads() for name in fused}
    return plan


def _plan_adapted(plan: _Plan, name: str, module: nn.Module, *, splits_outputs: bool, shared: bool) -> None:
    """Shard the adapter B A like its weight W: B by outputs, or A by inputs. The other matrix is replicated and each
    rank computes a part of its gradient, so a pass needs no collective beside those of W."""
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
    plan.partial_gradients.append((whole, "weight"))


def _unknown(layer: nn.Module, name: str) -> ConfigError:
    return ConfigError(
        f"tensor parallelism cannot split {name!r} of a {type(layer).__name__}",
        expected=f"linear layers named {', '.join((*SPLIT_OUTPUTS, *SPLIT_INPUTS))}, norms of each head, or the vision "
        "layers of Qwen2.5-VL and Qwen3-VL",
        fix="use fsdp, which slices any weight",
    )
