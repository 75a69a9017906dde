"""The form of a Cloud Run service that serves a model: vLLM with a GPU, and the model's buckets mounted read-only.

The comments of run_v2 (google-cloud-run 0.16.2) and Google's pages name the rules; `vlmpipe.config.sections.cloud_run`
has the numbers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from google.cloud.run_v2 import types as api

from vlmpipe.config.sections.cloud_run import load_cloud_run
from vlmpipe.config.sections.deploy import PORT, DeployConfig

BUCKETS = "/buckets"  # each bucket has a folder of its name here; /dev, /proc and /sys are not allowed
PROBE_PERIOD_S, PROBE_TIMEOUT_S = 10, 5
MAX_REVISION_CHARS = 63
_ADDRESS = re.compile(r"(.*?)gs://([^/]+)(.*)", re.DOTALL)  # what an argument ends with


@dataclass(frozen=True)
class Instance:
    """Settings of a service's revisions besides their model. Empty texts: Cloud Run's own default."""

    deploy: DeployConfig
    service_account: str
    encryption_key: str
    labels: Mapping[str, str]

    def template(self, run_id: str, arguments: Sequence[str]) -> api.RevisionTemplate:
        """The template of the revision that serves a run's model by vLLM with these arguments.

        Addresses under gs:// in them become folders of mounted buckets: an instance has no disk but its memory. The
        revision is named by its content, so that a repeated step finds it.
        """
        deploy, limits = self.deploy, load_cloud_run()
        assert deploy.cloud_run, "checked by the caller"
        gpu = limits.gpus[deploy.accelerator_type]
        cpu, memory_gib = deploy.cloud_run.size(gpu)
        local, buckets = mounted(arguments)
        names = {bucket: f"bucket-{number}" for number, bucket in enumerate(buckets)}
        container = api.Container(
            image=deploy.image_uri,
            args=local,
            env=[api.EnvVar(name=name, value=value) for name, value in deploy.environment.items()],
            resources=api.ResourceRequirements(
                limits={"cpu": str(cpu), "memory": f"{memory_gib}Gi", "nvidia.com/gpu": "1"},
                cpu_idle=False,  # a GPU asks for billing by the instance's life
                startup_cpu_boost=True,
            ),
            ports=[api.ContainerPort(container_port=PORT)],
            startup_probe=api.Probe(
                http_get=api.HTTPGetAction(path="/health", port=PORT),
                period_seconds=PROBE_PERIOD_S,
                timeout_seconds=PROBE_TIMEOUT_S,
                failure_threshold=limits.startup_s // PROBE_PERIOD_S,
            ),
            volume_mounts=[
                api.VolumeMount(name=name, mount_path=f"{BUCKETS}/{bucket}") for bucket, name in names.items()
            ],
        )
        template = api.RevisionTemplate(
            labels=dict(self.labels),
            scaling=api.RevisionScaling(max_instance_count=deploy.max_replicas),
            service_account=self.service_account,
            containers=[container],
            volumes=[
                # gcsfuse shows folders that no object stands for only so
                api.Volume(
                    name=name,
                    gcs=api.GCSVolumeSource(bucket=bucket, read_only=True, mount_options=["implicit-dirs"]),
                )
                for bucket, name in names.items()
            ],
            execution_environment=api.ExecutionEnvironment.EXECUTION_ENVIRONMENT_GEN2,
            encryption_key=self.encryption_key,
            max_instance_request_concurrency=deploy.cloud_run.concurrency,
            node_selector=api.NodeSelector(accelerator=gpu.accelerator),
            gpu_zonal_redundancy_disabled=not deploy.cloud_run.zonal_redundancy,
        )
        template.revision = _revision(deploy.endpoint, run_id, template)
        return template


def mounted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with folders in place of addresses under gs://, and the buckets that they need."""
    local, buckets = [], dict[str, None]()
    for argument in arguments:
        if match := _ADDRESS.fullmatch(argument):
            before, bucket, path = match.groups()
            buckets[bucket] = None
            argument = f"{before}{BUCKETS}/{bucket}{path.rstrip('/')}"
        local.append(argument)
    return local, list(buckets)


def _revision(service: str, run_id: str, template: api.RevisionTemplate) -> str:
    """A name that begins with the service's and a dash, as Cloud Run asks."""
    content = api.RevisionTemplate.pb(template).SerializeToString(deterministic=True)
    name = f"{service}-{hashlib.sha256(run_id.encode() + content).hexdigest()[:12]}"
    assert len(name) <= MAX_REVISION_CHARS, name  # 49 characters of a service's name
    return name
