"""Part `memory` of `benchmarks.on_gpu`: the planner's peaks beside what torch allocates and reserves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.run import MIB, MIDDLE, OFFLOAD_ALL, TINY, WARM_UP, alone, case_of, each, wait
from benchmarks.support.suite import Bench
from benchmarks.support.tiny_run import TinyRun
from tests.support.planner.planned_memory import fullest_parts, planned_phases
from tests.support.trainer.memory_cases import ADAPTERS, BF16, BF16_SUMS, CHECKPOINTING, IN_HOST, NF4, ONLINE, SELECTIVE
from vlmpipe.planner.memory.rank import CONTEXT_BYTES, device_parts
from vlmpipe.planner.parallel_layout import layout_of

# On one process: strategy, changes, whether features are cached. The planner's figure is beside the allocator's.
MEMORY: dict[str, tuple[str, dict[str, Any], bool]] = {
    "ddp": ("ddp", {}, True),
    "ddp bf16": ("ddp", BF16, True),
    "ddp bf16 checkpointing": ("ddp", BF16 | CHECKPOINTING, True),
    "ddp bf16 selective": ("ddp", BF16 | SELECTIVE, True),
    "ddp bf16 activations offloaded": ("ddp", BF16 | IN_HOST, True),
    "ddp bf16 loss at once": ("ddp", BF16 | {"train.loss_chunk_tokens": 0}, True),
    "ddp bf16 averaged": ("ddp", BF16 | {"train.ema_decay": 0.999}, True),
    "ddp bf16 online": ("ddp", BF16 | ONLINE, False),
    "ddp bf16 tower trained": ("ddp", BF16 | ONLINE | {"model.freeze": []}, False),
    "ddp adapters bf16": ("ddp", ADAPTERS | BF16, True),
    "ddp 4-bit base bf16": ("ddp", NF4 | BF16, True),
    "fsdp bf16 8-bit moments": ("fsdp", BF16 | {"train.optimizer.name": "adamw_8bit"}, True),
    "ddp bf16 compiled": ("ddp", BF16 | {"train.compile": "on"}, True),
    "fsdp bf16": ("fsdp", BF16, True),
    "fsdp bf16 checkpointing": ("fsdp", BF16 | CHECKPOINTING, True),
    "fsdp bf16 offload": ("fsdp", BF16 | OFFLOAD_ALL, True),
    "zero1 bf16": ("zero1", BF16, True),
    "zero2 bf16": ("zero2", BF16, True),
    "zero2 bf16 offload": ("zero2", BF16 | BF16_SUMS | {"train.offload": "optimizer"}, True),
    "zero3 bf16": ("zero3", BF16, True),
    "zero3 bf16 selective": ("zero3", BF16 | SELECTIVE, True),
}


def memory(bench: Bench) -> None:
    """The fullest phase of a step: what torch allocates, what it reserves with the holes between, and at the end what
    CUDA and its libraries hold beside it."""
    size = TINY if bench.quick else MIDDLE
    predict = bench.report.predict
    for name, (strategy, changes, cached) in each(bench, MEMORY, 2):
        case = case_of(size, strategy, changes, cached=cached)
        with bench.going_on(name):
            parts = fullest_parts(planned_phases(case, 1, on_gpu=True))
            beside = {part.name: part.bytes for part in device_parts(parts, layout_of(case.config(1)))}
            measured = alone(peaks_of, case, size, bench.worker)
            if measured is None:
                continue
            allocates = sum(part.bytes for part in parts) + beside["cuBLAS workspaces"]
            reserves = allocates + beside["fragmentation"]
            predict("peak that torch allocates", name, "MiB", allocates / MIB, measured.allocated_bytes / MIB)
            predict("peak that torch reserves", name, "MiB", reserves / MIB, measured.reserved_bytes / MIB)
    if bench.worker.device.type == "cuda":
        free, whole = torch.cuda.mem_get_info()
        held = whole - free - torch.cuda.memory_reserved()
        predict("beside torch's memory", "all processes at the end", "MiB", CONTEXT_BYTES / MIB, held / MIB)


@dataclass(frozen=True)
class Peaks:
    """Of a step, in torch's memory."""

    allocated_bytes: int
    reserved_bytes: int


def peaks_of(run: TinyRun) -> Peaks | None:
    """None without a GPU."""
    for _ in range(WARM_UP):
        run.step()
    if run.worker.device.type != "cuda":
        return None
    wait(run.worker)
    torch.cuda.empty_cache()  # what was held when the model was built and the optimizer's state made
    torch.cuda.reset_peak_memory_stats()
    run.step()
    wait(run.worker)
    return Peaks(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
