"""Job listings, DeepSpeed configurations and settings in the forms of public guides: their mistakes, not their texts.

A..E are five guides to training on several GPUs; the number is the section that has such a listing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

A100 = {"machine_type": "a2-highgpu-8g", "accelerator_type": "NVIDIA_TESLA_A100", "accelerator_count": 8}
REDUCER = {"imageUri": "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"}
OLD_IMAGE = "gcr.io/my-project/trainer:latest"
NEW_IMAGE = "us-central1-docker.pkg.dev/my-project/vlm/trainer:latest"


def _pool(replicas: int = 1, machine: Mapping[str, Any] = A100, **container: Any) -> dict[str, Any]:
    return {
        "machine_spec": dict(machine),
        "replica_count": replicas,
        "container_spec": {"image_uri": OLD_IMAGE, **container},
    }


def _reducers(replicas: int) -> dict[str, Any]:
    return {
        "machine_spec": {"machine_type": "n1-highcpu-16"},
        "replica_count": replicas,
        "container_spec": {"image_uri": REDUCER["imageUri"]},
    }


def _spec(*pools: Any, **fields: Any) -> str:
    return json.dumps({"worker_pool_specs": list(pools), **fields})


def _env(**values: str) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]


TRAIN = ["--deepspeed=ds_config.json", "--data_path=gs://my-bucket/data", "--output_dir=gs://my-bucket/out"]
WANDB_KEY = "local" + "0123456789abcdef0123456789abcdef012345"  # of the form of a key

LISTINGS = {
    "A1.1-flat-pools": """
worker_pool_specs:
- {machine_type: n1-highmem-16, accelerator_type: NVIDIA_TESLA_A100, accelerator_count: 8, replica_count: 1}
- {machine_type: n1-highmem-16, accelerator_type: NVIDIA_TESLA_A100, accelerator_count: 8, replica_count: 3}
- {machine_type: n1-highcpu-16, replica_count: 4,
   container_uri: us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest}
""",
    "A2.5-custom-job": _spec(_pool(args=TRAIN), _pool(3, args=TRAIN), _reducers(2)),
    "A3.3-fsdp": _spec(
        _pool(
            4,
            args=["--fsdp_sharding_strategy=FULL_SHARD", "--model_name=Qwen/Qwen2.5-VL-7B-Instruct"],
            env=_env(NCCL_DEBUG="INFO", NCCL_IB_DISABLE="0"),
        )
    ),
    "A4.5-megatron": _spec(
        _pool(
            4,
            args=[
                "--tensor-model-parallel-size",
                "8",
                "--data-parallel-size",
                "4",
                "--micro-batch-size",
                "4",
                "--global-batch-size",
                "128",
                "--train-iters",
                "1000",
            ],
            env=_env(NCCL_IB_DISABLE="0"),
        )
    ),
    "A5.3-sdk": f"""
from google.cloud import aiplatform
aiplatform.init(project="my-project", location="us-central1", staging_bucket="gs://my-bucket")
job = aiplatform.CustomJob(
    display_name="arr-coc-training",
    worker_pool_specs=[{{
        "machine_spec": {json.dumps(A100)}, "replica_count": 1,
        "container_spec": {{"image_uri": "{OLD_IMAGE}", "command": ["python", "train.py"],
                           "args": ["--config", "config.yaml", f"--deepspeed={{'ds_config.json'}}"]}}}}],
)
job.run(sync=False)
""",
    "A5.4-spot": """
displayName: arr-coc-spot
jobSpec:
  workerPoolSpecs:
  - machineSpec: {machineType: a2-highgpu-8g, acceleratorType: NVIDIA_TESLA_A100, acceleratorCount: 8}
    replicaCount: 1
    useSpot: true
    containerSpec: {imageUri: gcr.io/my-project/arr-coc:latest, args: [--save_steps=500]}
  scheduling: {timeout: 86400s, restartJobOnWorkerRestart: true}
""",
    "B1.1-chief-and-workers": f"""
