"""For every rule about job specs one that breaks it alone, beside one that just does not."""

from __future__ import annotations

from typing import Any

from tests.support.pipelines.job_spec_container_cases import CONTAINER_CASES, RAY, variable
from tests.support.pipelines.job_specs import (
    ABSENT,
    CLUSTER,
    CONTAINER,
    CPU,
    DISK,
    EIGHT,
    IMAGE,
    MACHINE,
    MEGA,
    NETWORK,
    ONE,
    P0,
    P1,
    P2,
    PACKAGE,
    REDUCED,
    TPU,
    Case,
    Spec,
    a100,
    pool,
    reducers,
    started,
)

COUNT, GPU = f"{MACHINE}.accelerator_count", f"{MACHINE}.accelerator_type"
ONE_GPU = {"machine_type": "a2-highgpu-1g", "accelerator_type": "NVIDIA_TESLA_A100", "accelerator_count": 1}
RESTART = "scheduling.restart_job_on_worker_restart"
AFFINITY, PEERING = f"{MACHINE}.reservation_affinity", "psc_interface_config.dns_peering_configs"
ATTACHED = {"psc_interface_config.network_attachment": "a"}


def reservation(zone: str = "us-central1-a") -> Spec:
    return {
        "reservation_affinity_type": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": [f"projects/example-project/zones/{zone}/reservations/mine"],
    }


def peering(domain: str = "corp.internal.") -> Spec:
    return {"domain": domain, "target_project": "example-project", "target_network": "training"}


def nfs(mount_point: str = "data") -> Spec:
    return {"server": "10.0.0.2", "path": "/share", "mount_point": mount_point}


def lustre() -> Spec:
    return {"instance_ip": "10.0.0.3", "volume_handle": "v", "filesystem": "scratch", "mount_point": "data"}


