"""Autocast, and the loss scale that keeps fp16 gradients in range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config.train import Precision
from trainer.errors import DataError

COMPUTE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# As torch.amp.GradScaler has them.
FIRST_SCALE, GROWTH, STEPS_TO_GROW = 2.0**16, 2.0, 2000
MOST_OVERFLOWS_IN_A_ROW = 20  # 16 of them take the first scale down to 1


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Compute in the type of `precision`, while weights stay fp32."""
    dtype = COMPUTE_TYPES.get(precision)
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


class LossScale:
    """What the loss is multiplied by before the backward pass: 1 unless the precision is fp16.

    fp16 has no numbers below 6e-8, where many gradients lie (Micikevicius et al. 2018, arXiv 1710.03740, 3.2). The
    scale is a power of two, so it changes no digit; a step whose gradients overflow is skipped and halves it, many good
    steps double it. Of torch's GradScaler it has the rule and not the class, which looks at each rank's own gradients:
    here the norm over all ranks decides, whatever the strategy, and they cannot disagree.
    """

    def __init__(self, precision: Precision) -> None:
        self.is_on = precision == "fp16"
        self.value = FIRST_SCALE if self.is_on else 1.0
        self._good_steps = self._in_a_row = 0
        self.overflows = 0  # steps skipped since the run began

    def accepts(self, norm: Tensor | float) -> bool:
        """Whether gradients with this norm, the same on all ranks, are to be used. Sets the scale of the next step.

        Raises DataError when many steps in a row overflow: the scale is not what is wrong then.
        """
        if not self.is_on:
            return True  # without a look at the number, for which the host would wait
        if math.isfinite(float(norm)):
            self._good_steps, self._in_a_row = self._good_steps + 1, 0
            if self._good_steps == STEPS_TO_GROW:
                self.value, self._good_steps = self.value * GROWTH, 0
            return True
        self.overflows += 1
        self._in_a_row += 1
        if self._in_a_row == MOST_OVERFLOWS_IN_A_ROW:
            raise DataError(
                f"the gradients of {self._in_a_row} steps in a row overflow fp16, also at loss scale {self.value:g}",
                expected="a finite gradient norm once the loss scale is small enough",
                fix="take train.precision bf16 or fp32, lower train.optimizer.learning_rate, or look at the samples",
            )
        self.value, self._good_steps = self.value / GROWTH, 0
        return False

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide gradients by the scale that they were computed with. Not after `accepts`, which may change it."""
        if self.is_on:
            for parameter in parameters:
                if parameter.grad is not None:
                    gradient = parameter.grad
                    (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(1 / self.value)

    def state(self) -> dict[str, Any]:
        """For a checkpoint; empty where there is no scale."""
        numbers = [self.value, self._good_steps, self._in_a_row, self.overflows]
        return {"loss_scale": torch.tensor(numbers, dtype=torch.float64)} if self.is_on else {}

    def restore(self, numbers: Tensor) -> None:
        """From a state's tensor."""
        value, good_steps, in_a_row, overflows = numbers.tolist()
        self.value, self._good_steps, self._in_a_row = value, int(good_steps), int(in_a_row)
        self.overflows = int(overflows)
