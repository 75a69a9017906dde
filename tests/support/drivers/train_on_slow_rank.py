"""Trains a run with a rank whose machine is slow: in each layer of the language model it sleeps for a while."""

from __future__ import annotations

import argparse
import time
from typing import Any

from trainer import loop, setup
from trainer.config.job import JobConfig
from trainer.distributed.process import StopRequest, run_worker, start_worker


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    worker, stop = start_worker(), StopRequest()
    build = setup.strategy_of

    def slowed(config: Any, module: Any, units: Any, process: Any) -> Any:
        if process.rank == arguments.rank:
            for layer in units.language_layers:
                next(layer.children()).register_forward_pre_hook(lambda *_: time.sleep(arguments.seconds))
        return build(config, module, units, process)

    setup.strategy_of = slowed
    return loop.train(JobConfig.load(arguments.config), worker, stop)


if __name__ == "__main__":
    run_worker(main)
