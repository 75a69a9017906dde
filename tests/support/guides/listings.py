"""Job listings in the forms of public guides: their mistakes, not their texts.

A..E are five guides to training on several GPUs; the number is the section that has such a listing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.support.guides.settings import WANDB_KEY

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
