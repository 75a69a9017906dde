"""Measure runs as `benchmarks.on_gpu` does, one after the other. Prints as JSON what of each is alive after it.

torchrun ... -m tests.support.drivers.train_alone --runs zero2 zero3:optimizer
"""

from __future__ import annotations

import argparse
import json
import weakref
from typing import Any

from benchmarks.gpu.run import TINY, alone, case_of, empty
from benchmarks.support.tiny_run import TinyRun
from vlmpipe.trainer.distributed.process import ProcessContext, run_worker, start_worker

MARK = "alive: "


class StoppedError(Exception):
    """Of a measurement that does not come to its end."""


def run(name: str, worker: ProcessContext, *, stops: bool) -> list[str]:
    """`name` is a strategy, and after a colon what it offloads."""
    strategy, _, offload = name.partition(":")
    seen: dict[str, weakref.ref[Any]] = {}

    def measure(run: TinyRun) -> float:
        loss = [float(run.step()) for _ in range(2)][-1]
        inner = run.strategy._module if hasattr(run.strategy, "_module") else run.strategy._engine
        seen.update({"the strategy": weakref.ref(run.strategy), "the model": weakref.ref(inner)})
        seen.update({name: weakref.ref(parameter) for name, parameter in inner.named_parameters()})
        if stops:
            raise StoppedError
        return loss

    try:
        assert alone(measure, case_of(TINY, strategy, {"train.offload": offload or "none"}), TINY, worker) > 0
    except StoppedError:
        assert stops
    empty(worker)  # as the next measurement does: the error had held what was alive
    assert len(seen) > 20
    return [name for name, reference in seen.items() if reference() is not None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", nargs="+", required=True)
    arguments = parser.parse_args()
    worker = start_worker()
    found = {name: [run(name, worker, stops=stops) for stops in (False, True)] for name in arguments.runs}
    print(MARK + json.dumps(found))


if __name__ == "__main__":
    run_worker(main)
