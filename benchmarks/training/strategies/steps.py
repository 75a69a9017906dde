"""One rank of `strategies` and `features`: steps of several real strategies in turn, on the same global batches."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support.processes import announce
from benchmarks.support.timing import Clock, Measured, RoundLimit, interleaved
from benchmarks.support.tiny_run import drawn_batches, strategy_of
from benchmarks.training.strategies.cases import GROUPS, MICRO_BATCHES
from tests.support.trainer.memory_cases import Case
from vlmpipe.trainer.distributed.data_parallel_rank import replica_of
from vlmpipe.trainer.distributed.process import ProcessContext, start_worker

STEPS_OF_DATA = 2  # the batches of as many steps are taken in turn, so that there is something to learn
WARM_UP_STEPS = 2


def time_group(name: str, rounds: int, quick: bool, seconds: float | None) -> tuple[int, dict[str, Any]]:
    """Rounds of a step each, as many as the time allows, after a warm-up. Collective.

    By run: CPU time of all ranks together, wall time until the last is done, and the losses of all steps.
    """
    group, worker = GROUPS[name], start_worker()
    assert worker.world_size == group.processes
    began_s = time.monotonic()
    cases = {run: timed.case(group.processes, quick=quick) for run, timed in group.runs.items()}
    sides = {run: RealSteps(case, worker) for run, case in cases.items()}
    ready_s = time.monotonic()
    limit = RoundLimit(math.inf if seconds is None else seconds - (ready_s - began_s))

    def may_go_on(number: int, done: int) -> bool:
        allowed = torch.tensor(limit.allows(number, done, time.monotonic() - ready_s))
        dist.broadcast(allowed, 0)  # all ranks go on, or none
        if allowed and worker.is_first:
            announce(f"{name}: " + (f"round {number + 1} of at most {rounds}" if number >= 0 else "warm-up"))
        return bool(allowed)

    measured = interleaved(sides, rounds, may_go_on=may_go_on)
    found = {
        run: {"rounds": [asdict(of_all_ranks(one)) for one in measured[run]], "losses": side.losses()}
        for run, side in sides.items()
    }
    return len(measured[group.baseline]), found


def of_all_ranks(mine: Measured) -> Measured:
    """CPU time summed over ranks, wall time of the slowest. Collective. Units are those of the job already."""
    cpu_s, wall_s = torch.tensor([mine.cpu_s]), torch.tensor([mine.wall_s])
    dist.all_reduce(cpu_s)
    dist.all_reduce(wall_s, dist.ReduceOp.MAX)
    return Measured(cpu_s.item(), wall_s.item(), mine.units)


class RealSteps:
    """A strategy with its part of batches that are ready; each call is a step of the whole job, the first is more."""

    def __init__(self, case: Case, worker: ProcessContext) -> None:
        # The processes are on this machine; hybrid sharding sees several nodes.
        of_a_node = worker.world_size // case.nodes
        worker = replace(worker, local_rank=worker.rank % of_a_node, local_world_size=of_a_node)
        job = case.config(worker.world_size)
        self._strategy = strategy_of(job, case, worker)
        replica = replica_of(job.train, worker)
        mine = slice(replica.index * case.passes, (replica.index + 1) * case.passes)
        self._data, self._label_tokens = [], MICRO_BATCHES * case.rows.label_tokens
        for number in range(STEPS_OF_DATA):
            batches = drawn_batches(job.model, case, MICRO_BATCHES, seed=number)[mine]
            if not replica.takes_images:
                batches = [replace(batch, images=torch.empty(0)) for batch in batches]
            self._data.append(batches)
        self._tokens = MICRO_BATCHES * case.rows.sequences * case.rows.tokens
        self._shares: list[Tensor] = []  # of this rank, in the loss of each step

    def __call__(self) -> Measured:
        """Units: useful tokens."""
        gc.disable()  # as the loop does while it trains
        steps = 1 if self._shares else WARM_UP_STEPS
        dist.barrier()
        clock = Clock()
        for _ in range(steps):
            batches = self._data[len(self._shares) % STEPS_OF_DATA]
            self._shares.append(self._strategy.forward_backward(batches, self._label_tokens))
            self._strategy.step(1.0)
        dist.barrier()
        return clock.stop(steps * self._tokens)

    def losses(self) -> list[float]:
        """Of the job, by step. Collective."""
        losses = torch.stack([share.double() for share in self._shares])
        dist.all_reduce(losses)
        return [float(loss) for loss in losses]
