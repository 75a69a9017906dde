"""Size of a checkpoint, and disk of a node that saving and resuming take. Imports no torch: the planner reads it."""

from __future__ import annotations

from vlmpipe.trainer.config.train import TrainConfig

# Bytes for each trained parameter.
STATE_BYTES = 12  # fp32 weight and the two moments of AdamW
AVERAGE_BYTES = 4  # average of the weights (train.ema_decay)
DEEPSPEED_WEIGHT_BYTES = 4  # the module's weights besides the optimizer's; half of it in bf16


def checkpoint_bytes(num_trainable: int, settings: TrainConfig, data_parallel: int) -> int:
    """Return the bytes of a checkpoint, without some KiB of file headers. data_parallel: copies of the model."""
    per_parameter = STATE_BYTES
    if settings.ema_decay:
        per_parameter += AVERAGE_BYTES
    if settings.strategy in ("zero1", "zero2"):
        per_parameter += _module_bytes(settings)
    return num_trainable * per_parameter


def node_bytes(num_trainable: int, settings: TrainConfig, *, data_parallel: int, nodes: int, in_bucket: bool) -> int:
    """Local disk that checkpoints take of each of `nodes` nodes at once: the most of a save and of a resume.

    A save writes the node's share. A resume from a bucket fetches what the node's ranks load, before the first save,
    and deletes it: with ddp and hsdp, whose nodes hold the whole model, all of it; with zero1 and zero2 the module's
    weights besides its share. Checkpoints in a folder are read where they are.
    """
    if in_bucket:
        return resumed_bytes(num_trainable, settings, data_parallel=data_parallel, nodes=nodes)
    return checkpoint_bytes(num_trainable, settings, data_parallel) // nodes


def resumed_bytes(num_trainable: int, settings: TrainConfig, *, data_parallel: int, nodes: int) -> int:
    """Bytes of a checkpoint that each of `nodes` nodes reads when training resumes: no less than its share."""
    whole = checkpoint_bytes(num_trainable, settings, data_parallel)
    share = whole // nodes
    if settings.strategy in ("ddp", "hsdp"):
        return whole
    if settings.strategy in ("zero1", "zero2"):
        share += num_trainable * _module_bytes(settings) * (nodes - 1) // nodes
    return share


def _module_bytes(settings: TrainConfig) -> int:
    return DEEPSPEED_WEIGHT_BYTES // (2 if settings.has_bf16_weights else 1)
