"""The run file's `train.optimizer` section: AdamW."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vlmpipe.trainer.config.base import Section


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, 2019)."""

    name: Literal["adamw", "adamw_8bit"] = Field(
        "adamw",
        description="adamw_8bit stores the moments of large matrices in 8 bits: 2 bytes a parameter instead of 8. "
        "Embedding, head, vectors and matrices whose rows are no multiple of 256 keep fp32. For fsdp and hsdp.",
    )
    learning_rate: float = Field(gt=0, description="Peak learning rate; never scaled silently with world size.")
    projector_learning_rate: float = Field(0.0, ge=0, description="Own peak rate of the projector; 0 uses the common.")
    tower_learning_rate: float = Field(0.0, ge=0, description="Own peak rate of a trained tower; 0 uses the common.")
    batch_scaling: Literal["none", "sqrt", "linear"] = Field(
        "none",
        description="Scales all rates by global_batch_size / reference_batch_size, or by its square root, which suits "
        "AdamW. none leaves them as they are, whatever the batch.",
    )
    reference_batch_size: int = Field(
        0, ge=0, description="Packed sequences of a step that the rates are meant for; see above."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decay of matrices; biases and norms are not decayed.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Moment decay rates.")
    eps: float = Field(1e-8, gt=0, description="Denominator offset.")
