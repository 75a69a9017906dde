"""Gradients under pipeline parallelism: a tied matrix at both ends, and the norm over stages."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from vlmpipe.trainer.distributed.process import COLLECTIVE_TIMEOUT, ProcessContext
from vlmpipe.trainer.strategies.torch_base import gradient_norm, scale_gradients


class Groups:
    """This rank's place and process groups in the mesh of (stages, replicas, tensor-parallel ranks). Collective.

    `ends`: also create a group of the first and last stage of each pipeline. Ranks are laid out as
    `vlmpipe.trainer.distributed.data_parallel_rank` describes.
    """

    def __init__(self, stages: int, tensor: int, worker: ProcessContext, *, ends: bool) -> None:
        self.device, self.num_stages, self.num_replicas = worker.device, stages, worker.world_size // (stages * tensor)
        shape = (stages, self.num_replicas, tensor)
        mesh = init_device_mesh(worker.device.type, shape, mesh_dim_names=("stages", "replicas", "tensor"))
        self.stage, self.tensor_rank = mesh.get_local_rank("stages"), mesh.get_local_rank("tensor")
        self.pipeline = mesh.get_group("stages")
        self.replica_mesh, self.tensor_mesh = mesh["replicas"], mesh["tensor"]
        of_a_stage = self.num_replicas * tensor
        pairs = [[rank, (stages - 1) * of_a_stage + rank] for rank in range(of_a_stage)]
        self.ends: ProcessGroup | None = None
        if ends:
            self.ends, _ = dist.new_subgroups_by_enumeration(pairs, timeout=COLLECTIVE_TIMEOUT)


class Gradients:
    """The gradients of a rank's stages, each rank's shard of them.

    tied: the matrix that is both embedding and head. The first and last stage each compute a part of its gradient:
    these are summed, and the norm counts it once.
    """

    def __init__(self, module: nn.Module, tied: nn.Parameter | None, groups: Groups) -> None:
        self._groups = groups
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._tied: list[nn.Parameter] = [weight for weight in self.parameters if tied is not None and weight is tied]
        self._counted = [parameter for parameter in self.parameters if parameter is not tied or groups.stage == 0]

    def sum_tied(self) -> None:
        """Sum the tied matrix's gradient over both ends of the pipeline, whose ranks have equal shards. Collective."""
        for parameter in self._tied:
            assert isinstance(parameter.grad, DTensor)
            dist.all_reduce(parameter.grad.to_local(), group=self._groups.ends)

    def clip(self, most: float) -> Tensor:
        """Clip by the norm over all stages (0: only measure it). Returns the norm. Collective."""
        square = gradient_norm(self._counted).square().to(self._groups.device)
        dist.all_reduce(square, group=self._groups.pipeline)
        norm = square.sqrt()
        scale_gradients(self.parameters, most, norm)
        return norm
