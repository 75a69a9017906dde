"""Trains runs as `train_many` does, with one step unread by the host, as on a GPU.

With --stop-at a run gets a stop request in that step, and is then resumed.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from vlmpipe.trainer import loop
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import StopRequest, run_worker, start_worker
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.monitoring import step_metrics


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", nargs="+", required=True)
    parser.add_argument("--stop-at", type=int, default=0)
    arguments = parser.parse_args()
    worker, stop = start_worker(), StopRequest()
    torch.use_deterministic_algorithms(True)
    step_metrics.steps_unread = lambda _device: 1
    if arguments.stop_at:
        loop.AsyncStepMetrics = stopping_at(arguments.stop_at, loop.AsyncStepMetrics)  # type: ignore[assignment, misc]
    for config in arguments.configs:
        code = loop.train(JobConfig.load(config), worker, stop)
        if arguments.stop_at and code == ExitCode.PREEMPTED:
            code = loop.train(JobConfig.load(config), worker, stop)
        if code:
            return code
    return 0


def stopping_at(step: int, totals: Any) -> Any:
    """Totals in which this rank is asked to stop in `step`, once."""
    asked: list[int] = []

    def pending(loss_share: Any, result: Any, data: Any, **settings: Any) -> Any:
        if data.step + 1 == step and not asked:
            asked.append(step)
            settings["stop"] = True
        return totals(loss_share, result, data, **settings)

    return pending


if __name__ == "__main__":
    run_worker(main)
