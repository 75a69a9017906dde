"""The run file's `train.optimizer` section: AdamW."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vlmpipe.trainer.config.base import Section


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, 2019)."""

    name: Literal["adamw", "adamw_8bit"] = Field(
        "adamw",
        description="adamw, or adamw_8bit, which stores the moments of large matrices in 8 bits: 2 bytes a parameter "
        "instead of 8. Embedding, head, vectors and matrices whose rows are no multiple of 256 keep fp32. adamw_8bit "
        "is for fsdp and hsdp.",
    )
    learning_rate: float = Field(gt=0, description="Peak learning rate; not scaled by the number of ranks.")
    projector_learning_rate: float = Field(
        0.0, ge=0, description="Peak learning rate of the projector; 0 takes learning_rate."
    )
    tower_learning_rate: float = Field(
        0.0,
        ge=0,
        description="Peak learning rate of a trained tower; 0 takes learning_rate. Set it below learning_rate to change"
        " a pretrained tower less.",
    )
    batch_scaling: Literal["none", "sqrt", "linear"] = Field(
        "none",
        description="Scaling of all learning rates by global_batch_size / reference_batch_size: linear, sqrt (its "
        "square root, for AdamW), or none.",
    )
    reference_batch_size: int = Field(
        0, ge=0, description="Packed sequences per step that the learning rates are meant for. For batch_scaling."
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of matrices; biases and norms are not decayed.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Decay rates of AdamW's moments.")
    eps: float = Field(
        1e-8,
        gt=0,
        description="Term added to AdamW's denominator. Raise it where updates of small gradients are too large.",
    )
