"""Gradients under pipeline parallelism: sums over data-parallel ranks, and the norm over stages."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from trainer.distributed.process import COLLECTIVE_TIMEOUT, ProcessContext
from trainer.strategies.gradient_buckets import GradientBuckets
from trainer.strategies.torch_base import gradient_norm, scale_gradients


class Groups:
    """This rank's place in one mesh of stages, copies and ranks that split layers, and the ranks that it works with:
    see `trainer.distributed.data_parallel_rank`. Made on all ranks together.

    `ends`: the first and the last stage of each pipeline need a group of their own.
    """

    def __init__(self, stages: int, tensor: int, worker: ProcessContext, *, ends: bool) -> None:
        self.device, self.num_stages, self.num_copies = worker.device, stages, worker.world_size // (stages * tensor)
        shape = (stages, self.num_copies, tensor)
        mesh = init_device_mesh(worker.device.type, shape, mesh_dim_names=("stages", "copies", "tensor"))
        self.stage, self.copy, self.tensor_rank = (mesh.get_local_rank(name) for name in ("stages", "copies", "tensor"))
        self.pipeline, self.copies, self.tensor_mesh = (
            mesh.get_group("stages"),
            mesh.get_group("copies"),
            mesh["tensor"],
        )
        of_a_stage = self.num_copies * tensor
        pairs = [[rank, (stages - 1) * of_a_stage + rank] for rank in range(of_a_stage)]
        self.ends: ProcessGroup | None = None
        if ends:
            self.ends, _ = dist.new_subgroups_by_enumeration(pairs, timeout=COLLECTIVE_TIMEOUT)


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
            self._buckets = GradientBuckets(self.parameters, self._groups.copies)
        self._buckets.expect_last(passes)

    def add_up(self) -> None:
        """Sums over the copies of the model, and over both ends of the pipeline what is tied. Collective."""
        assert self._buckets is not None
        self._buckets.wait()
        for parameter in self._tied:
            gradient = parameter.grad
            assert gradient is not None
            gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(gradient, group=self._groups.ends)

    def clip(self, most: float) -> Tensor:
        """Clip by the norm over all stages (0: measure only), and return it. Collective."""
        square = gradient_norm(self._counted).square().to(self._groups.device)
        dist.all_reduce(square, group=self._groups.pipeline)
        norm = square.sqrt()
        scale_gradients(self.parameters, most, norm)
        return norm
