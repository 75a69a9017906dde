"""Trains several runs in one process group."""

from __future__ import annotations

import argparse
import gc

import torch

from tests.numerics.settings import change_alone
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import StopRequest, run_worker, start_worker
from vlmpipe.trainer.loop import train


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", nargs="+", required=True)
    worker, stop = start_worker(), StopRequest()
    torch.use_deterministic_algorithms(True)
    if worker.world_size == 1:
        change_alone()
    for config in parser.parse_args().configs:
        gc.freeze()  # a run collects garbage once, and what is loaded is looked through in a third of its time
        code = train(JobConfig.load(config), worker, stop)
        if code:
            return code
    return 0


if __name__ == "__main__":
    run_worker(main)
