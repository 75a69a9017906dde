"""Frozen linear layers and experts with 4-bit weights, for adapters on a quantized language model (QLoRA).

Dettmers et al. 2023 (arXiv 2305.14314): a weight is stored as one of the 16 NF4 levels times the largest magnitude of
its block of 64, and these magnitudes are stored in 8 bits (double quantization). bitsandbytes quantizes, always on the
CPU: training and export then round in the same way, whatever the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.hooks.feature import Feature, Weights
from vlmpipe.trainer.models.layers.experts import STORED, compute_weights, is_experts, weights_in
from vlmpipe.trainer.models.layers.freeze import is_adapter, plain_name

BLOCK, SCALES_BLOCK = 64, 256  # weights that share a magnitude, and magnitudes that share one
LEVELS, SCALE_LEVELS = 16, 256


class QuantizedBase(Feature):
    """Quantizes the frozen linear layers and experts of the language model."""

    def require(self, device: torch.device) -> None:
        require_bitsandbytes()

    def change_model(self, model: nn.Module, *, has_values: bool = True) -> None:
        quantize_base(model, has_values=has_values)

    def quantized_size(self, model: nn.Module) -> tuple[int, int]:
        return quantized_size(model)

    def as_trained(self, initial: Weights, model: nn.Module) -> Weights:
        return QuantizedWeights(initial, quantized_names(model))


class Nf4Weight(nn.Module):
    """A weight that rests in 4 bits: of a linear layer, (rows, columns), or of experts, (experts, rows, columns)."""

    def __init__(self, weight: Tensor, *, has_values: bool = True) -> None:
        """`has_values`: False leaves the buffers undefined, for meta and fake tensors."""
        super().__init__()
        self.shape = weight.shape
        blocks = -(-weight.numel() // BLOCK)
        groups = -(-blocks // SCALES_BLOCK)
        sizes = {
            "packed": ((-(-weight.numel() // 2), 1), torch.uint8),
            "scales": ((blocks,), torch.uint8),
            "scale_scales": ((groups,), torch.float32),
            "offset": ((), torch.float32),
            "levels": ((LEVELS,), torch.float32),
            "scale_levels": ((SCALE_LEVELS,), torch.float32),
        }
        values = _quantize(weight) if has_values else {}
        for name, (shape, dtype) in sizes.items():
            tensor = values[name] if has_values else torch.empty(shape, dtype=dtype, device=weight.device)
            assert tensor.shape == shape and tensor.dtype == dtype, f"{name}: {tuple(tensor.shape)}, {tensor.dtype}"
            # Not in checkpoints: frozen weights are built from their source.
            self.register_buffer(name, tensor.to(weight.device), persistent=False)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight, in its shape."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        of_scales = QuantState(
            absmax=self.scale_scales, code=self.scale_levels, blocksize=SCALES_BLOCK, dtype=torch.float32
        )
        state = QuantState(
            absmax=self.scales,
            shape=self.shape,
            code=self.levels,
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=dtype,
            offset=self.offset,
            state2=of_scales,
        )
        weight: Tensor = dequantize_4bit(self.packed, state)
        return weight.reshape(self.shape)  # of two numbers it returns the transposed matrix

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Nf4Weight:
        """Move with the module, but never cast: scales in half precision would be other scales."""
        buffers = {id(buffer) for buffer in self._buffers.values()}
        super()._apply(lambda tensor: tensor.to(fn(tensor).device) if id(tensor) in buffers else fn(tensor), recurse)
        return self


class Nf4Linear(Nf4Weight):
    """A linear layer whose weight rests in 4 bits and is dequantized for each product, in the type of the input.

    The backward pass dequantizes again: no layer holds on to a dequantized weight.
    """

    def __init__(self, linear: nn.Linear, *, has_values: bool = True) -> None:
        super().__init__(linear.weight, has_values=has_values)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        output: Tensor = _Product.apply(hidden, self)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _ProductContext(FunctionCtx):
    """Values saved for the backward pass."""

    layer: Nf4Linear


class _Product(torch.autograd.Function):
    """hidden x weight^T, which saves no dequantized weight for the backward pass."""

    @staticmethod
    def forward(ctx: _ProductContext, hidden: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(hidden, layer.dequantized(hidden.dtype))

    @staticmethod
    def backward(ctx: _ProductContext, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.dequantized(gradient.dtype), None


class QuantizedWeights:
    """Initial weights as training sees them: those in `names` are quantized and dequantized. A `Weights`."""

    def __init__(self, weights: Weights, names: Collection[str]) -> None:
        self._weights, self._names = weights, names

    def read(self, name: str) -> Tensor:
        weight = self._weights.read(name)
        if name not in self._names:
            return weight
        return Nf4Weight(weight).dequantized(weight.dtype)


def quantize_base(model: nn.Module, *, has_values: bool = True) -> None:
    """Replace every frozen linear layer in the language model's blocks by an `Nf4Linear`, and store the frozen weights
    of experts as `Nf4Weight`.

    Raises UserError (exit 69) where bitsandbytes is not installed.
    """
    require_bitsandbytes()
    layers = model.get_decoder().layers
    for name, linear in list(_frozen_linear(layers)):
        parent, _, leaf = name.rpartition(".")
        setattr(layers.get_submodule(parent), leaf, Nf4Linear(linear, has_values=has_values))
    for name, experts, weights in list(_frozen_experts(layers)):
        stored = {leaf: Nf4Weight(weight, has_values=has_values) for leaf, weight in weights.items()}
        for leaf in stored:
            delattr(experts, leaf)
        experts.add_module(STORED, nn.ModuleDict(stored))
        compute_weights(layers.get_submodule(plain_name(f"{name}.").rstrip(".")), experts)


def quantized_names(model: nn.Module) -> set[str]:
    """Weights that `quantize_base` would quantize, by their names in the model without adapters."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    linear = {f"{name}.weight" for name, _ in _frozen_linear(decoder.layers)}
    experts = {f"{name}.{leaf}" for name, _, weights in _frozen_experts(decoder.layers) for leaf in weights}
    return {plain_name(f"{prefix}.layers.{name}") for name in linear | experts}


