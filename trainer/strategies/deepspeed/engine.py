"""DeepSpeed ZeRO: shards optimizer state (stage 1), gradients (2) and weights (3).

The engine's JSON is derived from the run file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.dataloading.batches import MicroBatches, PackedBatch
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.hooks.feature import WeightsAverage
from vlmpipe.trainer.hooks.table import average_of
from vlmpipe.trainer.models.attention.mixers import BY_SAMPLE
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.optimizer.build import build_optimizer, set_rates
from vlmpipe.trainer.sizing.deepspeed_config import Sizes, engine_settings, laid_over, node_weights, offloading
from vlmpipe.trainer.strategies.base import SavedFiles, StepResult
from vlmpipe.trainer.strategies.deepspeed.linear_regather import recompute_gathered_linear
from vlmpipe.trainer.strategies.deepspeed.values import require_values
from vlmpipe.trainer.strategies.deepspeed.zero_init import partition_by_part
from vlmpipe.trainer.strategies.mixed_precision import LossScale
from vlmpipe.trainer.strategies.torch_base import host_stager, second_names

if TYPE_CHECKING:
    from torch import nn

TAG = "zero"  # one fixed folder name: COMMIT identifies the checkpoint, not DeepSpeed's `latest`
MODULE_FILE = f"{TAG}/mp_rank_00_model_states.pt"  # the weights, whole for stages 1 and 2
SHAPES_FILE = f"{TAG}/zero_pp_rank_0_mp_rank_00_model_states.pt"  # stage 3: the layout of the partitions
EMA_FILE = f"{TAG}/ema_rank_{{rank}}.pt"  # averages of a rank's partitions, in their order
PARTITION_FILE = f"{TAG}/zero_pp_rank_{{rank}}_mp_rank_00_optim_states.pt"


class Zero:
    """A `Strategy`."""

    checkpoint_format = "deepspeed"

    def __init__(
        self, config: TrainConfig, module: nn.Module, blocks: ShardingUnits, worker: ProcessContext, *, stage: int
    ) -> None:
        self._config, self._worker, self._stage = config, worker, stage
        deepspeed = _import_deepspeed(worker)
        if stage == 3:
            recompute_gathered_linear(module)
            for part in module.modules():  # gathered once, however often it calls its parts for a rank's samples
                if getattr(part, BY_SAMPLE, False):
                    deepspeed.utils.set_z3_leaf_module(part, True)
        data_parallel = worker.world_size // config.context_parallel
        micro_steps = config.global_batch_size // (config.micro_batch_size * data_parallel)
        settings = engine_settings(config, stage=stage, micro_steps=micro_steps, sizes=sizes_of(module, blocks))
        settings["zero_optimization"] |= offloading(config, on_gpu=worker.device.type == "cuda")
        of_node = node_weights(config, nodes=worker.num_nodes, node_ranks=worker.local_world_size)
        settings["zero_optimization"] |= of_node
        self.settings = laid_over(settings, config.deepspeed)
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
        if config.precision == "bf16":
            self._begin_from(initial_weights)
        del initial_weights
        self._micro_steps = micro_steps
        self.loss_scale = LossScale(config.precision)
        # DeepSpeed's own scaler clips before it divides by the scale, and stays on after an earlier fp16 engine of
        # this process.
        self._engine.optimizer.torch_autocast_gradscaler = None
        from vlmpipe.trainer.strategies.deepspeed.checkpoint_files import HeldFiles

        self._files = HeldFiles(host_stager(on_gpu=worker.device.type == "cuda"))
        self._engine.checkpoint_engine = self._files
        self._engine._copy_recovery_script = self._files.written(self._engine._copy_recovery_script)
        self._leave_out_frozen_copies(module)
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
        # The engine's save is collective, so it runs here; its files are written later.
        state = self.loss_scale.state()
        self._engine.save_checkpoint(folder, TAG, client_state=state, save_latest=False, exclude_frozen_parameters=True)
        if self._ema:
            self._files.save(self._ema.averages, str(folder / self._ema_file))
        return self._files.take()

    def reads(self, files: SavedFiles) -> dict[str, list[tuple[int, int]]]:
        """The weights, of which stage 3 has a file for each rank, and the partition and averages of this rank.

        DeepSpeed wants to see the files of all ranks, and opens these.
        """
        rank_files = (MODULE_FILE, self._ema_file)
        prefix = f"zero_pp_rank_{self._worker.rank}_mp_rank_"
        sizes = files.sizes_bytes.items()
        return {file: [(0, size)] for file, size in sizes if file in rank_files or prefix in file}

    def load(self, folder: Path) -> None:
        clip_grad_norm = self._engine.optimizer.clip_grad
        groups = [_settings_of(group) for group in self._optimizer.param_groups]
        path, state = self._engine.load_checkpoint(folder, tag=TAG, load_module_strict=False)
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")
        # DeepSpeed has put back rates, decay, betas and the clip of the start that saved.
        self._engine.optimizer.clip_grad = clip_grad_norm
        for group, settings in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(settings)
        for name in self.loss_scale.state().keys() & state.keys():  # another precision's checkpoint has none
            self.loss_scale.restore(state[name])
        if self._ema:
            self._load_average(self._ema, folder / self._ema_file)

    @property
    def _ema_file(self) -> str:
        return EMA_FILE.format(rank=self._worker.rank)

    def _leave_out_frozen_copies(self, module: nn.Module) -> None:
        """Save no frozen weight under its second name, such as a tied head's: DeepSpeed leaves out the first only."""
        copies = [name for name in second_names(module) if not module.get_parameter(name).requires_grad]
        saved = self._engine.module_state_dict

        def module_state_dict(*arguments: Any, **settings: Any) -> dict[str, Any]:
            return {name: value for name, value in saved(*arguments, **settings).items() if name not in copies}

        self._engine.module_state_dict = module_state_dict

    def _load_average(self, ema: WeightsAverage, file: Path) -> None:
        if not file.exists():
            ema.restart("the checkpoint")
            return
        for average, saved in zip(ema.averages, torch.load(file, map_location="cpu", weights_only=True), strict=True):
            average.copy_(saved)

    def _partitions(self) -> list[Tensor]:
        """This rank's flat fp32 weights, one tensor a parameter group."""
        optimizer = self._engine.optimizer
        # The names of stage 3, of stages 1 and 2, and of stage 1 with precision bf16, an engine of its own.
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        return list(next(getattr(optimizer, name) for name in names if hasattr(optimizer, name)))

    @torch.no_grad()
    def _begin_from(self, initial_weights: Mapping[nn.Parameter, Tensor]) -> None:
        """Give the masters the fp32 weights that training begins with, of stage 3 this rank's slices: DeepSpeed takes
        them from the bf16 copies."""
        parameter: Any  # with DeepSpeed's methods
        for parameter, weight in initial_weights.items():
            if self._stage < 3:
                parameter.set_full_hp_param(weight)
                continue
            part, _ = self._engine.optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)
            part[: weight.numel()].copy_(weight)  # the last rank's is padded

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


def _settings_of(group: Mapping[str, object]) -> dict[str, object]:
    """A parameter group's rates, decay, betas and the like."""
    return {name: value for name, value in group.items() if name != "params"}


def _import_deepspeed(worker: ProcessContext) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if worker.device.type == "cuda" else "cpu")
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
