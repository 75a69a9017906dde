"""Trains runs as `train_many` does, on ranks with a GPU's gauges; rank 1's GPU has faults and slow forward passes."""

from __future__ import annotations

import argparse

import torch

from trainer import loop, setup
from trainer.config.job import JobConfig
from trainer.distributed.process import StopRequest, run_worker, start_worker
from trainer.monitoring import training_monitor
from trainer.monitoring.gpu_telemetry import GpuReading
from trainer.monitoring.rank_metrics import ForwardTimer

WELL, HOT = GpuReading(90, 10, 300, 60, 0, 0), GpuReading(50, 12, 200, 90, 0x40, 2)


class Gauges:
    """Throttled in every second reading if `faulty`."""

    def __init__(self, faulty: bool) -> None:
        self._faulty, self._readings = faulty, 0

    def read(self) -> GpuReading:
        self._readings += 1
        return HOT if self._faulty and self._readings % 2 == 0 else WELL

    def close(self) -> None:
        print("gauges: closed", flush=True)


class SlowTimer(ForwardTimer):
    """A thousand seconds more at each reading."""

    def seconds(self) -> float:
        self._seconds += 1000
        return super().seconds()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", nargs="+", required=True)
    arguments = parser.parse_args()
    worker = start_worker()
    faulty = worker.rank == 1
    training_monitor.open_telemetry = lambda _device: Gauges(faulty)  # type: ignore[assignment, return-value]
    if faulty:
        setup.ForwardTimer = SlowTimer  # type: ignore[misc]
    torch.use_deterministic_algorithms(True)
    for config in arguments.configs:
        if code := loop.train(JobConfig.load(config), worker, StopRequest()):
            return code
    return 0


if __name__ == "__main__":
    run_worker(main)
