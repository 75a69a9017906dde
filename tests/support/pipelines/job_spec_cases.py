"""For every rule about job specs one that breaks it alone, beside one that just does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.pipelines.job_specs import (
    ABSENT,
    BUILT,
    CLUSTER,
    CONTAINER,
    CPU,
    DIGEST,
    DISK,
    EIGHT,
    HEX_KEY,
    HUB_TOKEN,
    IMAGE,
    MACHINE,
    MEGA,
    MEGA_ONE,
    NETWORK,
    ONE,
    P0,
    P1,
    P2,
    PACKAGE,
    RANDOM_SECRET,
    REDUCED,
    TPU,
    ULTRA,
    Spec,
    a100,
    pool,
    reducers,
    started,
)


@dataclass(frozen=True)
class Case:
    """Changes to `base` that break the rule `code` and no other, and changes close by that break none."""

    code: str
    broken: Mapping[str, Any]
    neighbour: Mapping[str, Any]
    base: Spec = field(default_factory=lambda: ONE)
    region: str = ""


V100 = {"machine_type": "n1-standard-8", "accelerator_type": "NVIDIA_TESLA_V100", "accelerator_count": 1}
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


def variable(name: str, value: str) -> list[dict[str, str]]:
    return [{"name": name, "value": value}]


RAY = "us-docker.pkg.dev/vertex-ai/training/ray-cpu.2-47.py311:latest"


def package(**changes: Any) -> Spec:
    return {CONTAINER: ABSENT, f"{P0}.python_package_spec": PACKAGE | changes}


def wheel(tag: str) -> list[str]:
    return [f"gs://example-bucket/mine-1.0-{tag}.whl"]


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
    Case("VP216", started("torchrun", "--nproc_per_node=4", "train.py"), started("accelerate", "launch", "train.py")),
    Case("VP216", started(), started("/app/start.sh")),
    Case("VP216", started("deepspeed", "--num_gpus=4", "t.py"), started("deepspeed", "--num_gpus=8", "t.py")),
    Case(
        "VP216",
        started("accelerate", "launch", "--num_processes", "8", "t.py"),
        started("accelerate", "launch", "--num_processes", "32", "t.py"),
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
        started("torchrun", *EIGHT, "--node_rank", "0", "train.py"),
        started("bash", "-c", "torchrun --nproc_per_node=8 --node_rank $RANK train.py"),
        base=CLUSTER,
    ),
    Case(
        "VP217",
        started("accelerate", "launch", "--machine_rank", "0", "t.py"),
        started("accelerate", "launch", "--num_machines", "4", "t.py"),
        base=CLUSTER,
    ),
    Case(
        "VP217",
        started("torchrun", *EIGHT, "--master_addr=10.0.0.2", "train.py"),
        started("torchrun", *EIGHT, "--rdzv-backend=c10d", "train.py"),
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
    Case("VP601", {f"{CONTAINER}.image_uri": ""}, {}),
    Case(
        "VP602",
        {f"{CONTAINER}.image_uri": "gcr.io/example-project/trainer:1"},
        {f"{CONTAINER}.image_uri": "gcr.io/ml-pipeline/google-cloud-pipeline-components:2.22.0"},
    ),
    Case(
        "VP603",
        {f"{CONTAINER}.image_uri": IMAGE.removesuffix(DIGEST) + ":latest"},
        {f"{CONTAINER}.image_uri": "us-docker.pkg.dev/vertex-ai/training/pytorch-gpu.2-4.py310:latest"},
    ),
    Case("VP604", {f"{CONTAINER}.image_uri": "pytorch/pytorch:2.7.0"}, {f"{CONTAINER}.image_uri": IMAGE}),
    Case(
        "VP605",
        {CONTAINER: ABSENT, f"{P0}.python_package_spec": PACKAGE | {"package_uris": []}},
        {CONTAINER: ABSENT, f"{P0}.python_package_spec": PACKAGE},
        base=CPU,
    ),
    Case(
        "VP606",
        {f"{CONTAINER}.image_uri": BUILT, MACHINE: V100},
        {f"{CONTAINER}.image_uri": BUILT, MACHINE: V100 | {"accelerator_type": "NVIDIA_TESLA_T4"}},
    ),
    Case("VP606", {f"{CONTAINER}.image_uri": BUILT, MACHINE: V100}, {MACHINE: V100}),
    Case(
        "VP701",
        {f"{CONTAINER}.env": variable("WANDB_API_KEY", HEX_KEY)},
        {f"{CONTAINER}.env": variable("WANDB_API_KEY_SECRET", "projects/p/secrets/wandb/versions/1")},
    ),
    Case(
        "VP702",
        {f"{CONTAINER}.env": variable("SETTING", HUB_TOKEN)},
        {f"{CONTAINER}.env": variable("SETTING", "hf_home")},
    ),
    Case(
        "VP702",
        {f"{CONTAINER}.env": variable("SETTING", RANDOM_SECRET)},
        {f"{CONTAINER}.env": variable("REVISION", HEX_KEY)},
    ),
    Case(
        "VP703",
        {f"{CONTAINER}.args": [f"--wandb-api-key={HEX_KEY}"]},
        {f"{CONTAINER}.args": ["--wandb-api-key-secret=projects/p/secrets/wandb/versions/1"]},
    ),
    Case(
        "VP703",
        {f"{CONTAINER}.args": ["--hf-token", "letmein2026"]},
        {f"{CONTAINER}.args": ["--pad-token", "<pad>", "--eos-token", "2", "--max-tokens", "4096"]},
    ),
    Case(
        "VP703",
        {f"{CONTAINER}.command": ["sh", "-c", f"export HF_TOKEN={HUB_TOKEN} && torchrun --nproc-per-node=8 train.py"]},
        {
            f"{CONTAINER}.command": [
                "sh",
                "-c",
                "export HF_TOKEN=$(cat /run/token) && torchrun --nproc-per-node=8 train.py",
            ]
        },
    ),
    Case(
        "VP704",
        {f"{CONTAINER}.args": ["--master_addr=$MASTER_ADDR"]},
        {
            f"{CONTAINER}.command": ["bash", "-c"],
            f"{CONTAINER}.args": ["torchrun --nproc_per_node gpu --master_addr=$MASTER_ADDR t.py"],
        },
    ),
    *(
        Case(
            "VP710",
            {f"{CONTAINER}.env": variable(name, value)},
            {f"{CONTAINER}.env": variable("NCCL_IB_DISABLE", "1")},
        )
        for name, value in (
            ("NCCL_NET_GDR_LEVEL", "5"),
            ("NCCL_CROSS_NIC", "1"),
            ("NCCL_SOCKET_IFNAME", "eth0"),
            ("NCCL_BUFFSIZE", "8388608"),
            ("NCCL_P2P_LEVEL", "NVL"),
        )
    ),
    Case(
        "VP710",
        {f"{CONTAINER}.env": variable("NCCL_P2P_DISABLE", "1")},
        {f"{CONTAINER}.env": variable("NCCL_CROSS_NIC", "0") + variable("NCCL_SOCKET_IFNAME", "eth0")},
        base=MEGA,
    ),
    Case("VP607", package(python_module="vlmpipe.trainer.external.launch"), package(), base=CPU),
    Case(
        "VP607",
        package(package_uris=["gs://b/vlmpipe-0.1.0-py3-none-any.whl"]),
        package(package_uris=["gs://b/vlmpipe-0.1.0-py3-none-any.whl"], executor_image_uri=RAY),
        base=CPU,
    ),
    Case(
        "VP607",
        package(package_uris=wheel("cp312-cp312-linux_x86_64")),
        package(package_uris=wheel("cp310-cp310-linux_x86_64")),
        base=CPU,
    ),
    Case(
        "VP607",
        package(package_uris=wheel("cp39-cp39-linux_x86_64")),
        package(package_uris=wheel("cp39-abi3-linux_x86_64")),
        base=CPU,
    ),
    Case(
        "VP608",
        package(executor_image_uri="us-docker.pkg.dev/vertex-ai/training/tf-gpu.2-17:latest"),
        package(executor_image_uri="us-docker.pkg.dev/vertex-ai/training/tf-gpu.2-17.py310:latest"),
        base=CPU,
    ),
    Case(
        "VP608",
        {f"{CONTAINER}.image_uri": "europe-docker.pkg.dev/vertex-ai/training/tf-gpu.2-13.py310:latest"},
        {f"{CONTAINER}.image_uri": "europe-docker.pkg.dev/vertex-ai/training/tf-cpu.2-8:latest"},
    ),
    Case(
        "VP705",
        {f"{CONTAINER}.args": ["--epochs", "{{$.inputs.parameters['epochs']}}"]},
        {f"{CONTAINER}.args": ["--epochs", "3", "--prompt", "about {{ question }}"]},
    ),
    Case(
        "VP709",
        {f"{CONTAINER}.args": ["--learning_rate={{learning_rate}}"]},
        {f"{CONTAINER}.args": ["--template={{ user }}: {{ text }}"]},
    ),
    Case("VP709", {f"{CONTAINER}.args": ["--rank", "{{ rank }}"]}, {f"{CONTAINER}.args": ["--rank", "16"]}),
    Case(
        "VP706",
        {f"{CONTAINER}.env": variable("WORLD_SIZE", "32")},
        {f"{CONTAINER}.env": variable("NCCL_DEBUG", "INFO")},
    ),
    Case(
        "VP707",
        {f"{CONTAINER}.env": variable("NCCL_IB_HCA", "mlx5_0,mlx5_1")},
        {f"{CONTAINER}.env": variable("NCCL_IB_DISABLE", "1")},
    ),
    Case(
        "VP707",
        {f"{CONTAINER}.env": variable("NCCL_PLUGIN_P2P", "ib")},
        {f"{CONTAINER}.env": variable("NCCL_DEBUG", "WARN")},
    ),
    Case(
        "VP707",
        {f"{CONTAINER}.env": variable("NCCL_NET", "IB")},
        {f"{CONTAINER}.env": variable("NCCL_NET", "Socket")},
    ),
    Case(
        "VP707",
        {f"{CONTAINER}.env": variable("FI_PROVIDER", "efa")},
        {f"{CONTAINER}.env": variable("NCCL_IB_QPS_PER_CONNECTION", "4")},
        base=ULTRA,
    ),
    Case(
        "VP707",
        {f"{P1}.container_spec.env": variable("NCCL_IB_GID_INDEX", "3")},
        {f"{P2}.container_spec.env": variable("NCCL_IB_GID_INDEX", "3")},  # reducers have no NCCL
        base=REDUCED,
    ),
    Case(
        "VP708",
        {f"{CONTAINER}.env": variable("NCCL_FASTRAK_USE_LLCM", "1")},
        {f"{CONTAINER}.env": variable("NCCL_NET", "gIB")},
        base=ULTRA,
    ),
    Case(
        "VP708",
        {f"{CONTAINER}.env": variable("NCCL_NET", "gIB")},
        {f"{CONTAINER}.env": variable("NCCL_FASTRAK_USE_LLCM", "1")},
        base=MEGA_ONE,
    ),
]

# What is no CustomJobSpec at all cannot be made by changing one.
WHOLE: list[tuple[str, Any, Any]] = [
    ("VP109", {"display_name": "job", "job_spec": ONE}, ONE),
    ("VP109", ONE["worker_pool_specs"], ONE),
]
