"""The abilities of each strategy of `train.strategy`."""

from __future__ import annotations

TENSOR_PARALLEL = ("tp", "tp+pp+dp")  # strategies in which ranks split each layer
PIPELINE_PARALLEL = ("pp", "tp+pp+dp")  # and those in which they split the stack of layers
CONTEXT_PARALLEL = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")  # and those in which they may share sequences
DEFERRING = ("fsdp", "hsdp", "zero3", "tp", "pp", "tp+pp+dp")  # read stored weights while they shard them
STATE_IN_8_BITS = ("fsdp", "hsdp")  # strategies that shard 8-bit moments and save them by parameter name
QUANTIZING = ("ddp", "fsdp", "hsdp")  # strategies under which a quantized base equals its dequantized weights
DECOMPOSING = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "pp")  # a DoRA layer has whole weights on each rank
PREFERRING = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")  # a rank has whole pairs and their whole loss
OF_OBJECTIVES = {"dpo_beta": "dpo", "simpo_beta": "simpo", "simpo_gamma": "simpo"}  # settings of one objective
GATHERING = ("fsdp", "hsdp", "tp")  # strategies that gather weights for each pass
OFFLOADING_ACTIVATIONS = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "tp")  # one micro-batch at a time
# zero3 gathers weights by hooks inside of layers, which torch.compile cannot trace.
COMPILING = ("ddp", "fsdp", "hsdp", "tp", "pp", "tp+pp+dp", "zero1", "zero2")
COMPUTING_IN_FLOAT8 = ("ddp", "fsdp", "hsdp")
SHARDING_FROZEN = ("fsdp", "hsdp")
OFFLOADING = {"optimizer": ("zero1", "zero2", "zero3"), "optimizer+weights": ("zero3", "fsdp", "hsdp")}
GATHERED_IN_BF16 = ("fsdp", "hsdp", "tp", "pp", "tp+pp+dp")  # which leaves autocast nothing to cast
SUMMING_IN_BF16 = ("zero1", "zero2", "zero3")  # FSDP's sums are always fp32
REDUCING_IN_BF16 = ("ddp", "fsdp", "hsdp", "tp", "zero1", "zero2", "zero3")


def sums_offloaded_in_bf16(precision: str, offload: str, strategy: str) -> bool:
    """Return whether DeepSpeed sums gradients in the type of the weights, whatever it is asked for (0.19,
    `async_accumulate_grad_in_cpu_via_gpu`)."""
    return precision == "bf16" and offload == "optimizer" and strategy in ("zero1", "zero2")
