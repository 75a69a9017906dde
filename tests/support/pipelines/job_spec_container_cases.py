"""Specs that break rules about images, environments and words of containers: VP6xx and VP7xx."""

from __future__ import annotations

from typing import Any

from tests.support.pipelines.job_specs import (
    ABSENT,
    BUILT,
    CONTAINER,
    CPU,
    DIGEST,
    HEX_KEY,
    HUB_TOKEN,
    IMAGE,
    MACHINE,
    MEGA,
    MEGA_ONE,
    P0,
    P1,
    P2,
    PACKAGE,
    RANDOM_SECRET,
    REDUCED,
    ULTRA,
    Case,
    Spec,
)

V100 = {"machine_type": "n1-standard-8", "accelerator_type": "NVIDIA_TESLA_V100", "accelerator_count": 1}
RAY = "us-docker.pkg.dev/vertex-ai/training/ray-cpu.2-47.py311:latest"


def variable(name: str, value: str) -> list[dict[str, str]]:
    return [{"name": name, "value": value}]


def package(**changes: Any) -> Spec:
    return {CONTAINER: ABSENT, f"{P0}.python_package_spec": PACKAGE | changes}


def wheel(tag: str) -> list[str]:
    return [f"gs://example-bucket/mine-1.0-{tag}.whl"]


CONTAINER_CASES = [
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
        {f"{CONTAINER}.args": ["--data=$DATA"]},
        {f"{CONTAINER}.command": [], f"{CONTAINER}.args": ["-c", "torchrun --nproc_per_node gpu t.py --data=$DATA"]},
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
        {f"{CONTAINER}.env": [*variable("NCCL_CROSS_NIC", "0"), *variable("NCCL_P2P_DISABLE", "0")]},
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
