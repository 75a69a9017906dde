"""Number types of weights, gradients and their sums, and which settings of them exclude each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vlmpipe.trainer.config.train import TrainConfig

Precision = Literal["fp32", "bf16", "bf16-autocast", "fp16"]
ComputeType = Literal["fp32", "bf16", "fp16"]
StateType = Literal["fp32", "bf16"]
Compression = Literal["none", "bf16", "fp16"]

GATHERED_IN_BF16 = ("fsdp", "hsdp", "tp", "pp", "tp+pp+dp")  # which leaves autocast nothing to cast
SUMMING_IN_BF16 = ("zero1", "zero2", "zero3")  # FSDP's sums are always fp32
REDUCING_IN_BF16 = ("ddp", "fsdp", "hsdp", "tp", "zero1", "zero2", "zero3")


def require_number_types(train: TrainConfig) -> None:
    """Raise ValueError for types that have no effect or do not work together, with the nearest that do."""
    _require_state_types(train)
    _require_compression(train)


def sums_offloaded_in_bf16(precision: str, offload: str, strategy: str) -> bool:
    """Whether DeepSpeed sums gradients in the type of the weights, whatever it is asked for (0.19,
    `async_accumulate_grad_in_cpu_via_gpu`)."""
    return precision == "bf16" and offload == "optimizer" and strategy in ("zero1", "zero2")


def _require_state_types(train: TrainConfig) -> None:
    if train.precision == "bf16-autocast" and train.strategy in GATHERED_IN_BF16:
        raise ValueError(
            f"precision bf16-autocast does not work with strategy {train.strategy}, which gathers weights in bf16: use "
            "bf16"
        )
    for name, able in (("gradient_accumulation_dtype", SUMMING_IN_BF16), ("reduce_dtype", REDUCING_IN_BF16)):
        if getattr(train, name) == "fp32":
            continue
        if train.precision != "bf16":
            raise ValueError(f"{name} bf16 does not apply to precision {train.precision}: set precision bf16 too")
        if train.strategy not in able:
            raise ValueError(
                f"{name} bf16 does not work with strategy {train.strategy}: use one of {', '.join(able)}, or fp32"
            )
    if train.gradient_accumulation_dtype == "fp32" and sums_offloaded_in_bf16(
        train.precision, train.offload, train.strategy
    ):
        raise ValueError(
            f"DeepSpeed sums offloaded gradients of strategy {train.strategy} in bf16: use zero3, or set "
            "gradient_accumulation_dtype to bf16"
        )


def _require_compression(train: TrainConfig) -> None:
    compression = train.gradient_compression
    if compression != "none" and train.strategy != "ddp":
        raise ValueError(
            f"gradient_compression {compression} does not work with strategy {train.strategy}: use ddp, or set it to "
            "none; others send gradients in train.reduce_dtype"
        )
    if compression != "none" and train.precision == "bf16":
        raise ValueError(
            f"gradient_compression {compression} does not work with precision bf16: use precision bf16-autocast, or "
            "set reduce_dtype to bf16 in its place"
        )
