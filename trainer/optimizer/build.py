"""AdamW with parameter groups, and the learning-rate schedule as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from vlmpipe.trainer.config.optimizer import OptimizerConfig
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.models.layers.freeze import part_of
from vlmpipe.trainer.models.loss.chunked_loss import trained_rows_of
from vlmpipe.trainer.optimizer.adamw_8bit import AdamW8bit
from vlmpipe.trainer.sizing.optimizer_state import fits_8_bits

PLACES = {"projector": 1, "tower": 2}  # of the parts that may have a rate of their own, among the groups


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters. Matrices decay; biases, norms and embeddings of one dimension do not, nor do
    embeddings and heads of which only some rows are trained: the others would shrink.

    Each group keeps its peak rate as `peak_rate`; `set_rates` scales it. Parameters that lie on different sets of ranks
    are in groups of their own: torch cannot update such together.
    """
    wants_8_bits = config.name == "adamw_8bit"
    own_rates = (0.0, config.projector_learning_rate, config.tower_learning_rate)
    in_rows = {id(layer.weight) for layer in module.modules() if trained_rows_of(layer) is not None}
    groups: dict[tuple[int, bool, str, int], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            # Whatever the rates: ZeRO cuts its state by groups, and a run that resumes may have other rates.
            place = PLACES.get(part_of(name), 0)
            bits = 8 if wants_8_bits and fits_8_bits(name, parameter.shape) else 32
            shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves a partitioned parameter empty
            decays = len(shape) >= 2 and id(parameter) not in in_rows
            kind = (place, decays, str(getattr(parameter, "device_mesh", "")), bits)
            groups.setdefault(kind, []).append(parameter)
    described = []
    for (place, decays, _, bits), parameters in sorted(groups.items()):
        rate = own_rates[place] or config.learning_rate
        decay = config.weight_decay if decays else 0.0
        described.append({"params": parameters, "lr": rate, "peak_rate": rate, "weight_decay": decay})
        if wants_8_bits:
            described[-1]["state_bits"] = bits
    if wants_8_bits:
        return AdamW8bit(described, betas=config.betas, eps=config.eps)
    # One pass over memory instead of a dozen, and no temporaries, on GPUs and on processors. torch brings it along;
    # DeepSpeed's own would have to be compiled on the machine.
    return torch.optim.AdamW(described, betas=config.betas, eps=config.eps, fused=True)


def rate_factor(config: TrainConfig, step: int, total_steps: int) -> float:
    """Share of the peak learning rate at `step` (from 0): linear warm-up, then the schedule down to the final share.

    Times `rate_scale`, where the run file has the rates follow the global batch.

    wsd (warm-up, stable, decay; Hu et al. 2024, arXiv 2404.06395) falls by 1 - sqrt(share of its decay that is over),
    which Haegele et al. 2024 (arXiv 2405.18392) found better than a line.
    """
    warmup_steps = config.num_warmup_steps(total_steps)
    if step < warmup_steps:
        return config.rate_scale * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    match config.lr_schedule:
        case "constant":
            falling = 1.0
        case "linear":
            falling = 1.0 - progress
        case "cosine":
            falling = 0.5 * (1.0 + math.cos(math.pi * progress))
        case "wsd":
            decay_steps = min(math.ceil(config.decay_fraction * total_steps), total_steps - warmup_steps)
            steps_in_decay = step - (total_steps - decay_steps)
            falling = 1.0 - math.sqrt(steps_in_decay / decay_steps) if steps_in_decay > 0 else 1.0
    return config.rate_scale * (config.final_rate_fraction + (1.0 - config.final_rate_fraction) * falling)


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set every group's rate to `factor` of its peak. Returns the common group's rate, for the metrics."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_rate"] * factor
    return float(optimizer.param_groups[0]["lr"])
