"""Size of a checkpoint. Imports no torch: the planner reads it."""

from __future__ import annotations

from vlmpipe.trainer.config.train import TrainConfig

# Bytes for each trained parameter.
STATE_BYTES = 12  # fp32 weight and the two moments of AdamW
AVERAGE_BYTES = 4  # average of the weights (train.ema_decay)
ERROR_BYTES = 4  # PowerSGD's compression error, for each rank
DEEPSPEED_WEIGHT_BYTES = 4  # the module's weights besides the optimizer's; half of it in bf16


def checkpoint_bytes(num_trainable: int, settings: TrainConfig, data_parallel: int) -> int:
    """Of a run with `data_parallel` copies of the model, without some KiB of each file's header."""
    per_parameter = STATE_BYTES
    if settings.ema_decay:
        per_parameter += AVERAGE_BYTES
    if settings.gradient_rank and data_parallel > 1:
        per_parameter += data_parallel * ERROR_BYTES
    if settings.strategy in ("zero1", "zero2"):
        per_parameter += DEEPSPEED_WEIGHT_BYTES // (2 if settings.has_bf16_weights else 1)
    return num_trainable * per_parameter
