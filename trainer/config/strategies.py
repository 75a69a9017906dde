"""The abilities of each strategy of `train.strategy`: one row a strategy."""

from __future__ import annotations

from typing import Literal

Ability = Literal[
    "splits layers",  # ranks share each layer
    "splits the stack",  # ranks share the stack of layers
    "shares sequences",  # ranks may share a sequence
    "defers weights",  # reads stored weights while it shards them
    "8-bit state",  # shards 8-bit moments and saves them by parameter name
    "quantized base",  # a quantized base equals its dequantized weights
    "DoRA",  # a DoRA layer has whole weights on each rank
    "preferences",  # a rank has whole pairs and their whole loss
    "gathers weights",  # gathers them for each pass
    "offloads activations",  # takes one micro-batch after the other
    "compiles",  # zero3 gathers weights by hooks inside of layers, which torch.compile cannot trace
    "float8",
    "shards frozen",
    "gathers in bf16",  # which leaves autocast nothing to cast
    "sums in bf16",  # FSDP's sums are always fp32
    "reduces in bf16",
    "offloads the optimizer",
    "offloads optimizer and weights",
]
ABILITIES: dict[str, frozenset[Ability]] = {
    "ddp": frozenset({
        "shares sequences", "quantized base", "DoRA", "preferences", "offloads activations", "compiles", "float8",
        "reduces in bf16",
    }),
    "fsdp": frozenset({
        "shares sequences", "defers weights", "8-bit state", "quantized base", "DoRA", "preferences",
        "gathers weights", "offloads activations", "compiles", "float8", "shards frozen", "gathers in bf16",
        "reduces in bf16", "offloads optimizer and weights",
    }),
    "hsdp": frozenset({
        "shares sequences", "defers weights", "8-bit state", "quantized base", "DoRA", "preferences",
        "gathers weights", "offloads activations", "compiles", "float8", "shards frozen", "gathers in bf16",
        "reduces in bf16", "offloads optimizer and weights",
    }),
    "zero1": frozenset({
        "shares sequences", "DoRA", "preferences", "offloads activations", "compiles", "sums in bf16",
        "reduces in bf16", "offloads the optimizer",
    }),
    "zero2": frozenset({
        "shares sequences", "DoRA", "preferences", "offloads activations", "compiles", "sums in bf16",
        "reduces in bf16", "offloads the optimizer",
    }),
    "zero3": frozenset({
        "shares sequences", "defers weights", "preferences", "offloads activations", "sums in bf16",
        "reduces in bf16", "offloads the optimizer", "offloads optimizer and weights",
    }),
    "tp": frozenset({
        "splits layers", "defers weights", "gathers weights", "offloads activations", "compiles",
        "gathers in bf16", "reduces in bf16",
    }),
    "pp": frozenset({
        "splits the stack", "defers weights", "DoRA", "compiles", "gathers in bf16",
    }),
    "tp+pp+dp": frozenset({
        "splits layers", "splits the stack", "defers weights", "compiles", "gathers in bf16",
    }),
}  # fmt: skip


def strategies_with(ability: Ability) -> tuple[str, ...]:
    """Return the strategies that have the ability, in the table's order."""
    return tuple(name for name, abilities in ABILITIES.items() if ability in abilities)


TENSOR_PARALLEL = strategies_with("splits layers")
PIPELINE_PARALLEL = strategies_with("splits the stack")
CONTEXT_PARALLEL = strategies_with("shares sequences")
DEFERRING = strategies_with("defers weights")
STATE_IN_8_BITS = strategies_with("8-bit state")
QUANTIZING = strategies_with("quantized base")
DECOMPOSING = strategies_with("DoRA")
PREFERRING = strategies_with("preferences")
GATHERING = strategies_with("gathers weights")
OFFLOADING_ACTIVATIONS = strategies_with("offloads activations")
COMPILING = strategies_with("compiles")
COMPUTING_IN_FLOAT8 = strategies_with("float8")
SHARDING_FROZEN = strategies_with("shards frozen")
GATHERED_IN_BF16 = strategies_with("gathers in bf16")
SUMMING_IN_BF16 = strategies_with("sums in bf16")
REDUCING_IN_BF16 = strategies_with("reduces in bf16")
OFFLOADING = {
    "optimizer": strategies_with("offloads the optimizer"),
    "optimizer+weights": strategies_with("offloads optimizer and weights"),
}
OF_OBJECTIVES = {"dpo_beta": "dpo", "simpo_beta": "simpo", "simpo_gamma": "simpo"}  # settings of one objective


def sums_offloaded_in_bf16(precision: str, offload: str, strategy: str) -> bool:
    """Return whether DeepSpeed sums gradients in the type of the weights, whatever it is asked for (0.19,
    `async_accumulate_grad_in_cpu_via_gpu`)."""
    return precision == "bf16" and offload == "optimizer" and strategy in ("zero1", "zero2")
