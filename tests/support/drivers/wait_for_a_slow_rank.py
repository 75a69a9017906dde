"""A job whose first rank takes longer for what it does alone than collectives of a step wait."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from vlmpipe.trainer.distributed.agreement import agree, meet, on_first, together
from vlmpipe.trainer.distributed.process import run_worker, start_worker

TIMEOUT_S = 1.0


def main() -> int:
    worker = start_worker(timedelta(seconds=TIMEOUT_S))

    def transfer() -> None:
        if worker.is_first:
            time.sleep(2 * TIMEOUT_S)

    together(worker, "transferring", transfer)
    on_first(worker, transfer)
    transfer()
    meet(worker)
    transfer()
    assert agree(worker.rank) == 0
    transfer()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        print(f"a step's collective: {error}", flush=True)
    return 0


if __name__ == "__main__":
    run_worker(main)
