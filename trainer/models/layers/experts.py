"""Experts whose weights, (experts, rows, columns), are computed for each pass: from adapters, or from 4 bits.

PEFT's wrappers hold the adapters' matrices, and this module computes the product that they add. PEFT itself keeps the
sums of all layers for the backward pass, which takes as many bytes as the experts.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

COMPUTES_WEIGHTS = "vlmpipe_computes_weights"  # an attribute of modules whose weights are computed for each pass
STORED = "stored_weights"  # a submodule of experts: stored weights by name, each with `dequantized(dtype)`
EXPERT_AXES = 3


class StoredWeight(Protocol):
    """A weight in fewer bits."""

    def dequantized(self, dtype: torch.dtype) -> Tensor: ...


class Wrapper(Protocol):
    """PEFT's wrapper of one parameter (`ParamWrapper`), with an adapter's matrices by the adapter's name."""

    parameter_name: str
    base_layer: nn.Module
    active_adapters: list[str]
    lora_A: Mapping[str, nn.Linear]
    lora_B: Mapping[str, nn.Linear]
    scaling: Mapping[str, float]


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is experts whose layout transformers states."""
    return isinstance(getattr(module, "is_transposed", None), bool) and bool(weights_in(module))


def weights_in(experts: nn.Module) -> dict[str, Tensor]:
    """The matrices of experts by name, without those in 4 bits."""
    named = experts.named_parameters(recurse=False)
    return {name: parameter for name, parameter in named if parameter.ndim == EXPERT_AXES}


def factors(a: Tensor, b: Tensor, num_experts: int, *, is_transposed: bool) -> tuple[Tensor, Tensor]:
    """Return two tensors whose product for each expert is the adapter's update without its scale.

    a: (experts * rank, in), b: (out, rank * experts), in PEFT's order. The product is (experts, out, in), or (experts,
    in, out) if transposed.
    """
    a = a.reshape(num_experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, num_experts).permute(2, 0, 1)
    return (a.transpose(1, 2), b.transpose(1, 2)) if is_transposed else (b, a)


def compute_weights(outer: nn.Module, experts: nn.Module) -> None:
    """Have experts take weights that are computed in each pass, and in the backward pass again.

    outer: PEFT's outermost wrapper of the experts, or the experts themselves where they have no adapters.
    """
    if getattr(outer, COMPUTES_WEIGHTS, False):
        return
    setattr(outer, COMPUTES_WEIGHTS, True)
    plain = experts.forward if outer is experts else experts

    @torch.compiler.disable  # attributes of the module are replaced
    def forward(hidden: Tensor, *args: object, **named: object) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        weights = {name: make() for name, make in _makers(outer, experts, dtype).items()}
        attributes = vars(experts)
        attributes |= weights  # in front of parameters of these names
        try:
            with _recomputed(weights, functools.partial(_makers, outer, experts, dtype)):
                output: Tensor = plain(hidden, *args, **named)
        finally:
            for name in weights:
                attributes.pop(name, None)
        return output

    outer.forward = forward


def _makers(outer: nn.Module, experts: nn.Module, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    stored: dict[str, StoredWeight] = dict(getattr(experts, STORED, None) or {})
    adapters: dict[str, Wrapper] = {}
    while hasattr(outer, "parameter_name"):  # the outermost first
        adapters[outer.parameter_name], outer = outer, outer.base_layer
    names = dict.fromkeys((*stored, *adapters))
    return {name: functools.partial(_weight, experts, name, stored, adapters.get(name), dtype) for name in names}


def _weight(
    experts: nn.Module, name: str, stored: Mapping[str, StoredWeight], adapter: Wrapper | None, dtype: torch.dtype
) -> Tensor:
    weight = stored[name].dequantized(dtype) if name in stored else experts._parameters[name]
    assert weight is not None, f"{name} is neither stored nor a parameter"
    if adapter is None:
        return weight
    (chosen,) = adapter.active_adapters
    a, b = (matrices[chosen].weight.to(weight.dtype) for matrices in (adapter.lora_A, adapter.lora_B))
    left, right = factors(a, b, weight.shape[0], is_transposed=bool(experts.is_transposed))
    with torch.autocast(weight.device.type, enabled=False):
        return torch.baddbmm(weight, left, right, alpha=adapter.scaling[chosen])


@dataclass
class _Part:
    """A view of a computed weight, saved for the backward pass in its place."""

    name: str
    layout: tuple[torch.Size, tuple[int, ...], int | torch.SymInt]  # sizes, strides, and where it begins


class _Recomputed:
    """Saves how computed weights are made, and not these, for the backward pass."""

    def __init__(self, weights: dict[str, Tensor], makers: Callable[[], dict[str, Callable[[], Tensor]]]) -> None:
        self._names = {weight.untyped_storage()._cdata: name for name, weight in weights.items()}
        self._makers = makers
        self._made: dict[str, Tensor] = {}
        self._saved = Counter[str]()  # parts that the backward pass has not read

    def pack(self, tensor: Tensor) -> Tensor | _Part:
        name = self._names.get(tensor.untyped_storage()._cdata)
        if name is None:
            return tensor
        self._saved[name] += 1
        return _Part(name, (tensor.shape, tensor.stride(), tensor.storage_offset()))

    def unpack(self, saved: Tensor | _Part) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.name not in self._made:
            with torch.no_grad():
                self._made[saved.name] = self._makers()[saved.name]()
        whole = self._made[saved.name]
        self._saved[saved.name] -= 1
        if self._saved[saved.name] <= 0:
            del self._made[saved.name]
        return whole.as_strided(*saved.layout)


def _recomputed(
    weights: dict[str, Tensor], makers: Callable[[], dict[str, Callable[[], Tensor]]]
) -> AbstractContextManager[object]:
    """Hooks for the pass of experts.

    None where others decide about saved tensors already, as activation checkpointing does: inside of its hooks, these
    would keep all that it drops.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return contextlib.nullcontext()
    hooks = _Recomputed(weights, makers)
    return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)
