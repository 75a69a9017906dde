"""Products of a step by themselves: all calls of the step, of its sizes, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.training.products import PRODUCTS_AND_ATTENTION, Products
from vlmpipe.trainer.models.attention.attend import attend
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens

SAMPLES = CuSeqlens.of([[20, 44], [64]], 64)


class Seen(TorchDispatchMode):
    """Calls with the sizes and strides of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[object]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in PRODUCTS_AND_ATTENTION:
            sizes = [(each.shape, each.stride()) for each in args if isinstance(each, torch.Tensor)]
            self.calls.append((str(func), sizes))
        return func(*args, **(kwargs or {}))


def step() -> None:
    """Two layers of one kind, and patches of images."""
    query, key = (torch.randn(2, 64, heads, 8, requires_grad=True) for heads in (4, 2))
    for _ in range(2):
        output, _ = attend(query, key, key, SAMPLES.bounds, SAMPLES.device_bounds, 0.5)
        mixed = output.flatten(0, 1).flatten(1) @ torch.randn(48, 32).t()
        torch.nn.functional.silu(mixed).sum().backward()
    torch.nn.functional.conv2d(torch.randn(3, 3, 16, 16), torch.randn(8, 3, 8, 8), stride=8)


@pytest.mark.slow
def test_a_steps_products_are_repeated_with_their_sizes_strides_and_samples() -> None:
    with FlopCounterMode(display=False) as counter, Products(PRODUCTS_AND_ATTENTION) as products, Seen() as of_step:
        step()
    with Seen() as alone:
        assert products.alone().units == counter.get_total_flops() / 1e9
    kinds = {name for name, _ in of_step.calls}
    assert {"vlmpipe.attend.default", "vlmpipe.attend_backward.default", "aten.mm.default"} < kinds
    assert "aten.convolution.default" in kinds
    # Each kind of call is made once more, before the clock starts.
    for call in of_step.calls:
        assert alone.calls.count(call) == of_step.calls.count(call) + 1
    assert {name for name, _ in alone.calls} == kinds
