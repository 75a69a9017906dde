"""DDP on matrices of several buckets, with a Reduction Server and without. Prints what was found as JSON.

torchrun ... -m tests.support.drivers.ddp_buckets
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.distributed.process import ProcessContext, run_worker, start_worker
from vlmpipe.trainer.strategies.ddp import Ddp

MARK = "found: "
WIDTH, MATRICES = 1024, 17  # 4 MiB each
STEPS = 3  # from the third on DDP says how it has laid out its buckets anew


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for matrix in self.matrices:
            hidden = hidden + torch.tanh(matrix(hidden))
        return (hidden**2).mean()


class Batch:
    """What `Ddp` asks of a micro-batch."""

    def __init__(self, worker: ProcessContext, step: int) -> None:
        numbers = torch.Generator().manual_seed(10 * step + worker.rank)
        self._inputs = torch.randn(2, WIDTH, generator=numbers)

    def to(self, _: torch.device) -> dict[str, Tensor]:
        return {"inputs": self._inputs}


def trained(worker: ProcessContext) -> dict[str, Any]:
    """Losses of all steps on this rank, and bytes of each bucket."""
    torch.manual_seed(0)
    settings = {
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "precision": "fp32",
        "clip_grad_norm": 0.0,
        "optimizer": {"learning_rate": 1e-4},
    }
    strategy = Ddp(TrainConfig.model_validate(settings), Layers().train(), worker)
    losses = []
    for step in range(STEPS):
        losses.append(float(strategy.forward_backward([cast(PackedBatch, Batch(worker, step))], 1)))
        if step + 1 < STEPS:
            strategy.step(1.0)
    copies = cast(DistributedDataParallel, strategy._module)
    said = copies._get_ddp_logging_data()
    sizes = [int(size) for size in said["rebuilt_bucket_sizes"].split(", ")]
    return {"losses": losses, "cap_bytes": copies.bucket_bytes_cap, "sizes": sizes}


def main() -> int:
    worker = start_worker()
    found = {
        "reducers": worker.num_reducers,
        "with": trained(worker),
        "without": trained(replace(worker, num_reducers=0)),
    }
    if worker.is_first:
        print(MARK + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    run_worker(main)