worker_pool_specs = [
    {{"machine_spec": {json.dumps(A100)}, "replica_count": 1,
      "container_spec": {{"image_uri": "{OLD_IMAGE}", "command": ["python", "train.py"], "args": ["--role=chief"]}}}},
    {{"machine_spec": {json.dumps(A100)}, "replica_count": 3,
      "container_spec": {{"image_uri": "{OLD_IMAGE}", "command": ["python", "train.py"], "args": ["--role=worker"]}}}},
]
""",
    "B1.3-parameter-servers": _spec(
        _pool(command=["python", "train.py"]),
        _pool(2, command=["python", "train.py"]),
        {
            "machine_spec": {"machine_type": "n1-highmem-16"},
            "replica_count": 2,
            "container_spec": {"image_uri": OLD_IMAGE, "command": ["python", "ps.py"]},
        },
    ),
    "B1.4-with-reducers": _spec(
        _pool(command=["python", "train.py"]), _pool(3, command=["python", "train.py"]), _reducers(4)
    ),
    "B2.1-vpc": _spec(
        _pool(2, args=TRAIN)
        | {"network": "projects/my-project/global/networks/my-vpc", "reserved_ip_ranges": ["10.0.0.0/16"]}
    ),
    "B2.2-peering": _spec(_pool(2, args=TRAIN) | {"network": "projects/my-project/global/networks/default"}),
    "B2.3-shared-vpc": _spec(_pool(2, args=TRAIN) | {"network": "projects/host-project/global/networks/shared"}),
    "B3.1-persistent-disk": _spec(
        _pool(args=TRAIN)
        | {
            "disk_spec": {
                "boot_disk_type": "pd-ssd",
                "boot_disk_size_gb": 200,
                "persistent_disk_type": "pd-ssd",
                "persistent_disk_size_gb": 1000,
            }
        }
    ),
    "B4.1-preemptible": """
display_name: preemptible-training
job_spec:
  worker_pool_specs:
  - machine_spec: {machine_type: a2-highgpu-8g, accelerator_type: NVIDIA_TESLA_A100, accelerator_count: 8, spot: true}
    replica_count: 4
    container_spec: {image_uri: gcr.io/my-project/trainer:latest, args: [--save_steps=500, --preemption_safe]}
  scheduling: {restart_job_on_worker_restart: true}
