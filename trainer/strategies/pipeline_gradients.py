"""What the ranks of a pipeline do with gradients: sums over copies, and the norm over stages."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainer.strategies.buckets import GradientBuckets
from trainer.worker import COLLECTIVE_TIMEOUT, Worker


class Groups:
    """This rank's place, and the ranks that it works with: rank = stage x copies + copy. Made on all ranks together.

    `ends`: the first and the last stage of each pipeline need a group of their own.
    """

    def __init__(self, stages: int, worker: Worker, *, ends: bool) -> None:
        self.device = worker.device
        self.num_copies = copies = worker.world_size // stages
        self.stage, self.num_stages = worker.rank // copies, stages
        self.copy = worker.rank % copies
        self.pipeline = _group([[stage * copies + copy for stage in range(stages)] for copy in range(copies)])
        self.copies = _group([[stage * copies + copy for copy in range(copies)] for stage in range(stages)])
        self.ends = _group([[copy, (stages - 1) * copies + copy] for copy in range(copies)]) if ends else None


def _group(ranks: list[list[int]]) -> ProcessGroup | None:
    """The one of these groups that has this rank, if one has."""
    mine, _ = dist.new_subgroups_by_enumeration(ranks, timeout=COLLECTIVE_TIMEOUT)
    return mine


class Gradients:
    """The gradients of a stage.

    tied: the matrix that is both embedding and head. Both ends of the pipeline have it, and each a part of its
    gradient: these are added, and in the norm it counts once.
    """

    def __init__(self, module: nn.Module, tied: nn.Parameter | None, groups: Groups) -> None:
        self._groups = groups
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._tied: list[nn.Parameter] = [one for one in self.parameters if tied is not None and one is tied]
        self._counted = [parameter for parameter in self.parameters if parameter is not tied or groups.stage == 0]
        self._buckets: GradientBuckets | None = None

    def expect(self, passes: int) -> None:
        """As many backward passes are the next step's. Not to be called before a checkpoint is loaded: torch takes an
        optimizer with gradients for one without state."""
        if self._buckets is None:
            assert self._groups.copies is not None
            self._buckets = GradientBuckets(self.parameters, self._groups.copies)
        self._buckets.expect_last(passes)

    def add_up(self) -> None:
        """Sums over the copies of the model, and over both ends of the pipeline what is tied. Collective."""
        assert self._buckets is not None
        self._buckets.wait()
        for parameter in self._tied:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self._groups.ends)

    def clip(self, most: float) -> Tensor:
        """Clip by the norm over all stages (0: measure only), and return it. Collective."""
        gradients = [parameter.grad for parameter in self._counted if parameter.grad is not None]
        square = get_total_norm(gradients).square().to(self._groups.device)
        dist.all_reduce(square, group=self._groups.pipeline)
        norm = square.sqrt()
        clip_grads_with_norm_(self.parameters, most or float("inf"), norm)
        return norm
