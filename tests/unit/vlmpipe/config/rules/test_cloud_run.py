"""The section deploy.cloud_run: what Cloud Run refuses is refused in words, before anything is trained."""

from __future__ import annotations

import pytest

from tests.fakes.cloud_run.rules import GPUS, MEMORY_GIB
from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.config.sections.cloud_run import CloudRunConfig, load_cloud_run
from vlmpipe.pipelines.check import check_run
from vlmpipe.planner.cost.quotas import serving_quotas
from vlmpipe.platforms.table import platform_of
from vlmpipe.trainer.errors import ConfigError

IMAGE = f"us-docker.pkg.dev/my-project/serving/vllm@sha256:{'1' * 64}"
USUAL = {"deploy.endpoint": "digits", "deploy.image_uri": IMAGE, "deploy.cloud_run": "{}"}
ON_VERTEX = [
    "gcp.project=my-project", "gcp.pipeline_root=gs://bucket/runs", "output.root_uri=gs://bucket/runs",
    f"gcp.pipeline_image={IMAGE}", f"cluster.image_uri={IMAGE}",
    "gcp.service_account=a@my-project.iam.gserviceaccount.com",
]  # fmt: skip


def config(*overrides: str, run_file: str = "digits") -> RunConfig:
    given = USUAL | dict(override.split("=", 1) for override in overrides)
    return load_run_file(ROOT / f"configs/{run_file}.yaml", [f"{field}={value}" for field, value in given.items()])


def refused(*overrides: str, run_file: str = "digits") -> str:
    with pytest.raises(ConfigError) as caught:
        config(*overrides, run_file=run_file)
    return caught.value.text()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("deploy.accelerator_type=NVIDIA_H100_80GB", "expected NVIDIA_L4 or NVIDIA_RTX_PRO_6000"),
        ("deploy.accelerator_count=2", "expected 1: an instance has one GPU"),
        ("gcp.location=us-east1", "found us-east1 with deploy.cloud_run, expected one of asia-south1"),
        ("deploy.cloud_run={cpu: 6}", "found 6, expected 4 or 8 with NVIDIA_L4"),
        ("deploy.cloud_run={memory_gib: 15}", "found 15, expected 16 to 32 with NVIDIA_L4 and 8 vCPUs"),
        ("deploy.cloud_run={cpu: 4, memory_gib: 32}", "found 32, expected 16 with NVIDIA_L4 and 4 vCPUs"),
        ("deploy.cloud_run={concurrency: 1001}", "concurrency"),
        ("deploy.machine_type=g2-standard-8", "an instance has deploy.cloud_run.cpu and memory_gib"),
        ("deploy.min_replicas=0; deploy.idle_minutes=30", "itself decides when an idle"),
        ("deploy.shared_memory_size_mb=1024", "mounts nothing at /dev/shm"),
        (f"deploy.endpoint={'d' * 40}", "found 40 characters, expected at most 39"),
        ("deploy.env={PORT: '1'}", "deploy.env.PORT: Cloud Run sets it itself"),
        ("register.serving={image_uri: " + IMAGE + "}", "found with register.serving, a container of Vertex AI"),
    ],
)
def test_what_cloud_run_refuses_is_refused_in_words(override: str, words: str) -> None:
    assert words in refused(*override.split("; "))


def test_an_adapter_needs_its_base_in_a_bucket_that_an_instance_can_mount() -> None:
    adapter = ["model.lora.export=adapter", "model.lora.rank=16", "model.freeze=[tower, projector]"]
    assert "each start would fetch it into memory" in refused(*adapter, run_file="qwen2-5-vl-3b-lora")


def test_an_instance_has_the_gpus_own_size_unless_it_is_set() -> None:
    gpu = load_cloud_run().gpus["NVIDIA_L4"]
    assert CloudRunConfig().size(gpu) == (8, 32)
    assert CloudRunConfig(cpu=4).size(gpu) == (4, 16)
    assert CloudRunConfig(cpu=8, memory_gib=24).size(gpu) == (8, 24)
    assert config("deploy.accelerator_type=NVIDIA_RTX_PRO_6000").deploy


def test_the_table_of_gpus_is_the_strict_servers() -> None:
    """Read apart from each other: a size or a region of one of them alone would be a typing error."""
    of_name = {gpu.accelerator: gpu for gpu in load_cloud_run().gpus.values()}
    assert {name: (min(gpu.cpus), gpu.min_memory_gib, set(gpu.regions)) for name, gpu in of_name.items()} == GPUS
    assert dict(of_name["nvidia-l4"].cpus) == {cpu: MEMORY_GIB[cpu] for cpu in (4, 8)}


def test_vertex_takes_a_registry_in_a_bucket_with_it_and_kubeflow_refuses_it() -> None:
    vertex = platform_of("vertex")
    vertex.check(config(*ON_VERTEX, "register.registry=gs://bucket/registry"))
    with pytest.raises(ConfigError, match="the service mounts the registered model"):
        vertex.check(config(*ON_VERTEX, "register.registry="))
    with pytest.raises(ConfigError, match=r"deploy\.cloud_run: found, expected none"):
        platform_of("kubeflow").check(config(*ON_VERTEX, "register.registry=gs://bucket/registry"))


def test_check_warns_of_an_older_driver_and_of_regions_by_invitation_and_needs_no_quota_of_endpoints() -> None:
    def warned(*overrides: str) -> str:
        return " ".join(finding.text for finding in check_run(config(*overrides)) if finding.subject == "deploy")

    assert "driver for NVIDIA_L4 is of CUDA 12.2" in warned() and "by invitation only" in warned()
    newer = warned("deploy.accelerator_type=NVIDIA_RTX_PRO_6000", "deploy.min_replicas=0")
    assert "driver" not in newer and "by invitation" not in newer
    assert "questions wait or are refused" in newer and "v1beta1" not in newer
    assert serving_quotas(config()) == {}
