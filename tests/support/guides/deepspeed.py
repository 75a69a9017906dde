"""DeepSpeed configurations in the forms of public guides: their mistakes, not their texts."""

from __future__ import annotations

from typing import Any


def _deepspeed(stage: int, **fields: Any) -> dict[str, Any]:
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 500000000}
    return {"zero_optimization": zero | fields.pop("zero", {}), **fields}


ADAMW = {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 1000, "total_num_steps": 100000},
}
FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
DEEPSPEED = {
    "A2.2-zero2": _deepspeed(
        2,
        train_batch_size=128,
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=4,
        fp16=FP16,
        optimizer=ADAMW,
        scheduler=DECAY,
        gradient_clipping=1.0,
        steps_per_print=10,
        zero={"allgather_partitions": True, "allgather_bucket_size": 5e8, "reduce_scatter": True},
    ),
    "A2.3-zero3": _deepspeed(
        3,
        train_batch_size=64,
        train_micro_batch_size_per_gpu=1,
        bf16={"enabled": True},
        zero={
            "stage3_prefetch_bucket_size": 5e8,
            "stage3_param_persistence_threshold": 1e6,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    ),
    "A5.2-arr-coc": _deepspeed(
        2,
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=2,
        fp16={"enabled": True},
        zero={"offload_optimizer": {"device": "none"}},
    ),
    "B4.3-preemptible": _deepspeed(
        2, train_batch_size=256, checkpoint={"tag_validation": "Warn", "load_universal": False}, fp16={"enabled": True}
    ),
    "B6.3-arr-coc": _deepspeed(
        2,
        train_batch_size=256,
        train_micro_batch_size_per_gpu=8,
        gradient_accumulation_steps=1,
        scheduler=DECAY,
        optimizer=ADAMW,
        bf16={"enabled": True},
        gradient_clipping=1.0,
    ),
    "E2.2-zero2-vlm": _deepspeed(
        2,
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
        bf16={"enabled": "auto"},
        zero={"offload_optimizer": {"device": "none"}, "allgather_bucket_size": 2e8},
    ),
    "E3.1-zero3-offload": _deepspeed(
        3,
        train_micro_batch_size_per_gpu=2,
        bf16={"enabled": True},
        zero={
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "sub_group_size": 1e9,
        },
    ),
    "E4.2-pipeline": _deepspeed(
        1,
        train_batch_size=32,
        pipeline={"stages": 4, "partition_method": "parameters", "stage_to_device_map": {"0": [0, 1], "1": [2, 3]}},
    ),
    "E6.3-zeropp": _deepspeed(
        3,
        bf16={"enabled": True},
        zero={"zero_quantized_weights": True, "zero_hpz_partition_size": 8, "zero_quantized_gradients": True},
    ),
    "E8.2-nvme": _deepspeed(
        3,
        train_micro_batch_size_per_gpu=1,
        fp16={"enabled": True},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        zero={"offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4}},
        aio={"block_size": 1048576, "queue_depth": 8},
        wall_clock_breakdown=False,
    ),
}
