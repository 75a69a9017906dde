"""TrainJobs made from job specs."""

from __future__ import annotations

from typing import Any

from vlmpipe.config.sections.kubeflow import KubeflowConfig, TolerationConfig, VolumeConfig
from vlmpipe.job_spec.parse import parse_job_spec
from vlmpipe.platforms.kubeflow.jobs.manifest import train_job

RUN_URI = "gs://bucket/runs/r"
IMAGE = "registry.example.com/vlmpipe/trainer:1"
PLACEMENT = KubeflowConfig(
    service_account="trainer",
    queue="team-queue",
    node_selector={"cloud.google.com/gke-accelerator": "nvidia-l4"},
    tolerations=(TolerationConfig(key="team", value="vision", effect="NoSchedule"),),
    cpus=7.5,
    memory_gib=24.0,
)


STORED = PLACEMENT.model_copy(
    update={
        "s3_endpoint": "http://minio.example.com:9000",
        "secret_env": {"AWS_ACCESS_KEY_ID": "minio/accesskey", "AWS_SECRET_ACCESS_KEY": "minio/secretkey"},
        "volumes": (VolumeConfig(claim="team-data", mount_path="/mnt/team"),),
    }
)


def pools(*counts: float, gpus: int = 0, **container: Any) -> list[dict[str, Any]]:
    args = ["--nproc-per-node", str(max(1, gpus)), "--", "vlmpipe.trainer.train", "--config", f"{RUN_URI}/run.json"]
    machine = {"machine_type": "g2-standard-24" if gpus else "n1-standard-8"}
    if gpus:
        machine |= {"accelerator_type": "NVIDIA_L4", "accelerator_count": float(gpus)}  # as a compiled pipeline has it
    spec = {"image_uri": IMAGE, "command": ["python", "-m", "vlmpipe.trainer.launch"], "args": args, **container}
    return [{"machine_spec": machine, "replica_count": count, "container_spec": spec} for count in counts]


def made(worker_pools: list[dict[str, Any]], placement: KubeflowConfig = PLACEMENT, **spec: Any) -> dict[str, Any]:
    job = parse_job_spec({"worker_pool_specs": worker_pools, "scheduling": {"timeout": "3600s"}, **spec})
    return train_job("digits-train-12345678", job, placement, labels={"vlmpipe-step": "train"}, run_uri=RUN_URI)
