"""Part `host-update`: the rate of an update in the machine's memory (`train.offload`): fused AdamW of one thread, alone
and after clipping.

Bytes are those that the planner counts (`vlmpipe.planner.time.optimizer_step`), seconds the thread's CPU time: it
waits for memory in them.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.planner.time.optimizer_step import HOST_BYTES_PER_S, UPDATE_BYTES_PER_PARAMETER

PARAMETERS = 1 << 26  # 1 GiB with gradients and moments: much more than a cache has
ADAMW_BYTES_PER_PARAMETER = 28  # weight, gradient and two moments read; all but the gradient written


def host_update(bench: Bench) -> None:
    count = PARAMETERS >> 6 if bench.quick else PARAMETERS
    weight = nn.Parameter(torch.randn(count))
    weight.grad = torch.randn(count)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def update() -> float:
        optimizer.step()
        return ADAMW_BYTES_PER_PARAMETER * count / 1e9

    def clipped() -> float:
        nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
        return UPDATE_BYTES_PER_PARAMETER * count / 1e9

    found = bench.take_timed_turns("updates", {"AdamW": update, "clipping and AdamW": clipped})
    for name, times in found.items():
        rate = Side("one thread", [1 / one.cpu_per_unit for one in times])
        bench.report.figure("bytes moved by an update", name, "GB / CPU s", rate)
    bench.report.note(f"Plans take {HOST_BYTES_PER_S / 1e9:g} GB/s of a rank, for clipping and AdamW.")