CASES = [
    Case("VP101", {f"{P0}.use_spot": True}, {"scheduling.strategy": "SPOT"}),
    Case("VP101", {f"{DISK}.persistent_disk_size_gb": 500}, {f"{DISK}.boot_disk_size_gb": 500}),
    Case("VP101", {f"{P0}.network": NETWORK}, {"network": NETWORK}),
    Case("VP101", {"enable_webaccess": True}, {"enable_web_access": True}),
    Case("VP101", {"display_name": "job"}, {"experiment": "projects/1/locations/r/metadataStores/default/contexts/e"}),
    Case(
        "VP101",
        {f"{CONTAINER}.image_uri": ABSENT, f"{P0}.container_uri": IMAGE},
        {f"{CONTAINER}.image_uri": IMAGE},
    ),
    Case(
        "VP101",
        {f"{MACHINE}.machine_type": ABSENT, f"{P0}.machine_type": "a2-highgpu-8g"},
        {f"{MACHINE}.machine_type": "a2-highgpu-8g"},
    ),
    Case("VP101", {f"{P0}.replica_count": ABSENT, f"{P0}.replicas": 1}, {f"{P0}.replica_count": 1}),
    Case("VP101", {"timeout": "60s", "scheduling": ABSENT}, {"scheduling.timeout": "60s"}),
    Case(
        "VP101",
        {f"{CONTAINER}.env": [{"name": "A", "value_from": {"secret": "s"}}]},
        {f"{CONTAINER}.env": variable("A", "b")},
    ),
    Case("VP102", {"enableWebAccess": True}, {"enable_web_access": True}),
    Case("VP102", {DISK: {"bootDiskSize_gb": 200}}, {DISK: {"boot_disk_size_gb": 200}}),
    Case("VP103", {f"{CONTAINER}.args": "--seed 1"}, {f"{CONTAINER}.args": ["--seed", "1"]}),
    Case("VP103", {f"{CONTAINER}.env": [{"name": "A", "value": 1}]}, {f"{CONTAINER}.env": variable("A", "1")}),
    Case("VP103", {"enable_web_access": "true"}, {"enable_web_access": False}),
    Case("VP104", {COUNT: 4.5}, {COUNT: 8}),
    Case("VP104", {f"{P0}.replica_count": "one"}, {f"{P0}.replica_count": "1"}),
    Case("VP104", {f"{DISK}.boot_disk_size_gb": True}, {f"{DISK}.boot_disk_size_gb": 100}),
    Case("VP105", {COUNT: 8.0}, {COUNT: 8}),
    Case("VP105", {f"{DISK}.boot_disk_size_gb": "200"}, {f"{P0}.replica_count": 1.0}),
    Case("VP106", {"scheduling.strategy": "SPOTTY"}, {"scheduling.strategy": "SPOT"}),
    Case("VP106", {"scheduling.strategy": "spot"}, {"scheduling.strategy": "STANDARD"}),
    Case("VP106", {GPU: "NVIDIA_A100"}, {GPU: "NVIDIA_TESLA_A100"}),
    Case("VP107", {"scheduling.strategy": "LOW_COST"}, {"scheduling.strategy": "SPOT"}),
    Case("VP108", {"scheduling.timeout": "24h"}, {"scheduling.timeout": "86400s"}),
    Case("VP108", {"scheduling.timeout": 3600}, {"scheduling.timeout": "3600.5s"}),
    Case("VP110", {f"{CONTAINER}.env": {"A": "b"}}, {f"{CONTAINER}.env": variable("A", "b")}),
    Case("VP110", {f"{CONTAINER}.env": ["A=b"]}, {f"{CONTAINER}.env": []}),
    Case("VP110", {f"{CONTAINER}.env": [{"value": "b"}]}, {f"{CONTAINER}.env": [{"name": "A"}]}),
    Case(
        "VP111",
        {f"{CONTAINER}.env": [{"name": f"A{index}", "value": "b"} for index in range(101)]},
        {f"{CONTAINER}.env": [{"name": f"A{index}", "value": "b"} for index in range(100)]},
    ),
    Case("VP112", {"worker_pool_specs": a100()}, {"worker_pool_specs": [a100()]}),
    Case("VP201", {"worker_pool_specs": []}, {}),
    Case("VP201", {"worker_pool_specs": ABSENT}, {}),
    Case("VP202", {"worker_pool_specs": [a100()] * 5}, {"worker_pool_specs": [a100()] * 4}),
    Case("VP203", {f"{P0}.replica_count": 4}, {P1: a100(3)}),
    Case("VP203", {P0: {}}, {}),
    Case("VP203", {f"{P0}.replica_count": 0}, {f"{P0}.replica_count": 1}),
    Case("VP204", {P1: {}, f"{P2}": a100()}, {f"{P2}": a100()}, base=CLUSTER),
    Case("VP204", {f"{P1}.replica_count": 0}, {f"{P1}.replica_count": 1}, base=CLUSTER),
    Case("VP205", {f"{P0}.python_package_spec": PACKAGE}, {}),
    Case("VP205", {CONTAINER: ABSENT}, {CONTAINER: ABSENT, f"{P0}.python_package_spec": PACKAGE}, base=CPU),
    Case("VP206", {MACHINE: ABSENT}, {MACHINE: {"machine_type": "n1-standard-8"}}),
    Case("VP207", {P1: reducers()}, {P1: a100(), P2: reducers()}),
    Case("VP207", {P0: reducers() | {"replica_count": 1}, P1: a100(4)}, {P1: a100(4), P2: reducers()}),
    Case("VP208", {f"{P2}.machine_spec.accelerator_type": "NVIDIA_TESLA_T4"}, {}, base=REDUCED),
    Case("VP208", {f"{P2}.container_spec.command": ["python"]}, {f"{P2}.container_spec.command": []}, base=REDUCED),
    Case("VP208", {f"{P2}.container_spec.args": ["-v"]}, {f"{P2}.container_spec.args": []}, base=REDUCED),
    Case(
        "VP209",
        {f"{P2}.machine_spec.machine_type": "n1-standard-16"},
        {f"{P2}.machine_spec.machine_type": "n2-highcpu-16"},
        base=REDUCED,
    ),
    Case("VP210", {P1: {}}, {f"{P1}.replica_count": 1}, base=REDUCED),
    Case("VP210", {f"{P1}.replica_count": 0}, {f"{P1}.replica_count": 7}, base=REDUCED),
    Case("VP211", {P2: reducers()}, {}, base=MEGA),
    Case("VP212", {P1: pool("n1-standard-8"), P2: reducers()}, {P1: pool("n1-standard-8")}, base=CPU),
    Case("VP213", {P1: pool("n1-standard-8")}, {}, base=TPU),
    Case("VP214", {f"{CONTAINER}.command": ["python", "-m", "vlmpipe.trainer.launch"]}, {}, base=TPU),
    Case("VP214", {f"{CONTAINER}.command": ["sh", "-c", "python -m vlmpipe.trainer.train"]}, {}, base=TPU),
    Case("VP214", {MACHINE: {"machine_type": "ct6e-standard-8t"}}, {MACHINE: {"machine_type": "n1-standard-8"}}),
    Case("VP215", {f"{P2}.replica_count": 2}, {f"{P2}.replica_count": 13}, base=REDUCED),
    Case("VP215", {f"{P2}.replica_count": 12}, {f"{P2}.replica_count": 12, f"{P1}.replica_count": 2}, base=REDUCED),
    Case("VP216", started("python", "train.py"), started("python", "-m", "torch.distributed.run", *EIGHT, "train.py")),
    Case("VP216", started("/opt/bin/python3", "-u", "-m", "t.task"), started("deepspeed", "train.py")),
    Case(
        "VP216",
        started("bash", "-c", "cd /app && torchrun t.py"),
        started("bash", "-c", "torchrun --nproc_per_node=8 t.py"),
    ),
    Case(
        "VP216",
        started("bash", "-c", "python -m pip install deepspeed accelerate && python train.py"),
        started("bash", "-c", "pip install -r requirements.txt && accelerate launch train.py"),
    ),
    Case("VP216", started("torchrun", "--nproc_per_node=4", "train.py"), started("accelerate", "launch", "train.py")),
    Case("VP216", started(), started("/app/start.sh")),
    Case("VP216", started("deepspeed", "--num_gpus=4", "t.py"), started("deepspeed", "--num_gpus=8", "t.py")),
    Case(
        "VP216",
        started("accelerate", "launch", "--num_machines=4", "--num_processes", "8", "t.py"),
        started("accelerate", "launch", "--config_file=c.yaml", "--num_processes", "32", "t.py"),
        base={**CLUSTER, "worker_pool_specs": [a100(), a100(3)]},
    ),
    Case(
        "VP216",
        {CONTAINER: ABSENT, f"{P0}.python_package_spec": PACKAGE | {"args": ["--epochs", "3"]}},
        {
            CONTAINER: ABSENT,
            f"{P0}.python_package_spec": PACKAGE
            | {"python_module": "vlmpipe.trainer.launch", "args": ["--epochs", "3"], "executor_image_uri": RAY},
        },
    ),
    Case("VP216", started("python", "train.py"), started("python", "-m", "deepspeed.launcher.runner", "train.py")),
    Case(
        "VP216",
        {CONTAINER: ABSENT, f"{P0}.python_package_spec": PACKAGE},
        {CONTAINER: ABSENT, f"{P0}.python_package_spec": PACKAGE, MACHINE: {"machine_type": "n1-standard-8"}},
    ),
    Case(
        "VP217",
        started("torchrun", *EIGHT, "--nnodes=2", "train.py"),
        started("torchrun", *EIGHT, "--nnodes=4", "train.py"),
        base=CLUSTER,
    ),
    Case(
        "VP217",
        started("torchrun", *EIGHT, "--nnodes=4", "--node_rank", "1", "train.py"),
        started("bash", "-c", "torchrun --nproc_per_node='8' --nnodes=\"$NNODES\" --node_rank $RANK train.py"),
        base=CLUSTER,
    ),
    Case(
        "VP217",
        {f"{P1}.container_spec.command": ["torchrun", *EIGHT, "--nnodes=2", "--node_rank=0", "train.py"]},
        {
            **started("torchrun", *EIGHT, "--nnodes=2", "--node_rank=0", "train.py"),
            f"{P1}.container_spec.command": ["torchrun", *EIGHT, "--nnodes=2", "--node_rank=1", "train.py"],
        },
        base={**CLUSTER, "worker_pool_specs": [a100(), a100()]},
    ),
    Case(
        "VP217",
        started("deepspeed", "--num_gpus=8", "train.py"),
        started("deepspeed", "--num_gpus=8", "--hostfile=h", "train.py"),
        base=CLUSTER,
    ),
    Case(
        "VP217",
        started("torchrun", *EIGHT, "train.py"),
        started("torchrun", "train.py") | {f"{CONTAINER}.env": variable("PET_NNODES", "4")},
        base=CLUSTER,
    ),
    Case(
        "VP217",
        {f"{P1}.container_spec.command": ["accelerate", "launch", "--num_machines=4", "--machine_rank=0", "t.py"]},
        started("accelerate", "launch", "--num_machines", "4", "t.py"),
        base=CLUSTER,
    ),
    Case(
        "VP217",
        started("torchrun", *EIGHT, "--nnodes=4", "--master_addr=10.0.0.2", "train.py"),
        started("torchrun", *EIGHT, "--nnodes=1:4", "--rdzv-backend=c10d", "train.py"),
        base=CLUSTER,
    ),
    Case(
        "VP218",
        {f"{P1}.container_spec.command": [], f"{P1}.container_spec.args": [], f"{P1}.machine_spec": ONE_GPU},
        {f"{P1}.container_spec.command": [], f"{P1}.container_spec.args": ["--a"], f"{P1}.machine_spec": ONE_GPU},
        base=CLUSTER,
    ),
    Case("VP301", {f"{MACHINE}.machine_type": "a2-highgpu-3g"}, {f"{MACHINE}.machine_type": "a2-highgpu-8g"}),
    Case("VP301", {f"{MACHINE}.machine_type": "n1standard8"}, {}, base=CPU),
    Case("VP302", {f"{MACHINE}.machine_type": "c9d-standard-8"}, {}, base=CPU),
    Case(
        "VP303",
        {f"{MACHINE}.machine_type": "n1-highmem-16"},
        {MACHINE: {"machine_type": "n1-highmem-16", "accelerator_type": "NVIDIA_TESLA_T4", "accelerator_count": 4}},
    ),
    Case("VP304", {COUNT: 4}, {COUNT: 4, f"{MACHINE}.machine_type": "a2-highgpu-4g"}),
    Case("VP305", {COUNT: ABSENT}, {}),
    Case("VP306", {GPU: ABSENT}, {}),
    Case("VP307", {COUNT: ABSENT, GPU: ABSENT}, {}),
    Case("VP308", {}, {MACHINE: {"machine_type": "n1-standard-8"}}, region="africa-south1"),
    Case(
        "VP309",
        {MACHINE: pool("a4x-highgpu-4g", "NVIDIA_GB200", 4)["machine_spec"]},
        {
            MACHINE: pool("a4x-highgpu-4g", "NVIDIA_GB200", 4)["machine_spec"]
            | {
                "reservation_affinity": {
                    "reservation_affinity_type": "SPECIFIC_RESERVATION",
                    "key": "k",
                    "values": ["v"],
                }
            }
        },
    ),
    Case("VP310", {f"{DISK}.boot_disk_type": "hyperdisk-balanced"}, {f"{DISK}.boot_disk_type": "pd-ssd"}),
    Case("VP310", {f"{DISK}.boot_disk_type": "pd-sdd"}, {f"{DISK}.boot_disk_type": "pd-standard"}, base=CPU),
    Case("VP311", {f"{DISK}.boot_disk_size_gb": 99}, {f"{DISK}.boot_disk_size_gb": 100}),
    Case("VP311", {f"{DISK}.boot_disk_size_gb": 64001}, {f"{DISK}.boot_disk_size_gb": 64000}),
    Case(
        "VP312",
        {AFFINITY: {"reservation_affinity_type": "SPECIFIC_RESERVATION"}},
        {AFFINITY: {"reservation_affinity_type": "ANY_RESERVATION"}},
    ),
    Case("VP312", {AFFINITY: reservation() | {"key": ""}}, {AFFINITY: reservation()}),
    Case("VP313", {AFFINITY: reservation("us-east1-b")}, {AFFINITY: reservation()}, region="us-central1"),
    Case(
        "VP314",
        {AFFINITY: reservation(), "scheduling.strategy": "SPOT"},
        {AFFINITY: {"reservation_affinity_type": "NO_RESERVATION"}, "scheduling.strategy": "SPOT"},
    ),
    Case(
        "VP314",
        {AFFINITY: {"reservation_affinity_type": "ANY_RESERVATION"}, "scheduling.strategy": "FLEX_START"},
        {AFFINITY: {"reservation_affinity_type": "ANY_RESERVATION"}, "scheduling.strategy": "STANDARD"},
    ),
    Case(
        "VP315",
        {f"{MACHINE}.gpu_partition_size": "1g.5gb"},
        {f"{MACHINE}.gpu_partition_size": "1g.5gb", f"{MACHINE}.machine_type": "a2-highgpu-1g", COUNT: 1},
    ),
    Case("VP401", {"scheduling.strategy": "SPOT"}, {"scheduling.strategy": "STANDARD"}, base=TPU),
    Case("VP402", {"scheduling.strategy": "FLEX_START"}, {"scheduling.strategy": "SPOT"}, base=CPU),
    Case(
        "VP402",
        {"scheduling.strategy": "FLEX_START", MACHINE: pool("n1-standard-8", "NVIDIA_TESLA_V100", 1)["machine_spec"]},
        {"scheduling.strategy": "FLEX_START"},
    ),
    Case("VP403", {"scheduling.strategy": "FLEX_START"}, {"scheduling.strategy": "SPOT"}, base=REDUCED),
    Case(
        "VP403",
        {"scheduling.strategy": "FLEX_START", P1: pool("a2-highgpu-4g", "NVIDIA_TESLA_A100", 4)},
        {"scheduling.strategy": "FLEX_START"},
        base=CLUSTER,
    ),
    Case(
        "VP404",
        {"scheduling.strategy": "FLEX_START", "scheduling.timeout": "604801s"},
        {"scheduling.strategy": "FLEX_START", "scheduling.timeout": "604800s"},
    ),
    Case(
        "VP405",
        {"scheduling.max_wait_duration": "3600s"},
        {"scheduling.max_wait_duration": "3600s", "scheduling.strategy": "FLEX_START"},
    ),
    Case("VP406", {"scheduling.disable_retries": True}, {"scheduling.disable_retries": True, RESTART: False}),
    Case("VP407", {RESTART: ABSENT}, {RESTART: True}, base=CLUSTER),
    Case("VP407", {RESTART: False, "scheduling.strategy": "SPOT"}, {"scheduling.strategy": "SPOT"}, base=CLUSTER),
    Case(
        "VP408",
        {"persistent_resource_id": "projects/p/locations/l/persistentResources/a"},
        {"persistent_resource_id": "a"},
    ),
    Case(
        "VP409",
        {"persistent_resource_id": "a", "scheduling.strategy": "SPOT"},
        {"persistent_resource_id": "a", "scheduling.strategy": "STANDARD"},
    ),
    Case("VP501", {"network": NETWORK, "psc_interface_config.network_attachment": "a"}, {"network": NETWORK}),
    Case("VP502", {"network": "projects/example-project/global/networks/default"}, {"network": NETWORK}),
    Case(
        "VP503",
        {"network": NETWORK, "reserved_ip_ranges": ["10.0.0.0/16"]},
        {"network": NETWORK, "reserved_ip_ranges": ["vertex-range"]},
    ),
    Case(
        "VP504",
        {"network": NETWORK, f"{CONTAINER}.env": variable("WANDB_PROJECT", "vlm")},
        {"network": NETWORK, f"{CONTAINER}.env": variable("WANDB_MODE", "offline")},
    ),
    Case(
        "VP504",
        {"psc_interface_config.network_attachment": "a", f"{CONTAINER}.args": ["--report_to", "wandb"]},
        {f"{CONTAINER}.args": ["--report_to", "wandb"]},
    ),
    Case(
        "VP504",
        {"network": NETWORK, f"{CONTAINER}.env": variable("HF_HUB_ENABLE_HF_TRANSFER", "1")},
        {"network": NETWORK, f"{CONTAINER}.env": variable("HF_HUB_OFFLINE", "1")},
    ),
    Case("VP505", {"service_account": ABSENT}, {}),
    Case("VP505", {"service_account": ""}, {}),
    Case(
        "VP506",
        {"reserved_ip_ranges": ["vertex-range"], "psc_interface_config.network_attachment": "a"},
        {"reserved_ip_ranges": ["vertex-range"], "network": NETWORK},
    ),
    Case("VP507", {**ATTACHED, PEERING: [peering("corp.internal")]}, {**ATTACHED, PEERING: [peering()]}),
    Case("VP507", {**ATTACHED, PEERING: [peering() | {"target_network": ""}]}, {**ATTACHED, PEERING: []}),
    Case("VP508", {PEERING: [peering()]}, {**ATTACHED, PEERING: [peering()]}),
    Case("VP509", {f"{P0}.nfs_mounts": [nfs()]}, {f"{P0}.nfs_mounts": [nfs()], "network": NETWORK}),
    Case("VP509", {f"{P0}.lustre_mounts": [lustre()]}, {f"{P0}.lustre_mounts": [lustre()], **ATTACHED}),
    Case(
        "VP510",
        {f"{P0}.nfs_mounts": [nfs("/mnt/nfs/data")], **ATTACHED},
        {f"{P0}.nfs_mounts": [nfs("data")], **ATTACHED},
    ),
    Case(
        "VP510",
        {f"{P0}.nfs_mounts": [nfs() | {"path": "share"}], **ATTACHED},
        {f"{P0}.nfs_mounts": [nfs() | {"path": "/share"}], **ATTACHED},
    ),
    Case(
        "VP510",
        {f"{P0}.lustre_mounts": [lustre() | {"volume_handle": ""}], **ATTACHED},
        {f"{P0}.lustre_mounts": [lustre()], **ATTACHED},
    ),
    Case(
        "VP511",
        {f"{P0}.nfs_mounts": [nfs(), nfs()], **ATTACHED},
        {f"{P0}.nfs_mounts": [nfs(), nfs("other")], f"{P0}.lustre_mounts": [lustre()], **ATTACHED},
    ),
    *CONTAINER_CASES,
]

# What is no CustomJobSpec at all cannot be made by changing one.
WHOLE: list[tuple[str, Any, Any]] = [
    ("VP109", {"display_name": "job", "job_spec": ONE}, ONE),
    ("VP109", ONE["worker_pool_specs"], ONE),
]
