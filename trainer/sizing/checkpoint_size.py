"""Size of a checkpoint. No torch here: planners read it."""

from __future__ import annotations

from trainer.config.train import TrainConfig

STATE_BYTES = 12  # of a trained parameter: fp32 weight and the two moments of AdamW
AVERAGE_BYTES = 4  # and the average of the weights, where train.ema_decay keeps one
ERROR_BYTES = 4  # of what PowerSGD has left out, of each rank
DEEPSPEED_WEIGHT_BYTES = 4  # of a module whose weights are whole, besides the optimizer's


def checkpoint_bytes(num_trainable: int, settings: TrainConfig, data_parallel: int) -> int:
    """Of a run with these settings on so many copies of the model, but for some KiB that every file has."""
    per_parameter = STATE_BYTES
    if settings.ema_decay:
        per_parameter += AVERAGE_BYTES
    if settings.gradient_rank and data_parallel > 1:
        per_parameter += data_parallel * ERROR_BYTES
    if settings.strategy in ("zero1", "zero2"):
        per_parameter += DEEPSPEED_WEIGHT_BYTES
    return num_trainable * per_parameter
