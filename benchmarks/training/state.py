"""Part `state`: bytes a parameter that a rank holds between steps and sends in one, by strategy and precision."""

from __future__ import annotations

import gc
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.support.processes import announce, first_ranks_answer
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench, cases_in_time
from benchmarks.support.tiny_run import TinyRun
from benchmarks.training.strategies.cases import COMMON, LANGUAGE
from tests.support.trainer.measure_memory import measure
from tests.support.trainer.memory_cases import Case
from vlmpipe.trainer.distributed.process import start_worker
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape

RANKS, QUICK_CASES = 2, 2
ROWS = SequenceShape(
    sequences=1, tokens=16, images=1, label_tokens=4
)  # a step's own tensors are small beside the weights
SIZES = {
    f"{LANGUAGE}.num_hidden_layers": 8,
    f"{LANGUAGE}.hidden_size": 256,
    f"{LANGUAGE}.intermediate_size": 688,
}
LORA: dict[str, Any] = {"model.lora": {"rank": 8}, "train.precision": "bf16"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{strategy}, {precision}": (strategy, {"train.precision": precision})
        for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3")
        for precision in ("fp32", "bf16-autocast", "bf16")
        if (strategy, precision) != ("fsdp", "bf16-autocast")  # gathers weights in bf16: refused
    },
    "fsdp, bf16, adamw_8bit": ("fsdp", {"train.precision": "bf16", "train.optimizer.name": "adamw_8bit"}),
    "ddp, bf16, adapters": ("ddp", LORA),
    "ddp, bf16, adapters on nf4": ("ddp", LORA | {"model.lora": {"rank": 8, "quantize_base": "nf4"}}),
    "fsdp, bf16, adapters, frozen weights sharded": ("fsdp", LORA | {"train.shard_frozen_weights": True}),
}
NOTE = (
    f"State: of {RANKS} ranks, one of them. Held: all storages after a step, weights, masters, sums and moments, and a "
    "little of the batch, over the parameters of the whole model, frozen ones among them. Sent: the larger of what "
    "goes into a step's collectives and what comes out of them, as tensors; a ring sends up to twice that for a sum."
)


def state(bench: Bench) -> None:
    """Every strategy in every precision, adapters and 8-bit moments."""
    names = list(CASES)[: QUICK_CASES if bench.quick else None]
    found = bench.call_within(
        "state", f"{__name__}:measured", {"names": names}, ranks=RANKS, most=len(names), kind="cases"
    )
    for name in [each for each in names if each in found]:
        for what, value in found[name].items():
            bench.report.figure(f"{what}, a rank of {RANKS}", name, "bytes a parameter", Side("ours", [value]))
    bench.report.note(NOTE)


def measured(names: list[str], seconds: float | None) -> tuple[int, dict[str, Any]]:
    """One rank: bytes a parameter, by case. Collective."""
    worker = start_worker()

    found: dict[str, Any] = {}
    for name in cases_in_time(names, math.inf if seconds is None else seconds, first_ranks_answer):
        if worker.is_first:
            announce(f"state: {len(found) + 1} of {len(names)}, {name}")
        strategy, changes = CASES[name]
        case = Case(strategy, {**COMMON, **SIZES, **changes}, passes=1, rows=ROWS)
        model = case.config(worker.world_size).model
        with torch.device("meta"):
            skeleton = family_of(model).skeleton(model, vocabulary=case.vocabulary)
        parameters = sum(each.numel() for each in skeleton.parameters())
        held_bytes = measure(case, worker)["held"]
        gc.collect()
        run = TinyRun(case, worker)
        run.step()  # the first also compares models
        with Sent() as sent:
            run.step()
        found[name] = {"held": held_bytes / parameters, "sent": sent.total_bytes / parameters}
        del run
        gc.collect()
    return len(found), found


class Sent(TorchDispatchMode):
    """Adds up the tensors of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.total_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and func is not torch.ops.c10d.barrier.default:
            # An all-gather writes into its first argument, a reduce-scatter reads its second.
            self.total_bytes += max(
                sum(each.nbytes for each in tree_leaves(argument) if isinstance(each, Tensor)) for argument in args[:2]
            )
        return result
