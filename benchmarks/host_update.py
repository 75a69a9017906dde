"""How many bytes a second an update in the machine's memory moves (`train.offload`): fused AdamW of one thread, alone
and after clipping. `python -m benchmarks.host_update`

Bytes are those that the planner counts (`vlmpipe.planner.time.optimizer_step`), seconds the thread's CPU time: it
waits for memory in them.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.common import interleaved_work, options
from benchmarks.report import Report, Side
from vlmpipe.planner.time.optimizer_step import HOST_BYTES_PER_S, UPDATE_BYTES_PER_PARAMETER

PARAMETERS = 1 << 26  # 1 GiB with gradients and moments: much more than a cache has
ADAMW_BYTES_PER_PARAMETER = 28  # weight, gradient and two moments read; all but the gradient written


def main() -> None:
    arguments = options(__doc__)
    torch.set_num_threads(1)
    count = PARAMETERS >> 6 if arguments.quick else PARAMETERS
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

    rounds = arguments.rounds or (2 if arguments.quick else 15)
    report = Report("An update in the machine's memory", {"parameters": count, "rounds": rounds})
    for name, measured in interleaved_work({"AdamW": update, "clipping and AdamW": clipped}, rounds).items():
        report.figure("bytes moved", name, "GB / CPU s", Side("one thread", [1 / one.cpu_per_unit for one in measured]))
    report.notes.append(f"Plans take {HOST_BYTES_PER_S / 1e9:g} GB/s of a rank, for clipping and AdamW.")
    report.publish(arguments)


if __name__ == "__main__":
    main()
