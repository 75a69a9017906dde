"""Steps of several real strategies in turn, in one process group, on the same global rows. Writes what each one used.

torchrun ... -m benchmarks.strategy_steps --output FILE --groups NAME ... --rounds N --steps N [--quick]
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import Clock, Measured, interleaved
from benchmarks.strategy_cases import GROUPS, MICRO_BATCHES, Group
from tests.support.announced import announced
from tests.support.trainer.measure_memory import packed_batch
from tests.support.trainer.memory_cases import Case
from trainer.config.model import ModelConfig
from trainer.dataloading.batches import PackedBatch
from trainer.distributed.data_parallel_rank import replica_of
from trainer.distributed.process import ProcessContext, run_worker, start_worker
from trainer.models.layers.recompute_policy import Recompute
from trainer.models.registry import family_of
from trainer.strategies.registry import build_strategy

STEPS_OF_DATA = 2  # the rows of as many steps are taken in turn, so that there is something to learn


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--groups", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    worker = start_worker()
    found = {}
    for name in announced(arguments.groups, worker, "group"):
        found[name] = time_group(GROUPS[name], worker, arguments.rounds, arguments.steps, quick=arguments.quick)
        gc.collect()
    if worker.is_first:
        arguments.output.write_text(json.dumps(found))
    return 0


def time_group(group: Group, worker: ProcessContext, rounds: int, steps: int, *, quick: bool) -> dict[str, Any]:
    """By run: `rounds` of `steps` (CPU time of all ranks together, wall time until the last is done), after one round
    that is thrown away, and the losses of all steps. Collective."""
    assert worker.world_size == group.processes
    cases = {name: run.case(group.processes, quick=quick) for name, run in group.runs.items()}
    sides = {name: RealSteps(case, worker, steps) for name, case in cases.items()}
    measured = interleaved(sides, rounds)
    return {
        name: {"rounds": [asdict(of_all_ranks(one)) for one in measured[name]], "losses": side.losses()}
        for name, side in sides.items()
    }


def of_all_ranks(mine: Measured) -> Measured:
    """CPU time summed over ranks, wall time of the slowest. Collective. Units are those of the job already."""
    cpu_s, wall_s = torch.tensor([mine.cpu_s]), torch.tensor([mine.wall_s])
    dist.all_reduce(cpu_s)
    dist.all_reduce(wall_s, dist.ReduceOp.MAX)
    return Measured(cpu_s.item(), wall_s.item(), mine.units)


class RealSteps:
    """A strategy with its part of batches that are ready; each call is a few steps of the whole job."""

    def __init__(self, case: Case, worker: ProcessContext, steps: int) -> None:
        # The processes lie on this machine; hybrid sharding is told that they are on several nodes.
        of_a_node = worker.world_size // case.nodes
        worker = replace(worker, local_rank=worker.rank % of_a_node, local_world_size=of_a_node)
        job = case.config(worker.world_size)
        family = family_of(job.model)
        model = family.skeleton(job.model, vocabulary=case.vocabulary)
        begin(model)
        module = family.training_module(job.model, model, cached=True).train()
        Recompute.of(job.train).apply(family, module)
        self._strategy = build_strategy(job.train, module, family.blocks(module), worker)
        replica = replica_of(job.train, worker)
        mine = slice(replica.index * case.passes, (replica.index + 1) * case.passes)
        self._data, self._label_tokens = [], MICRO_BATCHES * case.rows.label_tokens
        for number in range(STEPS_OF_DATA):
            batches = drawn_batches(job.model, case, seed=number)[mine]
            if not replica.takes_images:
                batches = [replace(batch, images=torch.empty(0)) for batch in batches]
            self._data.append(batches)
        self._steps, self._tokens = steps, MICRO_BATCHES * case.rows.rows * case.rows.tokens
        self._shares: list[Tensor] = []  # of this rank, in the loss of each step

    def __call__(self) -> Measured:
        gc.disable()  # as the loop does while it trains
        dist.barrier()
        clock = Clock()
        for _ in range(self._steps):
            batches = self._data[len(self._shares) % STEPS_OF_DATA]
            self._shares.append(self._strategy.forward_backward(batches, self._label_tokens))
            self._strategy.step(1.0)
        dist.barrier()
        return clock.stop(self._steps * self._tokens)

    def losses(self) -> list[float]:
        """Of the job, by step. Collective."""
        losses = torch.stack([share.double() for share in self._shares])
        dist.all_reduce(losses)
        return [float(loss) for loss in losses]


def begin(model: nn.Module) -> None:
    """The same weights to begin with, in every process: matrices drawn, norms 1 and biases 0."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        else:
            nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)


def drawn_batches(model: ModelConfig, case: Case, *, seed: int) -> Sequence[PackedBatch]:
    """All micro-batches of a global step, the same in every process."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(MICRO_BATCHES):
        batch = packed_batch(model, case.rows, case.vocabulary, cached=True)
        drawn = torch.randint(case.vocabulary - 1, batch.input_ids.shape, generator=generator)
        is_image = batch.input_ids == case.vocabulary - 1
        found.append(
            replace(
                batch,
                input_ids=torch.where(is_image, batch.input_ids, drawn),
                label_ids=torch.randint(case.vocabulary - 1, batch.label_ids.shape, generator=generator),
                images=torch.randn(batch.images.shape, generator=generator).to(batch.images.dtype),
            )
        )
    return found


if __name__ == "__main__":
    run_worker(main)
