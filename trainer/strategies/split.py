"""How tensor parallelism splits the layers of transformers' models, by the names that they give their linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from trainer.errors import ConfigError
from trainer.model_config import ModelConfig
from trainer.models.family import Blocks, Stage
from trainer.models.table import family_of
from trainer.strategies.split_modules import (
    EqualInput,
    SplitChunkedHead,
    SplitEmbedding,
    SplitInputs,
    SplitOutputs,
    SplitTokenLoss,
)

# Rows of the weight are split: each rank computes its heads, or its part of the inner width ...
SPLIT_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1")
# ... and here columns: each rank takes what it has computed, and the results are summed over ranks.
SPLIT_INPUTS = ("o_proj", "out_proj", "down_proj", "fc2")


def split(blocks: Blocks, mesh: DeviceMesh, stage: Stage) -> list[nn.Module]:
    """Split the layers of a stage, and its embedding and head by vocabulary, over the ranks of `mesh`.

    Returns the modules that are whole on each rank but work on its heads only (norms of queries and keys): the
    gradients of their parameters have yet to be summed over ranks.
    """
    on_heads = []
    for layer in blocks.layers_in(stage):
        plan, inside = _plan(layer)
        parallelize_module(layer, mesh, plan)
        on_heads += inside
    is_tied = blocks.is_tied
    if blocks.has_embedding(stage):
        parallelize_module(blocks.embedding, mesh, SplitEmbedding())
    if stage.is_last:
        if is_tied:
            blocks.head.weight = blocks.embedding.weight
        _split_head(blocks, mesh)
    return on_heads


def _split_head(blocks: Blocks, mesh: DeviceMesh) -> None:
    vocabulary, chunk_tokens = len(blocks.head.weight), blocks.loss.chunk_tokens
    parallelize_module(blocks.head, mesh, SplitChunkedHead(chunk_tokens) if chunk_tokens else SplitOutputs())
    parallelize_module(blocks.head, mesh, EqualInput())
    if not chunk_tokens:
        parallelize_module(blocks.loss, mesh, SplitTokenLoss(vocabulary))


def sum_gradients_of_heads(on_heads: Sequence[nn.Module], group: ProcessGroup) -> None:
    """Of norms of queries and keys, which have seen the heads of this rank only: without this they drift apart,
    silently. `on_heads` is what `split` gave, `group` the ranks that it split over."""
    gradients: list[Tensor] = [
        parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        for module in on_heads
        for parameter in module.parameters()
        if parameter.grad is not None
    ]
    if gradients:
        together = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(together, group=group)
        for gradient, total in zip(gradients, together.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))


def cut(blocks: Blocks, ranks: int, stage: Stage) -> None:
    """Leave of a stage what the first rank has of it after `split`, to see what a step holds: its results are not those
    of any model."""
    for layer in blocks.layers_in(stage):
        for name in _plan(layer)[0]:
            module = layer.get_submodule(name)
            if isinstance(module, nn.Linear):
                is_split_by_output = name.rpartition(".")[2] in SPLIT_OUTPUTS
                for parameter in module.parameters() if is_split_by_output else (module.weight,):
                    parameter.data = parameter.data.chunk(ranks, dim=0 if is_split_by_output else 1)[0].clone()
    matrices = [blocks.embedding.weight] if blocks.has_embedding(stage) else []
    for weight in {*matrices, *([blocks.head.weight] if stage.is_last else [])}:
        weight.data = weight.data.chunk(ranks)[0].clone()


def require_splittable(config: ModelConfig, ranks: int, *, cached: bool) -> None:
    """Raises ConfigError for a model whose layers `ranks` ranks cannot split between them. Builds nothing large."""
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
    for layer in (*blocks.language_layers, *blocks.tower_layers):
        _plan(layer)


def _plan(layer: nn.Module) -> tuple[dict[str, ParallelStyle], list[nn.Module]]:
    """How to split one layer, and its modules that then work on a part of the heads.

    Raises ConfigError for a layer with anything else in it: what is not known to be right would be silently wrong.
    """
    plan: dict[str, ParallelStyle] = {}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            role = name.rpartition(".")[2]
            if role not in (*SPLIT_OUTPUTS, *SPLIT_INPUTS):
                raise _unknown(layer, name)
            plan[name] = SplitOutputs() if role in SPLIT_OUTPUTS else SplitInputs()
    around = {name.rpartition(".")[0] for name in plan}
    on_heads = []
    for name, module in layer.named_modules():
        own = list(module.parameters(recurse=False))
        parent = name.rpartition(".")[0]
        if own and name not in plan and (name in around or parent in around):
            head_dim = getattr(layer.get_submodule(parent), "head_dim", None)
            if any(tuple(parameter.shape) != (head_dim,) for parameter in own):
                raise _unknown(layer, name)
            on_heads.append(module)
    return {**plan, **{name: EqualInput() for name in around}}, on_heads


def _unknown(layer: nn.Module, name: str) -> ConfigError:
    return ConfigError(
        f"tensor parallelism cannot split {name!r} of a {type(layer).__name__}",
        expected=f"linear layers named {', '.join((*SPLIT_OUTPUTS, *SPLIT_INPUTS))}, and norms of each head",
        fix="use fsdp, which slices any weight",
    )
