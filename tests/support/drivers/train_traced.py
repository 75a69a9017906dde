"""Trains several runs in one process group, and writes this rank's collectives, step by step, into each run's folder.

`<run>/collectives/<rank>.json`: of each step, and of each batch of a validation, whether this rank's micro-batches have
images, the bounds of their samples, and its collectives as [operation, shapes, ranks of the group]. c10d's operations
pass through torch's dispatcher, also those that DDP's reducer, FSDP's hooks and DeepSpeed ask for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vlmpipe.trainer.setup.strategy
from tests.support.drivers import train_many
from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.distributed.process import run_worker

NAMESPACES = ("c10d", "_c10d_functional")
WAITS = ("wait_tensor", "barrier")


class Collectives(TorchDispatchMode):
    """Records what is sent between ranks while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in NAMESPACES and func._opname not in WAITS:
            leaves = tree_leaves((args, kwargs))
            shapes = [list(one.shape) for one in leaves if isinstance(one, torch.Tensor)]
            self.seen.append([func._opname, shapes, _ranks(leaves)])
        return func(*args, **(kwargs or {}))


def _ranks(leaves: Sequence[Any]) -> list[int]:
    """Of the group that an operation names or is given; all, where it says none."""
    for one in leaves:
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in one._type().qualified_name():
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(one))
        if isinstance(one, str) and one in dist.distributed_c10d._world.pg_names.values():
            return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(one))
    return list(range(dist.get_world_size()))


def traced(build: Any, written: list[tuple[Path, list[Any]]]) -> Any:
    def building(config: Any, *others: Any) -> Any:
        strategy, steps = build(config, *others), []
        written[-1][1].clear()
        forward_backward, step, forward_loss = strategy.forward_backward, strategy.step, strategy.forward_loss

        def recording(batches: Sequence[PackedBatch], *more: Any) -> Any:
            batches = list(batches)
            with Collectives() as mode:
                result = forward_backward(batches, *more)
            images, bounds = [*map(_images, batches)], [*map(_bounds, batches)]
            steps.append({"kind": "step", "images": images, "bounds": bounds, "collectives": mode.seen})
            return result

        def validating(batch: PackedBatch) -> Any:
            with Collectives() as mode:
                result = forward_loss(batch)
            of_batch = {"images": [_images(batch)], "bounds": [_bounds(batch)]}
            steps.append({"kind": "validation", **of_batch, "collectives": mode.seen})
            return result

        def stepping(*arguments: Any) -> Any:
            with Collectives() as mode:
                result = step(*arguments)
            steps[-1]["collectives"] += mode.seen
            return result

        strategy.forward_backward, strategy.step, strategy.forward_loss = recording, stepping, validating
        written[-1] = (written[-1][0], steps)
        return strategy

    return building


def _images(batch: PackedBatch) -> bool:
    return bool(batch.images) if isinstance(batch.images, dict) else len(batch.images) > 0


def _bounds(batch: PackedBatch) -> list[list[int]]:
    found: list[list[int]] = batch.samples.bounds.tolist() if batch.samples else []
    return found


def main() -> int:
    written: list[tuple[Path, list[Any]]] = []
    vlmpipe.trainer.setup.strategy.strategy_of = traced(vlmpipe.trainer.setup.strategy.strategy_of, written)
    train = train_many.train

    def training(job: Any, worker: Any, stop: Any) -> Any:
        written.append((Path(job.run.run_uri, "collectives"), []))
        code = train(job, worker, stop)
        folder, steps = written[-1]
        folder.mkdir(exist_ok=True)
        (folder / f"{worker.rank}.json").write_text(json.dumps(steps))
        return code

    train_many.train = training
    return train_many.main()


if __name__ == "__main__":
    run_worker(main)