def quantized_size(model: nn.Module) -> tuple[int, int]:
    """Weights that `quantize_base` quantizes, and the bytes that these take then."""
    layers = model.get_decoder().layers
    weights = [linear.weight for _, linear in _frozen_linear(layers)]
    weights += [weight for _, _, of_experts in _frozen_experts(layers) for weight in of_experts.values()]
    buffers = [buffer for weight in weights for buffer in Nf4Weight(weight, has_values=False).buffers()]
    return sum(weight.numel() for weight in weights), sum(buffer.nbytes for buffer in buffers)


def require_bitsandbytes() -> None:
    """Raises UserError (exit 69) where it is not installed."""
    # It warns of an optional package for 4-bit inference on CPUs, which is not used here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"model.lora.quantize_base needs bitsandbytes: {error}",
            expected="bitsandbytes, which quantizes and dequantizes the frozen weights",
            fix="pip install 'vlmpipe[qlora]', or leave quantize_base out",
            code=ExitCode.UNAVAILABLE,
        ) from error


def _frozen_linear(layers: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in layers.named_modules():
        if isinstance(module, nn.Linear) and not is_adapter(f"{name}.") and not module.weight.requires_grad:
            yield name, module


def _frozen_experts(layers: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    for name, module in layers.named_modules():
        if is_experts(module):
            frozen = {leaf: weight for leaf, weight in weights_in(module).items() if not weight.requires_grad}
            if frozen:
                yield name, module, frozen


def _quantize(weight: Tensor) -> dict[str, Tensor]:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        weight.detach().cpu().float(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return {
        "packed": packed,
        "scales": state.absmax,
        "scale_scales": state.state2.absmax,
        "offset": state.offset,
        "levels": state.code,
        "scale_levels": state.state2.code,
    }


FEATURE = QuantizedBase()
