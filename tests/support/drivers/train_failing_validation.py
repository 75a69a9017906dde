"""Trains a run whose validation at a step ends badly: by an error on all ranks, or by SIGKILL."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import StopRequest, run_worker, start_worker
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.evaluation.validation_loss import Validation
from vlmpipe.trainer.loop import train


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--nth", type=int, required=True, help="validation that ends badly, from 1")
    parser.add_argument("--ends-by", choices=("error", "kill"), required=True)
    options = parser.parse_args()
    losses, count = Validation.losses, [0]

    def failing(self: Validation, *arguments: Any) -> dict[str, float]:
        count[0] += 1
        found = losses(self, *arguments)
        if count[0] == options.nth and options.ends_by == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if count[0] == options.nth:
            raise DataError("a held-out shard cannot be read", expected="its bytes", fix="bring it back")
        return found

    Validation.losses = failing  # type: ignore[method-assign]
    return train(JobConfig.load(options.config), start_worker(), StopRequest())


if __name__ == "__main__":
    run_worker(main)
