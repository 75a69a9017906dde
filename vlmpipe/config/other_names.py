"""Names that a run file does not have: other tools' names of its fields, fields that are gone, and guides' words."""

from __future__ import annotations

# Names of single keys, wherever they stand.
OTHER_NAMES = {
    "lr": "learning_rate",
    "batch_size": "global_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "num_train_epochs": "epochs",
    "max_grad_norm": "clip_grad_norm",
    "gradient_checkpointing": "activation_checkpointing",
    "vit_gradient_checkpointing": "tower_activation_checkpointing",
    "warmup_ratio": "warmup_fraction",
    "max_seq_length": "sequence_length",
    "num_nodes": "replica_count",
    "gpus": "accelerator_count",
    "vision_tower": "tower",
    "llm": "language_model",
    "lr_scheduler_type": "lr_schedule",
    "gradient_accumulation_steps": "global_batch_size",
    "api_key": "api_key_secret",
}
# Words of guides to training on several GPUs for what is set elsewhere, otherwise, or not at all: the last part of a
# key, and what answers it.
WORDS = {
    "spot": "cluster.scheduling_strategy: spot",
    "use_spot": "cluster.scheduling_strategy: spot",
    "preemptible": "cluster.scheduling_strategy: spot, which took the place of preemptible machines",
    "persistent_disk_size_gb": "a job has a boot disk alone, which ends with it (cluster.boot_disk_size_gb); "
    "checkpoints go to output.root_uri while training runs",
    "parameter_servers": "train.trainer.roles.ps, for a training program of one's own; the trainer here has none",
    "max_restarts": "cluster.restart_job_on_worker_restart restarts the whole job on Vertex AI; here it is "
    "vlmpipe run --retries N",
    "sharding_strategy": "train.strategy: fsdp, or hsdp within nodes",
    "hybrid_shard": "train.strategy: hsdp",
    "full_shard": "train.strategy: fsdp, or zero3",
    "shard_grad_op": "train.strategy: zero2",
    "horovod": "train.strategy: ddp; a program under Horovod is a train.trainer (recipes/horovod)",
    "data_parallel": "leave it out: it is the number of ranks divided by tensor_parallel, pipeline_parallel and "
    "context_parallel",
    "scheduler": "train.lr_schedule, with train.warmup_steps or train.warmup_fraction",
    "fp16": "train.precision: fp16; bf16 on A100 and newer GPUs",
    "bf16": "train.precision: bf16",
    "num_workers": "data.loader_threads, the threads of a rank that prepare images; data.workers is of data "
    "preparation",
    "find_unused_parameters": "leave it out: which parameters are trained is known (model.freeze, model.lora)",
    "bucket_cap_mb": "leave it out: DDP's buckets are torch's default; of ZeRO it is "
    "train.deepspeed.zero_optimization.reduce_bucket_size, in elements",
    "freeze_gc": "leave it out: garbage is collected between steps in every run",
    "local_port": "leave it out: replicas on this machine meet at a free port",
    "mirror_lag_warning_s": "leave it out: a mirror that lags is said after half an hour",
    "min_num_params": "leave it out: layers are FSDP's units, which suit every size",
}
_NODE_COPY = "train.deepspeed: {zero_optimization: {zero_hpz_partition_size: N}}, N the processes of a node"
# Fields that are gone (docs/decisions/0148), and what does their work.
GONE = {
    "train.powersgd": "train.gradient_compression: bf16, or train.reduce_dtype: bf16",
    "train.overlap_vision_encoder": "features.cache: on, by which a frozen encoder runs once",
    "train.zero_quantized_weights": f"{_NODE_COPY}; it rounds nothing",
    "train.zero_quantized_gradients": f"{_NODE_COPY}; it rounds nothing",
    "train.zero_hpz": _NODE_COPY,
    "train.nvme_path": "train.offload, which keeps that state in the machine's memory; plan says whether it fits",
    "plan.disk_gbytes_per_s": "train.offload: no state lies on a disk",
    "checkpoint.keep_best": "checkpoint.export: best, with train.validate_every_steps",
}
GONE_VALUES = {("train.gradient_compression", "powersgd"): "bf16, or train.reduce_dtype: bf16"}
# Words of guides for values.
VALUES = {
    ("train.offload", "nvme"): "optimizer, or optimizer+weights",
    ("train.strategy", "hybrid_shard"): "hsdp",
    ("train.strategy", "full_shard"): "fsdp, or zero3",
    ("train.strategy", "shard_grad_op"): "zero2",
    ("train.strategy", "no_shard"): "ddp",
    ("train.strategy", "deepspeed"): "zero1, zero2 or zero3",
    ("train.strategy", "horovod"): "ddp; a program under Horovod is a train.trainer (recipes/horovod)",
    ("train.strategy", "parameter_server"): "ddp; a program with parameter servers is a train.trainer "
    "(recipes/parameter-server)",
    ("features.cache", "true"): "on",
    ("features.cache", "false"): "off",
}


def word_of_guides(path: str) -> str:
    """Answer to a key that guides use, or that is gone; empty for others."""
    if instead := GONE.get(path):
        return f"it is gone, use {instead}"
    return WORDS.get(path.rpartition(".")[2].lower().replace("-", "_"), "")


def other_value(path: str, value: object) -> str:
    """ "; it is X here" for a guide's word for a value, what to use for one that is gone, or nothing."""
    if instead := GONE_VALUES.get((path, str(value))):
        return f"; it is gone, use {instead}"
    known = VALUES.get((path, str(value).lower()))
    return f"; it is {known} here" if known else ""
