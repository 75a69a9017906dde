"""Trains runs as `train_many` does, and writes beside each where the optimizer's state of each rank lay at the end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import StopRequest, run_worker, start_worker
from vlmpipe.trainer.loop import train
from vlmpipe.trainer.strategies.deepspeed.engine import Zero


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", nargs="+", required=True)
    worker, stop, made = start_worker(), StopRequest(), remembered()
    torch.use_deterministic_algorithms(True)
    for config in parser.parse_args().configs:
        job = JobConfig.load(config)
        code = train(job, worker, stop)
        if code:
            return code
        found = places(made.pop(), job.train.nvme_path)
        Path(job.run.run_uri, f"places-{worker.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


def remembered() -> list[Any]:
    """Every `Zero` that is made from here on."""
    made: list[Any] = []
    begin = Zero.__init__

    def kept(self: Any, *args: Any, **settings: Any) -> None:
        begin(self, *args, **settings)
        made.append(self)

    Zero.__init__ = kept  # type: ignore[method-assign]
    return made


def places(strategy: Any, folder: str) -> dict[str, dict[str, int]]:
    """Bytes of each kind of state, in files in `folder` and elsewhere."""
    mapped = list(mappings(folder)) if folder else []
    found: dict[str, dict[str, int]] = {}
    for kind, tensor in state_of(strategy):
        at = tensor.untyped_storage().data_ptr()
        place = "on disk" if any(start <= at < end for start, end in mapped) else "in memory"
        of_kind = found.setdefault(kind, {"on disk": 0, "in memory": 0})
        of_kind[place] += tensor.nbytes
    return found


def state_of(strategy: Any) -> Iterator[tuple[str, Tensor]]:
    for partition in strategy._partitions():
        yield "weights", partition
        for name, value in strategy._optimizer.optimizer.state[partition].items():
            if value.ndim:
                yield name, value
    if strategy._ema:
        for average in strategy._ema.averages:
            yield "averages", average


def mappings(folder: str) -> Iterator[tuple[int, int]]:
    """Addresses at which this process has mapped files that are, or were, in `folder`."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, *_, rest = line.split(maxsplit=5)
        if rest.startswith(f"{folder}/"):
            start, end = addresses.split("-")
            yield int(start, 16), int(end, 16)


if __name__ == "__main__":
    run_worker(main)
