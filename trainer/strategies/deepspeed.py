"""DeepSpeed ZeRO: optimizer state (1), gradients too (2). The engine's JSON is derived from the run file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainer.batches import RowBatch
from trainer.config import TrainConfig
from trainer.optim import build_optimizer, set_rates
from trainer.strategies.strategy import StepResult
from trainer.worker import Worker

LARGEST_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's default
TAG = "zero"  # one fixed folder name: which checkpoint this is, is said by COMMIT and not by DeepSpeed's `latest`
MODULE_FILE = f"{TAG}/mp_rank_00_model_states.pt"  # the weights, whole for stages 1 and 2


class Zero:
    """A `Strategy`."""

    checkpoint_format = "deepspeed"

    def __init__(self, config: TrainConfig, module: nn.Module, worker: Worker, *, stage: int) -> None:
        self._config, self._worker = config, worker
        deepspeed = _import_deepspeed(worker)
        micro_steps = config.global_batch_rows // (config.micro_batch_rows * worker.world_size)
        optimizer = build_optimizer(module, config.optimizer)
        trainable = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        settings = engine_settings(config, stage=stage, micro_steps=micro_steps, trainable=trainable)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, dist_init_required=False
        )
        self._micro_steps = micro_steps

    def forward_backward(self, batches: Sequence[RowBatch], total_label_tokens: int) -> Tensor:
        # The engine divides by ranks and by its count of micro-steps; the loss is a sum over both: multiply by these.
        scale = self._worker.world_size * self._micro_steps / total_label_tokens
        loss_sum = torch.zeros((), device=self._worker.device)
        for number, batch in enumerate(batches, start=1):
            # The boundary is ours to say: an epoch's last step may have fewer micro-batches than the engine counts.
            self._engine.set_gradient_accumulation_boundary(number == len(batches))
            loss = self._engine(**batch.to(self._worker.device))
            self._engine.backward(loss * scale)
            loss_sum += loss.detach()
            if number < len(batches):
                self._engine.step()  # only counts: the update is at the boundary, in `step`
        return loss_sum / total_label_tokens

    def step(self, rate_factor: float) -> StepResult:
        set_rates(self._optimizer, rate_factor)
        self._engine.step()
        return StepResult(self._engine.get_global_grad_norm())

    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def snapshot(self, folder: Path, group: ProcessGroup) -> Callable[[], None]:
        # The engine's own save talks to the other ranks throughout: it cannot run beside training.
        self._engine.save_checkpoint(folder, tag=TAG, save_latest=False, exclude_frozen_parameters=True)
        return lambda: None

    def load(self, folder: Path) -> None:
        path, _ = self._engine.load_checkpoint(folder, tag=TAG, load_module_strict=False)
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")


def engine_settings(config: TrainConfig, *, stage: int, micro_steps: int, trainable: int) -> dict[str, Any]:
    """DeepSpeed's configuration. Every value that its defaults would set behind our back is named."""
    bucket_elements = min(LARGEST_BUCKET_ELEMENTS, trainable)  # allocated whole, however small the model is
    settings: dict[str, Any] = {
        "train_batch_size": config.global_batch_rows,
        "train_micro_batch_size_per_gpu": config.micro_batch_rows,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": config.clip_grad_norm,  # left out, DeepSpeed clips at 1.0
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket_elements,
            "allgather_bucket_size": bucket_elements,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,  # our metrics are the log
        "wall_clock_breakdown": False,
    }
    if config.precision == "bf16":
        # fp32 weights under autocast: ZeRO's own bf16 mode rounds the weights and drifts ten times further.
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return settings


def _import_deepspeed(worker: Worker) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if worker.device.type == "cuda" else "cpu")
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    # Optional; its build takes minutes, and a killed build leaves a lock on which every later run waits for ever.
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("WARNING")
    return deepspeed
