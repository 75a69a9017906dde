"""Take a snapshot, train on, and only then write it; train again from its files. Prints the losses of both as JSON.

torchrun ... -m tests.support.drivers.late_write --folder FOLDER --runs zero2 zero3:optimizer
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.support.trainer.measure_memory import packed_batch
from tests.support.trainer.memory_cases import Case
from vlmpipe.trainer.distributed.process import ProcessContext, run_worker, start_worker
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.strategies.base import Strategy
from vlmpipe.trainer.strategies.registry import build_strategy

MARK = "losses: "
STEPS = 3  # after the snapshot


def build(case: Case, worker: ProcessContext, *, seed: int) -> Strategy:
    job = case.config(worker.world_size)
    family = family_of(job.model)
    torch.manual_seed(seed)
    model = family.skeleton(job.model, vocabulary=case.vocabulary)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    module = family.training_module(job.model, model, cached=True).train()
    return build_strategy(job.train, module, family.blocks(module), worker)


def train(strategy: Strategy, case: Case, worker: ProcessContext, steps: int) -> list[float]:
    batch = packed_batch(case.config(worker.world_size).model, case.rows, case.vocabulary, cached=True)
    losses = []
    for _ in range(steps):
        loss = strategy.forward_backward([batch], len(batch.label_ids) * worker.world_size)
        strategy.step(1.0)
        losses.append(float(loss))
    return losses


def run(name: str, folder: Path, worker: ProcessContext) -> dict[str, list[float]]:
    """`name` is a strategy, and after a colon what it offloads."""
    strategy_name, _, offload = name.partition(":")
    case = Case(strategy_name, {"train.offload": offload or "none"}, passes=1)
    folder = folder / name
    if worker.is_first:
        folder.mkdir(parents=True)
    dist.barrier()
    group = dist.new_group(backend="gloo")
    strategy = build(case, worker, seed=0)
    for number in range(2):  # the second snapshot uses the buffers of the first again
        train(strategy, case, worker, 1)
        staging = folder / str(number)
        if worker.is_first:
            staging.mkdir()
        dist.barrier()
        write = strategy.snapshot(staging, group)
        if number == 0:
            write()
    went_on = train(strategy, case, worker, STEPS)
    assert not list(staging.rglob("*.pt")), "nothing was to be written yet"
    dist.barrier()
    write()
    dist.barrier()
    resumed = build(case, worker, seed=1)
    resumed.load(staging)
    return {"went on": went_on, "resumed": train(resumed, case, worker, STEPS)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", required=True)
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    worker = start_worker()
    losses = {name: run(name, arguments.folder, worker) for name in arguments.runs}
    if worker.is_first:
        print(MARK + json.dumps(losses))


if __name__ == "__main__":
    run_worker(main)
