"""Offloaded inputs of layers: the same gradients, and few of them on the device at a time."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vlmpipe.trainer.models.layers.activation_offload import ActivationOffload, OffloadedInput

LAYERS = 5
RECOMPUTED = functools.partial(checkpoint, use_reentrant=False)


def gradients(run: Callable[..., Any], weights: list[Tensor], alive: Callable[[], None]) -> list[Tensor]:
    def layer(weight: Tensor, hidden: Tensor) -> Tensor:
        alive()
        return torch.tanh(hidden @ weight) @ weight

    hidden = torch.ones(3, 8) @ weights[0]
    for weight in weights:
        hidden = run(functools.partial(layer, weight), hidden)
    return list(torch.autograd.grad(hidden.sum(), weights))


def test_gradients_are_the_same_over_several_passes_and_at_most_two_inputs_are_on_the_device() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(LAYERS)]
    saved: weakref.WeakSet[OffloadedInput] = weakref.WeakSet()
    on_device: list[int] = []

    class Watched(ActivationOffload):
        def _save(self, tensor: Tensor) -> OffloadedInput:
            entry = super()._save(tensor)
            saved.add(entry)
            return entry

    def count() -> None:
        on_device.append(sum(entry.on_device is not None for entry in saved))

    run = Watched().around(RECOMPUTED)
    expected = gradients(RECOMPUTED, weights, lambda: None)
    for _ in range(2):
        assert all(map(torch.equal, gradients(run, weights, count), expected))
        assert not saved, "the backward pass has used them all"
    assert len(on_device) == 2 * 2 * LAYERS, "each layer ran twice in each pass"
    assert max(on_device) == 1, "beside the one that the layer works on"