""",
    "B5.4-environment": _spec(_pool(4, args=TRAIN, env=_env(WANDB_API_KEY=WANDB_KEY, DATA="gs://my-bucket/data"))),
    "B6.2-arr-coc": _spec(
        _pool(args=TRAIN, env=_env(NCCL_IB_HCA="mlx5"))
        | {"disk_spec": {"bootDiskSize_gb": 500, "persistentDiskSizeGb": 1000}},
        _pool(3, args=["--deepspeed=ds_config.json"], env=_env(NCCL_IB_HCA="mlx5")),
        _reducers(2),
    ),
    "C1.1-torchrun": json.dumps(
        [
            _pool(
                machine={
                    "machine_type": "n1-standard-32",
                    "accelerator_type": "NVIDIA_TESLA_V100",
                    "accelerator_count": 4,
                },
                image_uri=NEW_IMAGE,
                command=["torchrun", "--nproc_per_node=4", "train.py"],
                args=["--epochs=10"],
            )
        ]
    ),
    "C1.2-two-nodes": json.dumps(
        [
            _pool(
                image_uri=NEW_IMAGE,
                command=[
                    "torchrun",
                    "--nnodes=2",
                    "--nproc_per_node=8",
                    "--node_rank=0",
                    "--master_addr=$MASTER_ADDR",
                    "--master_port=12355",
                    "train.py",
                ],
            ),
            _pool(
                image_uri=NEW_IMAGE,
                command=[
                    "torchrun",
                    "--nnodes=2",
                    "--nproc_per_node=8",
                    "--node_rank=1",
                    "--master_addr=$MASTER_ADDR",
                    "--master_port=12355",
                    "train.py",
                ],
            ),
        ]
    ),
    "C2.2-horovod": _spec(
        _pool(
            machine={"machine_type": "n1-standard-32", "accelerator_type": "NVIDIA_TESLA_V100", "accelerator_count": 4},
            image_uri=NEW_IMAGE,
            command=["horovodrun", "-np", "4", "python", "train_horovod.py"],
        )
    ),
    "C3.2-rpc-servers": _spec(
        _pool(
            2,
            machine={"machine_type": "n1-highmem-8"},
            image_uri=NEW_IMAGE,
            command=["python", "parameter_server.py", "--role=ps"],
        ),
        _pool(
            4,
            machine={"machine_type": "n1-standard-8", "accelerator_type": "NVIDIA_TESLA_T4", "accelerator_count": 1},
            image_uri=NEW_IMAGE,
            command=["python", "parameter_server.py", "--role=worker"],
        ),
    ),
    "C4.2-spot-torchrun": _spec(
        _pool(
            machine={"machine_type": "n1-standard-32", "accelerator_type": "NVIDIA_TESLA_V100", "accelerator_count": 4},
            image_uri=NEW_IMAGE,
            command=["torchrun", "train.py", "--checkpoint_dir=gs://my-bucket/ckpt"],
        )
        | {"spot": True},
        scheduling={"timeout": "86400s"},
    ),
    "C5.2-tuning": json.dumps(
        {
            "displayName": "hp-tuning",
            "maxTrialCount": 50,
            "parallelTrialCount": 5,
            "studySpec": {
                "metrics": [{"metricId": "val_loss", "goal": "MINIMIZE"}],
                "parameters": [
                    {
                        "parameterId": "learning_rate",
                        "scaleType": "UNIT_LOG_SCALE",
                        "doubleValueSpec": {"minValue": 1e-5, "maxValue": 1e-2},
                    }
                ],
            },
            "trialJobSpec": {
                "workerPoolSpecs": [
                    {
                        "machineSpec": {"machineType": "n1-standard-8", "acceleratorCount": 1},
                        "replicaCount": 1,
                        "containerSpec": {
                            "imageUri": NEW_IMAGE,
                            "command": ["python", "train.py"],
                            "args": ["--learning_rate={{learning_rate}}"],
                        },
                    }
                ]
            },
        }
    ),
    "C5.3-mixed-pools": _spec(
        {"machine_spec": {"machine_type": "a2-highgpu-1g"}, "replica_count": 1},
        {"machine_spec": {"machine_type": "a2-highgpu-1g"}, "replica_count": 4, "spot": True},
    ),
    "D3-python-package": """
from google.cloud import aiplatform
job = aiplatform.CustomPythonPackageTrainingJob(
    display_name="tf-mirrored", python_package_gcs_uri="gs://my-bucket/trainer-0.1.tar.gz",
    python_module_name="trainer.task", container_uri="us-docker.pkg.dev/vertex-ai/training/tf-gpu.2-13:latest")
job.run(replica_count=1, machine_type="n1-standard-16", accelerator_type="NVIDIA_TESLA_V100", accelerator_count=4,
        args=["--epochs=10", "--batch-size=64"])
""",
    "D4-multi-worker": f"""
from google.cloud import aiplatform
job = aiplatform.CustomContainerTrainingJob(display_name="multi-worker", container_uri="{NEW_IMAGE}",
                                            command=["python", "-m", "trainer.task"])
job.run(replica_count=4, machine_type="n1-standard-16", accelerator_type="NVIDIA_TESLA_V100", accelerator_count=8,
        args=["--lr", 0.001], environment_variables={{"NCCL_DEBUG": "INFO"}}, base_output_dir="gs://my-bucket/out")
""",
    "E8.3-ablations": _spec(_pool(4, args=["--deepspeed=ds_config_zero3.json", "--num_channels=20"]), _reducers(4)),
}


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

# Tuning jobs, in the forms of the service's own documentation: gcloud's file, the SDK, and the API's client.
SEARCHES = {
    "tuning.yaml": """
