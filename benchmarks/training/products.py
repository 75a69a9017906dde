"""A step's matrix products and attention kernels by themselves: what is left of it if all else took no time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.support.timing import Clock, Measured
from vlmpipe.trainer.models.attention.attend import ATTEND

aten = torch.ops.aten
MATRIX_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.addmm_.default, aten.bmm.default, aten.baddbmm.default)
PRODUCTS_AND_ATTENTION = (
    *MATRIX_PRODUCTS,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    ATTEND,
    torch.ops.vlmpipe.attend_backward.default,
)


class Products(TorchDispatchMode):
    """Notes the calls of these operators that run in it, and repeats them by themselves."""

    def __init__(self, operators: tuple[Any, ...]) -> None:
        super().__init__()
        self._operators = operators
        self._calls: Counter[Call] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._operators:
            self._calls[Call.of(func, args, kwargs or {})] += 1
        return func(*args, **(kwargs or {}))

    def alone(self) -> Measured:
        """All calls, one after another, of which each kind has been made before. Units: GFLOP."""
        flops = cpu_s = wall_s = 0.0
        for call, count in self._calls.items():
            arguments = call.arguments()
            with FlopCounterMode(display=False) as counter:
                call.run(arguments)  # also warms up
            clock = Clock()
            for _ in range(count):
                call.run(arguments)
            measured = clock.stop(1)
            cpu_s, wall_s = cpu_s + measured.cpu_s, wall_s + measured.wall_s
            flops += count * counter.get_total_flops()
        return Measured(cpu_s, wall_s, flops / 1e9)


@dataclass(frozen=True)
class Call:
    """A call of an operator, with the sizes and strides of its tensors in place of them."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Call:
        def layout(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():  # bounds of samples are what they are
                return Layout(tuple(value.shape), value.stride(), value.dtype)
            return tuple(value) if isinstance(value, list) else value

        return cls(
            func,
            tree_map(layout, tuple(args), is_leaf=lambda value: isinstance(value, list)),
            tuple(sorted(kwargs.items())),
        )

    def arguments(self) -> tuple[Any, ...]:
        return tuple(value.filled() if isinstance(value, Layout) else value for value in self.args)

    def run(self, arguments: tuple[Any, ...]) -> None:
        self.func(*arguments, **dict(self.kwargs))


@dataclass(frozen=True)
class Layout:
    """Sizes and strides of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def filled(self) -> Tensor:
        """With numbers of its own, also where it repeats some (strides of 0)."""
        numbers = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return torch.randn(numbers).to(self.dtype).as_strided(self.shape, self.stride)
