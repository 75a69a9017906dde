"""The smallest job: all ranks add up their numbers."""

from __future__ import annotations

import torch
import torch.distributed as dist

from vlmpipe.trainer.distributed.process import run_worker, start_worker


def main() -> None:
    worker = start_worker()
    total = torch.tensor(worker.rank, device=worker.device)
    dist.all_reduce(total)
    print(f"sum of ranks: {total.item()}", flush=True)


if __name__ == "__main__":
    run_worker(main)
