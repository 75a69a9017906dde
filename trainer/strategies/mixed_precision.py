"""Precision of computing and of the state at rest, and the fp16 loss scale.

`bf16` keeps masters: the optimizer's fp32 weights, of which bf16 copies compute (decision 0055). Its strategies cast by
FSDP's policy or DeepSpeed's bf16 engine. `bf16-autocast` and `fp16` compute with fp32 weights under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.config.train_options import Precision
from vlmpipe.trainer.errors import DataError

COMPUTE_TYPES = {"bf16": torch.bfloat16, "bf16-autocast": torch.bfloat16, "fp16": torch.float16}
STATE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# torch.amp.GradScaler's values.
FIRST_SCALE, GROWTH, STEPS_TO_GROW = 2.0**16, 2.0, 2000
MAX_OVERFLOWS_IN_A_ROW = 20  # 16 of them take the first scale down to 1


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Compute in `precision` with fp32 weights."""
    dtype = COMPUTE_TYPES.get(precision)
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def compute_policy(config: TrainConfig) -> MixedPrecisionPolicy:
    """Sharded weights stay fp32 and compute in `train.precision`."""
    if config.precision == "fp32":
        return MixedPrecisionPolicy()
    dtype, reduce = COMPUTE_TYPES[config.precision], STATE_TYPES[config.reduce_dtype]
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, cast_forward_inputs=False)


class LossScale:
    """Factor of the loss before the backward pass: 1 unless the precision is fp16.

    fp16 has no numbers below 6e-8, the size of many gradients (Micikevicius et al. 2018, arXiv 1710.03740, 3.2). The
    scale is a power of two, so it changes no digit. A step whose gradients overflow is skipped and halves it, many good
    steps double it. torch's GradScaler decides by each rank's own gradients; here the norm over all ranks decides, so
    ranks cannot disagree.
    """

    def __init__(self, precision: Precision) -> None:
        self.is_on = precision == "fp16"
        self.value = FIRST_SCALE if self.is_on else 1.0
        self._good_steps = self._in_a_row = 0
        self.overflows = 0  # steps skipped since the run began

    def accepts(self, norm: Tensor | float) -> bool:
        """Return whether to use gradients with this global norm. Updates the scale.

        Raises DataError when many steps in a row overflow, which no scale can mend.
        """
        if not self.is_on:
            return True  # reading the norm would make the host wait
        if math.isfinite(float(norm)):
            self._good_steps, self._in_a_row = self._good_steps + 1, 0
            if self._good_steps == STEPS_TO_GROW:
                self.value, self._good_steps = self.value * GROWTH, 0
            return True
        self.overflows += 1
        self._in_a_row += 1
        if self._in_a_row == MAX_OVERFLOWS_IN_A_ROW:
            raise DataError(
                f"the gradients of {self._in_a_row} steps in a row overflow fp16, also at loss scale {self.value:g}",
                expected="a finite gradient norm once the loss scale is small enough",
                fix="take train.precision bf16 or fp32, lower train.optimizer.learning_rate, or look at the samples",
            )
        self.value, self._good_steps = self.value / GROWTH, 0
        return False

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide gradients by the scale. Call it before `accepts`, which may change the scale."""
        if self.is_on:
            for parameter in parameters:
                if parameter.grad is not None:
                    gradient = parameter.grad
                    (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(1 / self.value)

    def state(self) -> dict[str, object]:
        """Checkpoint entry; empty unless the precision is fp16."""
        numbers = [self.value, self._good_steps, self._in_a_row, self.overflows]
        return {"loss_scale": torch.tensor(numbers, dtype=torch.float64)} if self.is_on else {}

    def restore(self, numbers: Tensor) -> None:
        """Restore from the tensor of `state`."""
        value, good_steps, in_a_row, overflows = numbers.tolist()
        self.value, self._good_steps, self._in_a_row = value, int(good_steps), int(in_a_row)
        self.overflows = int(overflows)
