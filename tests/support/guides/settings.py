"""Settings and commands of other trainers in the forms of public guides: their mistakes, not their texts."""

from __future__ import annotations

WANDB_KEY = "local" + "0123456789abcdef0123456789abcdef012345"  # of the form of a key

SETTINGS = {
    "trl.yaml": """
model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct
dataset_name: my-team/receipts
dtype: bfloat16
use_peft: true
lora_r: 64
lora_alpha: 128
lora_target_modules: [q_proj, v_proj]
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_ratio: 0.03
max_length: 4096
num_train_epochs: 2
gradient_checkpointing: true
attn_implementation: flash_attention_2
report_to: wandb
output_dir: out
""",
    "llama_factory.yaml": """
model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct
image_max_pixels: 262144
stage: sft
do_train: true
finetuning_type: full
freeze_vision_tower: true
freeze_multi_modal_projector: false
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: my_receipts
template: qwen2_vl
cutoff_len: 4096
packing: true
val_size: 0.05
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_steps: 100
bf16: true
ddp_timeout: 180000000
overwrite_output_dir: true
plot_loss: true
output_dir: saves/qwen
""",
    "axolotl.yaml": """
base_model: Qwen/Qwen2.5-VL-7B-Instruct
processor_type: AutoProcessor
chat_template: qwen2_vl
datasets:
- {path: my-team/receipts, type: chat_template, split: "train[:1%]"}
val_set_size: 0.0
adapter: qlora
load_in_4bit: true
sequence_len: 8192
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: 'model.language_model.layers.[0-9]+.(mlp|self_attn).(up|down|q|k|v|o)_proj'
micro_batch_size: 1
gradient_accumulation_steps: 4
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
warmup_ratio: 0.1
bf16: true
fp16:
tf32: true
gradient_checkpointing: true
evals_per_epoch: 1
weight_decay: 0.0
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_transformer_layer_cls_to_wrap: Qwen2DecoderLayer, fsdp_offload_params: false}
""",
    "accelerate.yaml": """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD, fsdp_version: 1, fsdp_offload_params: false}
machine_rank: 0
mixed_precision: fp16
num_machines: 2
num_processes: 16
""",
    "trainer.json": """
{"per_device_train_batch_size": 4, "learning_rate": 5e-5, "optim": "adafactor", "fp16": true, "save_steps": 200,
 "lr_scheduler_type": "inverse_sqrt", "adam_beta2": 0.98, "num_train_epochs": 1.5, "label_smoothing_factor": 0.1}
""",
}

COMMANDS = {
    "torchrun": "NCCL_DEBUG=INFO torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=10.0.0.2 train.py "
    "--model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct --output_dir /tmp/out",
    "deepspeed": "deepspeed --num_gpus 8 train.py --deepspeed ds_config.json --lr 2e-5",
    "accelerate": "accelerate launch --num_processes 8 --mixed_precision bf16 sft_vlm.py --model_name_or_path "
    "Qwen/Qwen2.5-VL-7B-Instruct --use_peft --lora_r 16 --per_device_train_batch_size 2 --bf16",
    "horovodrun": "horovodrun -np 4 -H localhost:4 python train.py --epochs 3",
    "llama-factory": "llamafactory-cli train --stage sft --model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct "
    "--finetuning_type lora "
    "--lora_rank 8 --cutoff_len 2048 --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --fp16 True",
    "script": "#!/bin/bash\nset -e\nexport WANDB_API_KEY=" + WANDB_KEY + "\npip install -r requirements.txt\n"
    "python -m torch.distributed.run \\\n  --nproc_per_node 4 \\\n  -m trainer.task --epochs 3\n",
}
