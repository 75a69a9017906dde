"""DeepSpeed ZeRO: shards optimizer state (stage 1), gradients (2) and weights (3).

The engine's JSON is derived from the run file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.dataloading.batches import MicroBatches, PackedBatch
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.gc_control import collector_off
from vlmpipe.trainer.hooks.features import average_of
from vlmpipe.trainer.models.attention.mixers import BY_SAMPLE
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.models.layers.experts import COMPUTES_WEIGHTS
from vlmpipe.trainer.optimizer.build import build_optimizer, set_rates
from vlmpipe.trainer.sizing.deepspeed_config import (
    Sizes,
    engine_settings,
    laid_over,
    node_copy_ranks,
    offloading,
    with_node_copy,
)
from vlmpipe.trainer.strategies.base import SavedFiles, StepResult
from vlmpipe.trainer.strategies.deepspeed.fragments import agreed_updates, fragments_of
from vlmpipe.trainer.strategies.deepspeed.linear_regather import recompute_gathered_linear
from vlmpipe.trainer.strategies.deepspeed.values import require_values
from vlmpipe.trainer.strategies.deepspeed.zero_init import partition_by_part
from vlmpipe.trainer.strategies.mixed_precision import LossScale
from vlmpipe.trainer.strategies.named_checkpoint import (
    EMA,
    host_stager,
    load_state,
    metadata_of,
    ranges_of,
    write_state,
)
from vlmpipe.trainer.strategies.torch_base import trained_of

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


class Zero:
    """A `Strategy`."""

    checkpoint_format = "dcp"

    def __init__(
        self, config: TrainConfig, module: nn.Module, blocks: ShardingUnits, worker: ProcessContext, *, stage: int
    ) -> None:
        self._config, self._worker, self._stage = config, worker, stage
        deepspeed = _import_deepspeed(worker)
        if stage == 3:
            recompute_gathered_linear(module)
            for part in module.modules():  # gathered once, whatever it calls, or reads, of its parts
                if getattr(part, BY_SAMPLE, False) or getattr(part, COMPUTES_WEIGHTS, False):
                    deepspeed.utils.set_z3_leaf_module(part, True)
        data_parallel = worker.world_size // config.context_parallel
        micro_steps = config.global_batch_size // (config.micro_batch_size * data_parallel)
        settings = engine_settings(config, stage=stage, micro_steps=micro_steps, sizes=sizes_of(module, blocks))
        settings["zero_optimization"] |= offloading(config, on_gpu=worker.device.type == "cuda")
        copy_ranks = node_copy_ranks(config, nodes=worker.num_nodes, node_ranks=worker.local_world_size)
        self.settings = laid_over(settings, with_node_copy(config, copy_ranks))
        require_values(self.settings)
        if stage == 3:
            initial_weights = partition_by_part(module, blocks, self.settings, worker, bf16=config.precision == "bf16")
        else:
            initial_weights = {
                parameter: parameter.data for parameter in module.parameters() if parameter.requires_grad
            }
        optimizer = build_optimizer(module, config.optimizer)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=self.settings, dist_init_required=False
        )
        trained = trained_of(module)
        self._fragments = fragments_of(self._engine.optimizer, trained)
        if config.precision == "bf16":
            self._begin_from({name: initial_weights[trained[name]] for name in self._fragments})
        del initial_weights
        self._micro_steps = micro_steps
        self.loss_scale = LossScale(config.precision)
        # DeepSpeed's own scaler clips before it divides by the scale, and stays on after an earlier fp16 engine of
        # this process.
        self._engine.optimizer.torch_autocast_gradscaler = None
        self._stager = host_stager(on_gpu=worker.device.type == "cuda")
        self._ema = average_of(config, self._partitions)

    def forward_backward(self, batches: MicroBatches, total_label_tokens: int) -> Tensor:
        # The engine averages over ranks and micro-steps; the loss is a sum over both.
        scale = self._worker.world_size * self._micro_steps / total_label_tokens
        if self.loss_scale.is_on:
            self._engine.optimizer.override_loss_scale(self.loss_scale.value)
        loss_sum = torch.zeros((), device=self._worker.device)
        for number, batch in enumerate(batches, start=1):
            # Set explicitly: an epoch's last step may have fewer micro-batches than the engine expects.
            self._engine.set_gradient_accumulation_boundary(number == len(batches))
            loss = self._engine(**batch.to(self._worker.device))
            self._engine.backward(loss * scale)
            loss_sum += loss.detach()
            if number < len(batches):
                self._engine.step()  # only counts; the update is at the boundary, in `step`
        return loss_sum / total_label_tokens

    def forward_loss(self, batch: PackedBatch) -> Tensor:
        self._engine.eval()
        with torch.no_grad():
            loss: Tensor = self._engine(**batch.to(self._worker.device))
        self._engine.train()
        return loss

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        if self._ema is None:
            yield
            return
        self._let_go()
        with self._ema.swapped():
            self._publish()
            yield
            self._let_go()
        self._publish()

    def step(self, rate_factor: float) -> StepResult:
        set_rates(self._optimizer, rate_factor)
        self._engine.step()  # skips the update when the global norm is not finite
        norm = self._engine.get_global_grad_norm()
        accepted = self.loss_scale.accepts(norm)
        if self._ema and accepted:
            self._ema.update()
        return StepResult(norm, skipped=not accepted)

    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def snapshot(self, folder: Path, group: ProcessGroup) -> Callable[[], None]:
        held = self._stager.stage(self._flat_state())
        assert isinstance(held, dict)
        state = self._named(held) | held["scale"]
        return lambda: write_state(state, folder, group)

    def reads(self, files: SavedFiles) -> dict[str, list[tuple[int, int]]]:
        metadata = metadata_of(files)
        target, _ = self._wanted(metadata.state_dict_metadata)
        return ranges_of(target, metadata, files)

    def load(self, folder: Path) -> None:
        reader = dcp.FileSystemReader(folder)
        target, flat = self._wanted(reader.read_metadata().state_dict_metadata)
        self._let_go()
        load_state(target, reader)
        counts = {name: float(state["step"]) for name, state in target["optimizer"]["state"].items()}
        for partition, count in agreed_updates(self._fragments, counts, self._worker).items():
            flat["step"][partition].fill_(count)
        for numbers in flat["scale"].values():
            self.loss_scale.restore(numbers)
        self._publish()
        if self._ema and EMA not in flat:
            self._ema.restart("the checkpoint")

    def _wanted(self, saved: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Targets by name into which this rank loads the tensors `saved` of a checkpoint, and the flat state whose
        memory they share, but for the numbers of updates."""
        flat = self._flat_state()
        # A checkpoint of another precision has no loss scale.
        flat["scale"] = {name: tensor for name, tensor in flat["scale"].items() if name in saved}
        if not all(f"{EMA}.{name}" in saved for name in self._fragments):
            flat.pop(EMA, None)
        target = self._named(flat)
        for state in target["optimizer"]["state"].values():
            state["step"] = torch.zeros_like(state["step"])
        return target | flat["scale"], flat

    def _flat_state(self) -> dict[str, Any]:
        """The content of a checkpoint: a tensor for each of this rank's partitions, and the loss scale."""
        partitions = self._partitions()
        flat: dict[str, object] = {"model": [partition.detach() for partition in partitions]}
        states = [self._state_of(partition) for partition in partitions]
        flat |= {name: [state[name] for state in states] for name in ("step", *MOMENTS)}
        flat |= {EMA: self._ema.averages} if self._ema else {}
        return flat | {"scale": self.loss_scale.state()}

    def _state_of(self, partition: Tensor) -> dict[str, Tensor]:
        """AdamW's state of a partition. Before the first update it is made, as AdamW would."""
        state: dict[str, Tensor] = self._engine.optimizer.optimizer.state[partition]
        if not state:
            state["step"] = torch.zeros((), device=partition.device)
            state |= {name: torch.zeros_like(partition) for name in MOMENTS}
        return state

    def _named(self, flat: Mapping[str, Sequence[Tensor]]) -> dict[str, Any]:
        """This rank's parts of the parameters, moments and averages in a flat state, as other strategies name them."""
        fragments = self._fragments.items()
        named: dict[str, object] = {"model": {name: fragment.of(flat["model"]) for name, fragment in fragments}}
        of_optimizer = {
            name: {moment: fragment.of(flat[moment]) for moment in MOMENTS} | {"step": flat["step"][fragment.partition]}
            for name, fragment in fragments
        }
        named["optimizer"] = {"state": of_optimizer}
        if EMA in flat:
            named[EMA] = {name: fragment.of(flat[EMA]) for name, fragment in fragments}
        return named

    def _partitions(self) -> list[Tensor]:
        """This rank's flat fp32 weights, one tensor a parameter group."""
        optimizer = self._engine.optimizer
        # The names of stage 3, of stages 1 and 2, and of stage 1 with precision bf16, an engine of its own.
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        return list(next(getattr(optimizer, name) for name in names if hasattr(optimizer, name)))

    @torch.no_grad()
    def _begin_from(self, initial_weights: Mapping[str, Tensor]) -> None:
        """Give the masters the fp32 weights that training begins with, of stage 3 this rank's slices: DeepSpeed takes
        them from the bf16 copies."""
        partitions = self._partitions()
        for name, weight in initial_weights.items():
            fragment = self._fragments[name]
            start = fragment.start if self._stage < 3 else 0
            part = partitions[fragment.partition][fragment.offset : fragment.offset + fragment.numel]
            part.copy_(weight.flatten()[start : start + fragment.numel])

    def _let_go(self) -> None:
        """Release weights that ZeRO-3 has gathered: they would be used again although the partitions change."""
        if self._stage == 3:
            self._engine.optimizer._partition_all_parameters()

    def _publish(self) -> None:
        """Copy the partitions into the module's weights, as the engine does after an update. Collective."""
        optimizer = self._engine.optimizer
        if self._stage < 3:
            optimizer.update_lp_params()
            return
        optimizer.invalidate_secondary_tensor()  # the node's stale copy
        for number in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if small := optimizer.persistent_parameters:  # replicated
            small[0].all_gather(small)


def _import_deepspeed(worker: ProcessContext) -> ModuleType:
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if worker.device.type == "cuda" else "cpu")
    with collector_off():
        import deepspeed
        from deepspeed.ops import __compatible_ops__

    # An optional extension. Its build takes minutes, and a killed build leaves a lock that blocks later runs for ever.
    __compatible_ops__["deepspeed_shm_comm"] = False
    from deepspeed.runtime import torch_autocast

    # Process-wide globals: an earlier engine may have left its node group, and its autocast on.
    deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    deepspeed.utils.logger.setLevel("WARNING")
    return deepspeed


def sizes_of(module: nn.Module, blocks: ShardingUnits) -> Sizes:
    """Sizes of an unsharded module."""
    parameters = list(module.parameters())
    return Sizes(
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        layer=max(
            sum(parameter.numel() for parameter in layer.parameters())
            for layer in (*blocks.language_layers, *blocks.tower_layers)
        ),
        vector=max(parameter.numel() for parameter in parameters if parameter.ndim == 1),
    )