displayName: qwen-search
studySpec:
  metrics:
  - {metricId: val_loss, goal: minimize}
  - {metricId: latency, goal: MINIMIZE}
  parameters:
  - {parameterId: learning_rate, doubleValueSpec: {minValue: 1e-6, maxValue: 1e-4, defaultValue: 1e-5}, scaleType: log}
  - {parameterId: batch_size, discreteValueSpec: {values: [8, 4, 16, 16]}, scaleType: UNIT_LINEAR_SCALE}
  - {parameterId: lora_r, integerValueSpec: {minValue: "4", maxValue: "64"}}
  - {parameterId: lr_scheduler, categoricalValueSpec: {values: [cosine, linear, polynomial]}}
  - {parameterId: warmup_ratio, doubleValueSpec: {minValue: 0.0, maxValue: 3.0}}
  - parameterId: optimizer
    categoricalValueSpec: {values: [adam, sgd]}
    conditionalParameterSpecs:
    - parameterSpec: {parameterId: momentum, doubleValueSpec: {minValue: 0.1, maxValue: 0.9}}
      parentCategoricalValues: {values: [sgd]}
  algorithm: GRID_SEARCH
  measurementSelectionType: BEST_MEASUREMENT
  medianAutomatedStoppingSpec: {useElapsedDuration: true}
maxTrialCount: 20
parallelTrialCount: 40
maxFailedTrialCount: 5
trialJobSpec:
  workerPoolSpecs:
  - machineSpec: {machineType: a2-highgpu-8g, acceleratorType: NVIDIA_TESLA_A100, acceleratorCount: 8}
    replicaCount: 2
    containerSpec:
      imageUri: us-central1-docker.pkg.dev/my-project/vlm/trainer:1
      command: [bash, -c, torchrun --nproc_per_node=8 train.py]
      args: [--model_name_or_path, Qwen/Qwen2.5-VL-7B-Instruct, --epochs, "3", "--lr=${learning_rate}"]
""",
    "tuning.py": """
from google.cloud import aiplatform
from google.cloud.aiplatform import hyperparameter_tuning as hpt
pools = [{"machine_spec": {"machine_type": "n1-standard-8", "accelerator_type": "NVIDIA_TESLA_T4",
                           "accelerator_count": 1},
          "replica_count": 1,
          "container_spec": {"image_uri": IMAGE, "args": ["--epochs", "3"]}}]
job = aiplatform.CustomJob(display_name="trial", worker_pool_specs=pools)
search = aiplatform.HyperparameterTuningJob(
    display_name="hp-test", custom_job=job, metric_spec={"accuracy": "maximize"},
    parameter_spec={"lr": hpt.DoubleParameterSpec(min=1e-5, max=1e-3, scale="log"),
                    "units": hpt.IntegerParameterSpec(min=4, max=128, scale="linear"),
                    "batch_size": hpt.DiscreteParameterSpec([16, 32], "linear")},
    max_trial_count=12, parallel_trial_count=3, search_algorithm="random")
search.run()
""",
    "tuning_request.py": """
from google.cloud import aiplatform
hyperparameter_tuning_job = {
    "display_name": "request", "max_trial_count": 4, "parallel_trial_count": 2,
    "study_spec": {
        "metrics": [{"metric_id": "accuracy", "goal": aiplatform.gapic.StudySpec.MetricSpec.GoalType.MAXIMIZE}],
        "parameters": [{"parameter_id": "hidden_units", "integer_value_spec": {"min_value": 8, "max_value": 64}}]},
    "trial_job_spec": {"worker_pool_specs": [{
        "machine_spec": {"machine_type": "n1-standard-8",
                         "accelerator_type": aiplatform.gapic.AcceleratorType.NVIDIA_TESLA_T4, "accelerator_count": 1},
        "replica_count": 1,
        "python_package_spec": {"executor_image_uri": IMAGE, "package_uris": ["gs://my-bucket/trainer.tar.gz"],
                                "python_module": "trainer.task", "args": ["--epochs=3"]}}]}}
""",
}
for _name in ("tuning.py", "tuning_request.py"):
    SEARCHES[_name] = SEARCHES[_name].replace("IMAGE", f'"{NEW_IMAGE}"')
