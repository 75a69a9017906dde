"""The training job's process.

torchrun ... -m vlmpipe.trainer.train --config <run>/run.json
"""

from __future__ import annotations

import argparse
import os

from vlmpipe.trainer.gc_control import collector_off

with collector_off():
    import torch

    from vlmpipe.trainer.config.job import JobConfig
    from vlmpipe.trainer.distributed.collectives import check_ranks, measure_communication
    from vlmpipe.trainer.distributed.process import StopRequest, run_worker, start_worker
    from vlmpipe.trainer.loop import train
    from vlmpipe.trainer.models.image_threads import use_threads

# Without it cuBLAS takes a workspace by its stream, and torch refuses its products in deterministic runs:
# https://docs.nvidia.com/cuda/cublas/#results-reproducibility
CUBLAS_VARIABLE, CUBLAS_DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def main(arguments: list[str] | None = None) -> int:
    """Train on this rank. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="vlmpipe.trainer.train", description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the run's run.json")
    options = parser.parse_args(arguments)
    stop = StopRequest()
    job = JobConfig.load(options.config)
    use_threads(job.data.loader_threads)
    if job.train.deterministic:
        os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_DETERMINISTIC)  # before the device is used
        torch.use_deterministic_algorithms(True)
    worker = start_worker()
    check_ranks(job.run.run_uri, worker)
    if job.train.measure_communication:
        measure_communication(job.run.run_uri, worker)
    return train(job, worker, stop)


if __name__ == "__main__":
    run_worker(main)
