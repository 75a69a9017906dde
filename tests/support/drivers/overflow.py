"""Steps in fp16 whose gradients overflow: what each strategy makes of them. Prints it as JSON.

torchrun ... -m tests.support.drivers.overflow --folder FOLDER --runs zero2 fsdp
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.drivers.late_write import build
from tests.support.trainer.measure_memory import packed_batch
from tests.support.trainer.memory_cases import Case
from vlmpipe.trainer.distributed.process import ProcessContext, run_worker, start_worker
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape

MARK = "found: "
TOO_MUCH = 2.0**60
# fp16 is slow on a processor.
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL = {f"model.language_model.config.{name}": size for name, size in SIZES.items()}


def run(name: str, folder: Path, worker: ProcessContext) -> dict[str, Any]:
    """Of one strategy; after a colon what it offloads."""
    strategy_name, _, offload = name.partition(":")
    changes = {"train.offload": offload or "none", "train.precision": "fp16", **SMALL}
    case = Case(strategy_name, changes, passes=1, rows=SequenceShape(sequences=1, tokens=48, images=1, label_tokens=20))
    batches = [
        packed_batch(case.config(worker.world_size).model, case.rows, case.vocabulary, cached=True)
    ] * case.passes
    total = 2 * sum(len(batch.label_ids) for batch in batches)
    group = dist.new_group(backend="gloo")
    strategy = build(case, worker, seed=0)

    def step() -> tuple[float, bool]:
        """The loss of a step on all ranks, and whether it was skipped."""
        loss = strategy.forward_backward(batches, total).detach().clone()
        dist.all_reduce(loss)
        return float(loss), strategy.step(1.0).skipped

    found: dict[str, Any] = {"good": step()}
    first_scale, strategy.loss_scale.value = strategy.loss_scale.value, TOO_MUCH
    found |= {"overflows": step(), "halved": strategy.loss_scale.value == TOO_MUCH / 2}
    strategy.loss_scale.value = first_scale / 4
    found |= {"after": step(), "then": step()}
    if worker.is_first:
        folder.mkdir(parents=True)
    dist.barrier()
    strategy.snapshot(folder, group)()
    dist.barrier()
    found["goes on"] = step()
    strategy = build(case, worker, seed=1)
    strategy.load(folder)
    found |= {"resumed": step(), "scale": strategy.loss_scale.value / first_scale}
    found["counted"] = strategy.loss_scale.overflows
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", required=True)
    arguments = parser.parse_args()
    worker = start_worker()
    torch.set_num_threads(1)
    found = {name: run(name, arguments.folder / str(number), worker) for number, name in enumerate(arguments.runs)}
    if worker.is_first:
        print(MARK + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    run_worker(main)
