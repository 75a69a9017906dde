"""Part `copies` of `benchmarks.on_gpu`: whether tensor-parallel ranks keep equal copies of what each holds whole.

Family hf shards no tower. Attention's backward pass adds in the order in which its blocks end, so equal inputs give
gradients that differ in the last bits; ranks that each followed their own would drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from tests.support.hf.publish import model_section, publish
from tests.support.trainer.runs import make_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.dataloading.prefetching_loader import PrefetchingLoader
from vlmpipe.trainer.distributed.process import ProcessContext, start_worker
from vlmpipe.trainer.setup.training import TrainingSetup, build_training
from vlmpipe.trainer.strategies.tensor_parallel.replicated_gradients import ReplicatedGradients

RANKS, STEPS, QUICK_STEPS = 2, 50, 2
WAYS = {"their gradients' mean": True, "each copy its own gradients": False}


def copies(bench: Bench) -> None:
    """How far copies are apart after some steps, as they are trained, and without what keeps them equal."""
    if torch.cuda.device_count() < RANKS and not bench.quick:
        bench.report.note(f"copies under tensor parallelism: not measured, this machine has fewer than {RANKS} GPUs")
        return
    steps = QUICK_STEPS if bench.quick else STEPS
    config = hf_run(bench.scratch, steps)
    claim = f"copies of one tower apart after {steps} steps"
    for label, combined in WAYS.items():
        with bench.going_on(label):
            arguments = {"config": config, "combined": combined}
            apart = bench.call("benchmarks.gpu.copies:largest_apart", arguments, ranks=RANKS)
            bench.report.figure(claim, f"hf, tp, {RANKS} ranks", "of the largest weight", Side(label, [apart]))
            if combined:
                bench.report.require(apart == 0.0, "copies of one tower stay equal under tensor parallelism")


def hf_run(root: Path, steps: int) -> str:
    """The run.json of a tiny run whose tower is trained, with the kernels of a run that is not deterministic."""
    folder = publish("internvl", root / "model")
    changes: dict[str, Any] = {
        "model": model_section(folder, freeze=[]),
        "train.strategy": "tp",
        "train.tensor_parallel": RANKS,
        "train.deterministic": False,
        "train.epochs": 1000,
        "train.max_steps": steps,
    }
    return f"{make_run(root, 'hf-tp', changes, features='off').run.run_uri}/run.json"


def largest_apart(config: str, combined: bool) -> float:
    """The largest difference between two ranks' copies of a weight, as a share of the largest weight, after training.

    combined: give all ranks the same gradients, as training does; else each copy has its own.
    """
    worker, job = start_worker(), JobConfig.load(config)
    with followed_apart(not combined):
        setup = build_training(job, worker)
        train(job, setup, worker)
    strategy: Any = setup.strategy
    places = strategy._replicated._same
    assert places, "nothing is held whole"
    apart = largest = 0.0
    for owner, name in places:
        mine = local(owner.get_parameter(name).detach())
        first = mine.clone()
        dist.broadcast(first, src=0)
        apart = max(apart, float((mine - first).abs().max()))
        largest = max(largest, float(mine.abs().max()))
    found = torch.tensor([apart, largest], device=worker.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found[0] / found[1])


@contextmanager
def followed_apart(apart: bool) -> Iterator[None]:
    """Training without the mean of what all ranks compute; sums of what each computes a part of stay."""
    if not apart:
        yield
        return
    combine = ReplicatedGradients.combine

    def sums_only(self: ReplicatedGradients) -> None:
        same, self._same = self._same, []
        combine(self)
        self._same = same

    with mock.patch.object(ReplicatedGradients, "combine", sums_only):
        yield


def train(job: JobConfig, setup: TrainingSetup, worker: ProcessContext) -> None:
    stream = PrefetchingLoader(
        setup.loader,
        setup.image_source,
        micro_batch_size=job.train.micro_batch_size,
        first_step=0,
        end_step=setup.facts.total_steps,
        replica=setup.replica,
        device=worker.device,
    )
    for data in stream:
        setup.strategy.forward_backward(data.batches, data.global_loss_terms)
        setup.strategy.step(1.0)
    stream.close()
    setup.loader.close()


def local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
