"""Order of forward and backward passes on a pipeline rank, as torch's schedules have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from vlmpipe.trainer.sizing.pipeline_partition import schedule_passes

Pass = Literal["forward", "backward"]


def operations(rank: int, ranks: int, virtual_stages: int, micro_batches: int) -> Iterator[tuple[Pass, int]]:
    """Passes of one rank in a step, each with the number of its stage among the rank's own.

    Forward passes first, as many as there must be before the first backward pass is due, then one of each in turn, then
    what is left of backward passes (Narayanan et al. 2021, arXiv 2104.04473: 2.2.1 with one stage on a rank, 2.2.2 with
    several). With several, `schedule_passes` says how many micro-batches there are; with one, what is empty holds
    nothing and is left out.
    """
    if virtual_stages == 1:
        total, in_a_round = micro_batches, micro_batches
        ahead = min(ranks - 1 - rank, micro_batches)
    else:
        passes = schedule_passes(micro_batches, ranks, virtual_stages)
        total, in_a_round = virtual_stages * passes, passes // (passes // ranks)
        ahead = min((virtual_stages - 1) * in_a_round + 2 * (ranks - 1 - rank), total)

    def stage(number: int) -> int:
        return number // in_a_round % virtual_stages

    for number in range(total):
        yield "forward", stage(number)
        if number >= ahead:
            yield "backward", virtual_stages - 1 - stage(number - ahead)
    for number in range(total - ahead, total):
        yield "backward", virtual_stages - 1 - stage(number)
