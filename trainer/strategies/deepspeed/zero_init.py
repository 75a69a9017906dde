"""Partitions a model for ZeRO-3 part by part, so that no device ever holds it whole."""

from __future__ import annotations

from torch import Tensor, nn

from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.base import ShardingUnits

Masters = dict[nn.Parameter, Tensor]


def partition_by_part(
    module: nn.Module, blocks: ShardingUnits, settings: dict[str, object], worker: ProcessContext, *, bf16: bool
) -> Masters:
    """Give each layer its weights, then the rest of the module, and partition them by `deepspeed.zero.Init`.

    `bf16` partitions bf16 copies, and returns this rank's fp32 slices of the trained weights, in the host's memory.
    """
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.init_distributed(dist_init_required=False)  # DeepSpeed's own view of torch's process group
    masters: Masters = {}
    for part in (*blocks.tower_layers, *blocks.language_layers, module):
        blocks.fill(part)
        for parameter in part.parameters() if bf16 else ():
            if not hasattr(parameter, "ds_id"):  # partitioned: it is shared with an earlier part
                if parameter.requires_grad:
                    masters[parameter] = _slice(parameter.detach(), worker).to("cpu", copy=True)
                parameter.data = parameter.data.bfloat16()
        node = groups._get_zero_param_intra_parallel_group()  # made by the first, for hpZ
        deepspeed.zero.Init(module=part, config_dict_or_path=settings, zero_param_parallel_group=node)
    for buffer in module.buffers():  # which DeepSpeed leaves to who partitions
        buffer.data = buffer.data.to(worker.device)
    return masters


def _slice(weight: Tensor, worker: ProcessContext) -> Tensor:
    """This rank's share, flat; the last one is shorter where it does not divide."""
    size = -(-weight.numel() // worker.world_size)
    return weight.flatten()[worker.rank * size : (worker.rank + 1) * size]
