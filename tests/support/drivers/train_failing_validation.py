"""Trains a run whose validation at a step ends badly: by an error on all ranks or on one, or by SIGKILL.

With --while-uploading, files of checkpoints are uploaded only once that validation has ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import StopRequest, run_worker, start_worker
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.evaluation.validation_loss import Validation
from vlmpipe.trainer.loop import train
from vlmpipe.trainer.storage.local import LocalStorage

DEADLINE_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--nth", type=int, required=True, help="validation that ends badly, from 1")
    parser.add_argument("--ends-by", choices=("error", "kill"), required=True)
    parser.add_argument("--on-rank", type=int, help="the only one on which it ends badly")
    parser.add_argument("--while-uploading", action="store_true")
    options = parser.parse_args()
    worker = start_worker()
    fails = options.on_rank in (None, worker.rank)
    has_ended = Path(options.config).with_name("validation-ended")
    losses, upload, count = Validation.losses, LocalStorage.upload, [0]

    def waiting(self: LocalStorage, *arguments: Any, **settings: Any) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not has_ended.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        upload(self, *arguments, **settings)

    def failing(self: Validation, *arguments: Any) -> dict[str, float]:
        count[0] += 1
        found = losses(self, *arguments)
        if count[0] == options.nth and fails and options.ends_by == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if count[0] == options.nth and fails:
            has_ended.touch()
            raise DataError("a validation shard cannot be read", expected="its bytes", fix="bring it back")
        return found

    Validation.losses = failing  # type: ignore[method-assign]
    if options.while_uploading:
        LocalStorage.upload = waiting  # type: ignore[method-assign]
    return train(JobConfig.load(options.config), worker, StopRequest())


if __name__ == "__main__":
    run_worker(main)
