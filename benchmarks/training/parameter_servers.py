"""Part `servers`: recipes/parameter-server with a slow worker, asynchronous beside synchronous."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from tests.support.trainer.server_groups import Group

WORKERS, STEPS = 2, 40
EACH_S, SLOW_S = 0.1, 0.3  # sleeping takes the place of computing, and leaves the processors to RPC
NO_BOUND = WORKERS * STEPS
SLOW = {"one worker is always slow": 1, "the workers are slow in turn": -2}


def servers(bench: Bench) -> None:
    """Micro-batches a second of two workers, one of which takes four times as long, and two servers.

    Wall time: what is measured is waiting.
    """
    steps = 8 if bench.quick else STEPS
    for case, slow in SLOW.items():

        def group(staleness: int, slow: int = slow) -> Callable[[], float]:
            given = Group(steps=steps, staleness=staleness, each_s=EACH_S, slow=slow, slow_s=SLOW_S)
            return lambda: WORKERS * steps / given.run(bench.scratch, "servers")[1]["seconds"]

        sides = {"asynchronous": NO_BOUND, "at most 4 ahead": 4, "synchronous": 0}
        found = bench.take_turns(case, {label: group(staleness) for label, staleness in sides.items()}, warm_up=False)
        rates = [Side(label, values) for label, values in found.items()]
        for side in rates[:-1]:
            bench.report.compare(f"{case}: {side.label}", "torch RPC", "micro-batches a second", side, rates[-1])
