"""Runs a frozen vision tower for the next micro-batch on its own CUDA stream (`train.overlap_vision_encoder`).

A frozen tower depends on nothing in the step, so it can fill gaps in the GPU's work, such as waits for FSDP's
all-gathers. A step's first micro-batch cannot overlap with another, so a step of one gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.train import Precision, TrainConfig
from vlmpipe.trainer.dataloading.batches import MicroBatches, PackedBatch
from vlmpipe.trainer.strategies.mixed_precision import autocast

Arguments = Callable[[MicroBatches], Iterator[dict[str, Any]]]


def micro_batches(config: TrainConfig, module: nn.Module, device: torch.device) -> Arguments:
    """A function that yields the module's arguments for each micro-batch. `module` is not wrapped by a strategy yet."""
    if not config.overlap_vision_encoder or not getattr(module, "runs_frozen_tower", False):
        return lambda batches: (batch.to(device) for batch in batches)
    # Weights that rest in bf16 need no cast, and FSDP leaves frozen parts alone.
    by_autocast = config.precision != "bf16" and config.strategy not in ("fsdp", "hsdp")
    return VisionPrefetch(module, device, config.precision if by_autocast else "fp32")


class VisionPrefetch:
    """`Arguments` whose images are already encoded."""

    def __init__(self, module: nn.Module, device: torch.device, precision: Precision) -> None:
        self._module, self._device, self._precision = module, device, precision
        # torch.cpu has the same interface, with a single stream.
        self._streams: Any = torch.get_device_module(device)
        self._own = self._streams.Stream()
        self._is_ready = False

    def __call__(self, batches: MicroBatches) -> Iterator[dict[str, Any]]:
        if not self._is_ready:  # the weights were copied to the device on the main stream
            self._own.wait_stream(self._streams.current_stream())
            self._is_ready = True
        rest = iter(batches)
        batch = next(rest, None)
        coming = self._encode(batch) if batch else None
        while batch and coming:
            features, done = coming
            after = next(rest, None)
            coming = self._encode(after) if after else None  # queued before this micro-batch, runs beside it
            arguments = batch.to(self._device, images=False)
            main = self._streams.current_stream()
            main.wait_event(done)
            if features.is_cuda:
                features.record_stream(main)  # its memory is not reused before the main stream has read it
            yield arguments | {"images": features, "encoded": True}
            batch = after

    def _encode(self, batch: PackedBatch) -> tuple[Tensor, Any]:
        """A micro-batch's features, and the event that marks them complete."""
        with self._streams.stream(self._own), torch.no_grad(), autocast(self._precision, self._device):
            # Copied on this stream too: on the main one the copy would wait for everything queued there.
            features: Tensor = self._module.encode(**batch.images_to(self._device))
            done = self._streams.Event()
            done.record(self._own)
        return features, done
