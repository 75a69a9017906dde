"""The training job's process.

torchrun ... -m trainer.train --config <run>/run.json
"""

from __future__ import annotations

import argparse

import torch

from trainer.config.job import JobConfig
from trainer.distributed.collectives import check_ranks, measure_communication
from trainer.distributed.process import StopRequest, run_worker, start_worker
from trainer.loop import train


def main() -> int:
    parser = argparse.ArgumentParser(prog="trainer.train", description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the run's run.json")
    options = parser.parse_args()
    stop = StopRequest()
    job = JobConfig.load(options.config)
    worker = start_worker()
    if job.train.deterministic:
        torch.use_deterministic_algorithms(True)
    check_ranks(job.run.run_uri, worker)
    if job.train.measure_communication:
        measure_communication(job.run.run_uri, worker)
    return train(job, worker, stop)


if __name__ == "__main__":
    run_worker(main)
