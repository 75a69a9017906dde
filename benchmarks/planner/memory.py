"""Part `memory`: the planner's bytes beside those of real processes, weighed storage by storage in a real step."""

from __future__ import annotations

import gc
import math
from typing import Any

import torch.distributed as dist

from benchmarks.support.processes import announce, first_ranks_answer
from benchmarks.support.suite import Bench, cases_in_time
from tests.support.planner import planned_memory
from tests.support.trainer import memory_cases, pipeline_memory, split_memory_cases
from tests.support.trainer.measure_memory import measure
from tests.support.trainer.memory_cases import Case
from vlmpipe.trainer.distributed.process import start_worker

MIB = 2**20
QUICK_CASES = 2
KINDS: dict[str, tuple[dict[str, Case], int]] = {  # with the number of processes
    "whole models": (memory_cases.CASES, 2),
    "split models": (split_memory_cases.SPLIT_CASES, 4),
    "pipelines": (pipeline_memory.CASES, pipeline_memory.STAGES),
    "split pipelines": (pipeline_memory.SPLIT_CASES, 4),
    "pipelines of two copies": (pipeline_memory.COPIED_CASES, 8),
}
NOTE = (
    "Memory: bytes on the first of two processes (three to eight where layers are split). What a GPU adds (CUDA "
    "context, NCCL buffers, fragmentation) is not in it, and not measured by anything here."
)


def memory(bench: Bench) -> None:
    """Each case in real processes: two, or four where layers are split; of pipelines every stage."""
    bench.expect(len(KINDS))
    for kind, (cases, processes) in KINDS.items():
        names = list(cases)[: QUICK_CASES if bench.quick else None]
        arguments = {"kind": kind, "names": names}
        target = f"{__name__}:measured"
        found = bench.call_within(kind, target, arguments, ranks=processes, most=len(names), kind="cases")
        for name, weighed in found.items():
            predicted = predictions(cases[name], processes)
            for number, (planned, held) in enumerate(zip(predicted, weighed, strict=True), start=1):
                label = f"{name}, stage {number}" if len(predicted) > 1 else name
                compare(bench, label, planned, held)
    bench.report.predictions.sort(key=lambda row: row.what)
    bench.report.note(NOTE)


def predictions(case: Case, processes: int) -> list[dict[str, int]]:
    """Of every pipeline stage; of a model without pipeline one."""
    staged = "train.pipeline_parallel" in case.changes
    return pipeline_memory.predicted(case) if staged else [planned_memory.predicted(case, processes)]


def compare(bench: Bench, label: str, planned: dict[str, int], held: dict[str, int]) -> None:
    for part in ("weights", "quantized", "optimizer", "peak"):
        if held[part]:
            what = f"memory, {part.replace('_', ' ')}"
            bench.report.predict(what, label, "MiB", planned[part] / MIB, held[part] / MIB)


def measured(kind: str, names: list[str], seconds: float | None) -> tuple[int, dict[str, Any]]:
    """One rank: bytes held by the first rank of each stage, by case. Collective."""
    cases, _ = KINDS[kind]
    worker = start_worker()

    found: dict[str, Any] = {}
    for name in cases_in_time(names, math.inf if seconds is None else seconds, first_ranks_answer):
        if worker.is_first:
            announce(f"{kind}: {len(found) + 1} of {len(names)}, {name}")
        stages = cases[name].changes.get("train.pipeline_parallel", 1)
        ranks: list[dict[str, int] | None] = [None] * worker.world_size
        dist.all_gather_object(ranks, measure(cases[name], worker))
        found[name] = ranks[:: worker.world_size // stages]
        gc.collect()
    return len(found), found
