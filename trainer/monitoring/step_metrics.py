"""Step metrics summed over ranks: loss, counts, and requests to stop or to save; read asynchronously on a GPU.

The host launches the next step before it reads a step's sums: reading each loss at once would leave the GPU idle while
the host launches the next step's first kernels.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from vlmpipe.trainer.config.train_options import ComputeType
from vlmpipe.trainer.dataloading.prefetching_loader import StepBatches
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.monitoring.run_facts import RunFacts
from vlmpipe.trainer.monitoring.source_losses import SourceLosses
from vlmpipe.trainer.sizing.flops import model_flops_per_sequence
from vlmpipe.trainer.sizing.gpu_peaks import TERA, peak_of
from vlmpipe.trainer.strategies.base import StepResult


def steps_unread(device: torch.device) -> int:
    """Steps whose totals the host may leave unread: one on a GPU, none on a CPU."""
    return 1 if device.type == "cuda" else 0


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks of one step."""

    step: int  # from 1
    epoch: int
    loss: float  # mean over the label tokens of the global step
    grad_norm: float | None  # None for a skipped step
    useful_tokens: int
    slot_tokens: int
    label_tokens: int
    images: int
    samples: int
    stop: bool  # some rank got a stop request
    save: bool  # a save has failed, and rank 0 asks for another
    # Of each source its summed loss and the terms of it, label tokens or pairs, both times the ranks that hold a copy.
    sources: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class AsyncStepMetrics:
    """`StepTotals` that may still be computed. Collective: one all-reduce, for which the host does not wait."""

    def __init__(
        self,
        loss_share: Tensor,
        result: StepResult,
        data: StepBatches,
        *,
        stop: bool,
        save: bool,
        replica: DataParallelRank,
        worker: ProcessContext,
        sources: SourceLosses | None = None,
    ) -> None:
        self._step, self._epoch, self._label_tokens = data.step + 1, data.epoch, data.global_label_tokens
        self._sample_ids, self._skipped = data.sample_ids, result.skipped
        self._sources = sources.names if sources else ()
        counted = (data.useful_tokens, data.slot_tokens, data.images, len(data.sample_ids))
        on_gpu = worker.device.type == "cuda"
        counts_on_host = torch.tensor(
            [*(float(count) * replica.leads for count in counted), float(stop), float(save)],
            dtype=torch.float64,
            pin_memory=on_gpu,
        )
        sums = torch.cat(
            [
                loss_share.double().reshape(1),
                counts_on_host.to(worker.device, non_blocking=True),
                *([sources.take()] if sources else []),
            ]
        )
        if worker.world_size > 1:
            dist.all_reduce(sums)
        norm = torch.as_tensor(result.grad_norm, dtype=torch.float64).reshape(1)  # the same on all ranks already
        values = torch.cat([sums, norm.to(worker.device, non_blocking=True)])
        self._copied: torch.cuda.Event | None = None
        self._values = values
        if on_gpu:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> StepTotals:
        """Wait for the device. Raises DataError for a loss or gradient norm that is not finite."""
        if self._copied:
            self._copied.synchronize()
        loss, useful, slots, images, samples, stops, saves, *of_sources, norm = self._values.tolist()
        self._require_finite("loss", loss)
        count = len(self._sources)
        if not self._skipped:
            self._require_finite("gradient norm", norm)
        return StepTotals(
            step=self._step,
            epoch=self._epoch,
            loss=loss,
            grad_norm=None if self._skipped else norm,
            useful_tokens=int(useful),
            slot_tokens=int(slots),
            label_tokens=self._label_tokens,
            images=int(images),
            samples=int(samples),
            stop=stops > 0,
            save=saves > 0,
            sources=dict(zip(self._sources, zip(of_sources[:count], of_sources[count:], strict=True), strict=True)),
        )

    def _require_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            samples = ", ".join(self._sample_ids[:8])
            raise DataError(
                f"the {name} of step {self._step} is {value}; this rank's samples: {samples}",
                expected=f"a finite {name}",
                fix="lower train.optimizer.learning_rate, or look at these samples",
            )


class MetricsQueue:
    """Steps whose totals the host has not read yet: on a GPU the newest one, on a CPU none.

    All ranks read the same steps at the same point of the loop, so they agree on when to stop.
    """

    def __init__(self, worker: ProcessContext) -> None:
        self._most = steps_unread(worker.device)
        self._pending: deque[AsyncStepMetrics] = deque()

    def add(self, pending: AsyncStepMetrics, *, read_all: bool) -> Sequence[StepTotals]:
        """Add the newest step; returns the totals that are read now, oldest first. `read_all` leaves none unread."""
        self._pending.append(pending)
        return self._read(but=0 if read_all else self._most)

    def rest(self) -> Sequence[StepTotals]:
        """The totals of all unread steps, oldest first."""
        return self._read(but=0)

    def _read(self, *, but: int) -> Sequence[StepTotals]:
        return [self._pending.popleft().read() for _ in range(len(self._pending) - but)]


def model_rates(
    facts: RunFacts, worker: ProcessContext, compute_type: ComputeType, window: Counter[str], seconds: float
) -> dict[str, float]:
    """Model FLOP/s per device of the steps counted in `window`, and their share of the device's peak (MFU)."""
    if not window["samples"]:
        return {}
    counts = {name: window[name] for name in ("samples", "images", "label_tokens")}
    flops = model_flops_per_sequence(
        facts.shape, useful_tokens=window["tokens"], **counts, cached=facts.features == "cached"
    )
    rate = flops / seconds / worker.world_size
    name = torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else ""
    peak = peak_of(name, compute_type)
    return {"model_tflops_per_s": rate / TERA, **({"mfu": rate / peak} if peak else {})}
