"""Trains a run with a rank whose machine is slow: in each linear layer it sleeps for a while."""

from __future__ import annotations

import argparse
import time
from typing import Any

from torch.nn import functional

from vlmpipe.trainer import loop
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import StopRequest, run_worker, start_worker
from vlmpipe.trainer.setup import strategy as setup


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    worker, stop = start_worker(), StopRequest()
    build = setup.strategy_of

    def slowed(config: Any, module: Any, units: Any, process: Any) -> Any:
        strategy = build(config, module, units, process)
        if process.rank == arguments.rank:
            linear = functional.linear  # as the strategy left it: DeepSpeed has one of its own

            def slow(*given: Any, **named: Any) -> Any:
                time.sleep(arguments.seconds)
                return linear(*given, **named)

            functional.linear = slow
        return strategy

    setup.strategy_of = slowed
    return loop.train(JobConfig.load(arguments.config), worker, stop)


if __name__ == "__main__":
    run_worker(main)
