"""Size of a checkpoint, and disk of a node that saving and resuming take. Imports no torch: the planner reads it."""

from __future__ import annotations

from vlmpipe.trainer.config.train import TrainConfig

# Bytes for each trained parameter.
STATE_BYTES = 12  # fp32 weight and the two moments of AdamW
AVERAGE_BYTES = 4  # average of the weights (train.ema_decay)


def checkpoint_bytes(num_trainable: int, settings: TrainConfig) -> int:
    """Return the bytes of a checkpoint, without some KiB of file headers."""
    return num_trainable * (STATE_BYTES + (AVERAGE_BYTES if settings.ema_decay else 0))


def node_bytes(num_trainable: int, settings: TrainConfig, *, nodes: int, in_bucket: bool) -> int:
    """Local disk that checkpoints take of each of `nodes` nodes at once: the most of a save and of a resume.

    A save writes the node's share. A resume from a bucket fetches what the node's ranks load, before the first save,
    and deletes it: with ddp and hsdp, whose nodes hold the whole model, all of it. Checkpoints in a folder are read
    where they are.
    """
    if in_bucket:
        return resumed_bytes(num_trainable, settings, nodes=nodes)
    return checkpoint_bytes(num_trainable, settings) // nodes


def resumed_bytes(num_trainable: int, settings: TrainConfig, *, nodes: int) -> int:
    """Bytes of a checkpoint that each of `nodes` nodes reads when training resumes: no less than its share."""
    whole = checkpoint_bytes(num_trainable, settings)
    return whole if settings.strategy in ("ddp", "hsdp") else whole // nodes
