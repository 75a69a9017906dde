"""Trains a run as `train_many` does, on one rank with a limit on the size of files: a disk that is full there alone.

torchrun ... -m tests.support.drivers.train_limited --config FILE --rank 1 --largest-file-bytes 100000
"""

from __future__ import annotations

import argparse
import resource

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import StopRequest, run_worker, start_worker
from vlmpipe.trainer.loop import train


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--largest-file-bytes", type=int, required=True)
    arguments = parser.parse_args()
    worker, stop = start_worker(), StopRequest()
    if worker.rank == arguments.rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (arguments.largest_file_bytes, resource.RLIM_INFINITY))
    return train(JobConfig.load(arguments.config), worker, stop)


if __name__ == "__main__":
    run_worker(main)
