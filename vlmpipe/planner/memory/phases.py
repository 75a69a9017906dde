"""Peak-memory phases of a step without pipeline parallelism."""

from __future__ import annotations

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.memory.activations import Activations
from vlmpipe.planner.memory.components import BF16_BYTES, FP32_BYTES, Gathering, MemoryPart
from vlmpipe.planner.memory.rank import training_phases
from vlmpipe.planner.memory.zero_persistence import persistent_elements
from vlmpipe.planner.parallel_layout import Layout
from vlmpipe.trainer.sizing.model_shape import ModelShape


def run_phases(
    config: RunConfig,
    shape: ModelShape,
    layout: Layout,
    held: Activations,
    *,
    cached: bool,
    passes: int,
    on_gpu: bool = True,
) -> dict[str, list[MemoryPart]]:
    """All that torch allocates. Arguments as `training_phases` has them; `held`: the activations."""
    train = config.train
    return training_phases(
        shape,
        layout,
        held,
        cached=cached,
        precision=train.precision,
        bf16_weights=train.has_bf16_weights,
        reduce_bytes=BF16_BYTES if train.reduce_dtype == "bf16" else FP32_BYTES,
        sum_bytes=BF16_BYTES if train.gradient_accumulation_dtype == "bf16" else FP32_BYTES,
        passes=passes,
        checkpointing=train.activation_checkpointing == "full",
        recomputing=train.activation_checkpointing != "none",
        on_gpu=on_gpu,
        offload=train.offload,
        rounded=train.rounds_gradients,
        averaged=train.ema_decay > 0,
        deepspeed=train.deepspeed,
        persistent=persistent_elements(config, shape),
        in_8_bits=shape.in_8_bits if train.optimizer.name == "adamw_8bit" else 0,
        gathering=Gathering(train.keeps_gathered_weights, train.prefetch_layers),
    )
