"""Counts what operations allocate, with real or fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlmpipe.trainer.models.layers.bf16 import cast_to_bf16
from vlmpipe.trainer.models.layers.freeze import in_frozen_parts
from vlmpipe.trainer.sizing.trace_results import Category, Compute, Held


def cast_weights(module: nn.Module, compute: Compute) -> None:
    """Cast the weights that compute in bf16 as such: all of them, or those that FSDP gathers."""
    if compute in ("bf16 weights", "bf16 parts"):
        left = in_frozen_parts(module) if compute == "bf16 parts" else set()
        cast_to_bf16(parameter for parameter in module.parameters() if parameter not in left)


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of every storage that operations allocate, until it is freed.

    Args:
        held: tensors that exist before and are not counted.
        parameters: copies of these by casting get a category of their own.
        regions: modules and the category of what their forward allocates.
    """

    def __init__(
        self,
        held: Iterable[Tensor] = (),
        parameters: Iterable[nn.Parameter] = (),
        regions: Sequence[tuple[nn.Module, Category]] = (),
    ) -> None:
        super().__init__()
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in held)
        self._parameters = {id(parameter) for parameter in parameters}
        self._regions = regions
        self._hooks: list[Any] = []
        self._category: Category = "head"
        self._held: Counter[Category] = Counter()
        self._held_bytes = 0
        self._start_peak()

    def __enter__(self) -> MemoryTracker:
        for module, category in self._regions:
            self._hooks += [
                module.register_forward_pre_hook(lambda *_, category=category: self._enter_region(category)),
                module.register_forward_hook(lambda *_: self._enter_region("head")),
            ]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._forget_regions()

    def take_peak(self, *, next_category: Category) -> Held:
        """The peak since the last call. Later allocations belong to `next_category`."""
        fullest = Held(dict(self._peak))
        self._forget_regions()  # recomputation runs forward passes inside the backward pass
        self._category = next_category
        self._start_peak()
        return fullest

    @property
    def held(self) -> Held:
        """Bytes allocated now, by category."""
        return Held(dict(self._held))

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = _result(func, args, kwargs or {})
        is_cast = func is torch.ops.aten._to_copy.default and id(args[0]) in self._parameters
        category: Category = "weight copies" if is_cast else self._category
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage(), "offloaded" if tensor.is_meta else category)
        return result

    def _start_peak(self) -> None:
        self._peak, self._peak_bytes = self._held.copy(), self._held_bytes

    def _enter_region(self, category: Category) -> None:
        self._category = category

    def _forget_regions(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _count(self, storage: torch.UntypedStorage, category: Category) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        num_bytes = storage.nbytes()
        weakref.finalize(storage, self._release, category, num_bytes).atexit = False
        self._held[category] += num_bytes
        self._held_bytes += num_bytes * (category != "offloaded")
        if self._held_bytes > self._peak_bytes:
            self._start_peak()

    def _release(self, category: Category, num_bytes: int) -> None:
        self._held[category] -= num_bytes
        self._held_bytes -= num_bytes * (category != "offloaded")


def _result(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The result of an operation. Fake grouped products of experts take bf16 alone, real ones take fp32 too."""
    first = args[0] if func is torch.ops.aten._grouped_mm.default else None
    if not isinstance(first, FakeTensor) or first.dtype == torch.bfloat16:
        return func(*args, **kwargs)
    # Rows of experts are multiples of 16 bytes in bf16 as well.
    in_bf16 = [tensor.bfloat16() for tensor in args[:2] if isinstance(tensor, Tensor)]
    return func(*in_bf16, *args[2:], **kwargs).to(first.dtype)
