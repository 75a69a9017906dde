"""Communication of a step that computing hides, and what stays visible of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlmpipe.catalog.machines import Gpu, Machine
from vlmpipe.planner.parallel_layout import SHARDED_BY_FSDP
from vlmpipe.planner.time.transfers import Transfer, link_seconds, seconds
from vlmpipe.trainer.config.strategies import PIPELINE_PARALLEL
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.sizing.deepspeed_config import overlaps_reduction, reduces_at_the_end

# Seconds by which computing takes longer for each second that hidden communication takes on a GPU's own links: NCCL's
# kernels take multiprocessors and memory bandwidth. Fitted to published runs of FSDP on A100 and H100 that differ in
# tokens for each byte (`benchmarks.planner.published_runs`): with 4k tokens a pass hidden traffic shows almost whole.
SLOWED_BY_HIDDEN = 0.8


@dataclass(frozen=True)
class Exposed:
    """Communication that computing does not hide."""

    name: str
    s: float
    between_nodes: bool
    all_reduce: bool


@dataclass(frozen=True)
class Hiding:
    """Seconds of computing that hide communication.

    DDP's all-reduces of gradients hide behind the backward pass of the last micro-batch. FSDP's gathers hide behind the
    passes that they are for, and its reductions behind what then is left of the backward passes. In a pipeline the
    gathers hide behind the first micro-batch's forward pass, and the reductions, which torch starts after the last
    backward pass, behind nothing.
    ZeRO with overlap_comm is taken to do as DDP and FSDP do; its gather after the update hides behind nothing. Nothing
    hides of tensor parallelism (the next product needs the sum) and of what stages pass on (torch's 1F1B schedule waits
    for what it receives right after it has sent).
    """

    gathers: bool = False  # whether gathers of weights hide at all
    gathers_in_backward: float = 0.5  # their share that is for backward passes
    forward_s: float = 0.0
    backward_s: float = 0.0  # of the passes in which gradients are reduced

    @classmethod
    def of(cls, train: TrainConfig, trainable: int, *, micro_steps: int, forward_s: float, backward_s: float) -> Hiding:
        """Return what communication a step can hide behind its forward and backward passes.

        trainable: parameters that a rank trains.
        """
        strategy = train.strategy
        overlaps = (
            strategy.startswith("zero")
            and not reduces_at_the_end(train)
            and overlaps_reduction(train.deepspeed, stage=int(strategy[-1]), offload=train.offload, trainable=trainable)
        )
        if strategy in PIPELINE_PARALLEL:
            return cls(gathers=True, gathers_in_backward=0.0, forward_s=forward_s / micro_steps)
        if strategy in SHARDED_BY_FSDP:
            in_backward = 0.0 if train.keeps_gathered_weights else 0.5
            return cls(True, in_backward, forward_s, backward_s)
        if strategy == "zero3" and overlaps:
            return cls(gathers=True, forward_s=forward_s, backward_s=backward_s)
        if strategy == "ddp" or (strategy == "zero1" and overlaps):
            return cls(backward_s=backward_s / micro_steps)
        return cls(backward_s=backward_s) if strategy == "zero2" and overlaps else cls()


def exposed_communication(transfers: Sequence[Transfer], machine: Machine, gpu: Gpu, hiding: Hiding) -> list[Exposed]:
    """Exposed time of each collective. One takes as long as its slower scope, as chunks move through both at
    once."""
    times = by_name(transfers, machine, gpu)
    one_of = {transfer.name: transfer for transfer in transfers}
    room = {"weights": 0.0, "gradients": hiding.backward_s, "activations": 0.0}
    if hiding.gathers:
        gathers_s = sum(s for name, s in times.items() if one_of[name].what == "weights")
        in_backward_s = min(hiding.gathers_in_backward * gathers_s, hiding.backward_s)
        in_forward_s = min((1 - hiding.gathers_in_backward) * gathers_s, hiding.forward_s)
        room |= {"weights": in_forward_s + in_backward_s, "gradients": hiding.backward_s - in_backward_s}
    exposed = []
    for name, s in times.items():
        same = [transfer for transfer in transfers if transfer.name == name]
        slowest = max(same, key=lambda transfer: seconds(transfer, machine, gpu))
        hidden_s = min(s, room[slowest.what])
        room[slowest.what] -= hidden_s
        if s > hidden_s:
            exposed.append(Exposed(name, s - hidden_s, slowest.scope == "inter", slowest.collective == "all_reduce"))
    return exposed


def slowed_seconds(transfers: Sequence[Transfer], exposed: Sequence[Exposed], machine: Machine, gpu: Gpu) -> float:
    """Seconds that hidden communication adds to computing."""
    shown = {phase.name: phase.s for phase in exposed}
    times = by_name(transfers, machine, gpu)
    return SLOWED_BY_HIDDEN * sum(
        link_seconds(transfer.bytes_per_rank, gpu) * (1 - shown.get(transfer.name, 0.0) / times[transfer.name])
        for transfer in transfers
        if times[transfer.name]
    )


def by_name(transfers: Sequence[Transfer], machine: Machine, gpu: Gpu) -> dict[str, float]:
    times: dict[str, float] = {}
    for transfer in transfers:
        times[transfer.name] = max(times.get(transfer.name, 0.0), seconds(transfer, machine, gpu))
    return times
