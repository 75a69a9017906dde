"""Checks what DeepSpeed needs of the machine and the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from vlmpipe.trainer.distributed.process import ProcessContext


def require_engine(config: TrainConfig, worker: ProcessContext) -> None:
    """Raise ConfigError where this machine lacks what the DeepSpeed settings need."""
    if config.quantized:
        _require_quantizer(config.quantized[0], worker)


def require_fp16_gradients(module: nn.Module) -> None:
    """Raise ConfigError for a trained matrix whose gradient is not sent in fp16.

    Under autocast only linear and convolutional layers send fp16 (`deepspeed/runtime/torch_autocast.py`), and the
    quantization kernel silently reads any other type as fp16 (`swizzle_quant` in DeepSpeed 0.19).
    """
    from deepspeed.runtime.torch_autocast import LOWER_PRECISION_SAFE_MODULES

    in_fp16 = {
        id(parameter)
        for part in module.modules()
        if type(part) in LOWER_PRECISION_SAFE_MODULES
        for parameter in part.parameters(recurse=False)
    }
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.ndim > 1 and id(parameter) not in in_fp16:
            raise ConfigError(
                f"train.zero_quantized_gradients would corrupt the gradient of {name}, which travels in fp32",
                expected="only linear and convolutional layers trained: no embedding",
                fix="train adapters (model.lora) or the projector alone, or set the field to false",
            )


def _require_quantizer(field: str, worker: ProcessContext) -> None:
    if worker.device.type != "cuda":
        raise ConfigError(
            f"train.{field} needs GPUs, and this machine has none: its numbers are rounded by CUDA kernels",
            fix=f"set train.{field} to false, or give the job GPUs",
        )
    from deepspeed.ops.op_builder import QuantizerBuilder

    if not QuantizerBuilder().is_compatible(verbose=False):
        raise ConfigError(
            f"train.{field} needs CUDA kernels that DeepSpeed compiles when it starts, and cannot compile here",
            expected="nvcc, a C++ compiler and ninja in the trainer image, which the image of this project has not",
            fix=f"set train.{field} to false, or build an image with the CUDA toolkit",
        )
