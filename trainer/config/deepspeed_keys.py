"""Keys of DeepSpeed's configuration that a run file may not set, and the fields that decide them."""

from __future__ import annotations

DECIDED_HERE = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size and micro_batch_size",
    "gradient_clipping": "train.clip_grad_norm",
    "optimizer": "train.optimizer",
    "scheduler": "train.lr_schedule",
    "fp16": "train.precision",
    "bf16": "train.precision",
    "amp": "train.precision",
    "torch_autocast": "train.precision",
    "data_types": "train.gradient_accumulation_dtype",
    "communication_data_type": "train.reduce_dtype",
    "activation_checkpointing": "train.activation_checkpointing",
    "zero_allow_untested_optimizer": "train.optimizer",
    "zero_force_ds_cpu_optimizer": "train.optimizer",
    "zero_optimization.stage": "train.strategy",
    "zero_optimization.zero_quantized_weights": "train.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients": "train.zero_quantized_gradients",
    "zero_optimization.zero_hpz_partition_size": "train.zero_hpz",
    "zero_optimization.offload_optimizer": "train.offload",
    "zero_optimization.offload_param": "train.offload",
}
