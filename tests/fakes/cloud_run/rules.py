"""Rules of a Cloud Run service, each with the text that states it.

P: comments of run_v2's messages (google-cloud-run 0.16.2). D: Google's pages under docs.cloud.google.com/run/docs, read
in stored copies on 2026-11-30: GPUs (configuring/services/gpu), health checks (configuring/healthchecks), memory
(configuring/services/memory-limits), volumes (configuring/services/cloud-storage-volume-mounts), the container contract
(container-contract), quotas (run/quotas). T: the service's error in a public report,
https://github.com/PolicyEngine/policyengine-api/issues/3729.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.cloud.run_v2 import types as api
from google.cloud.run_v2.types import k8s_min

from vlmpipe.rehearsal.vertex.messages import fields_of

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # DNS_LABEL, RFC 1123
RESERVED = ("run.googleapis.com", "cloud.googleapis.com", "serving.knative.dev", "autoscaling.knative.dev")
# D, GPUs: smallest vCPUs and GiB, and the regions
GPUS = {
    "nvidia-l4": (
        4, 16, {"asia-southeast1", "asia-south1", "europe-west1", "europe-west4", "us-central1", "us-east4"},
    ),
    "nvidia-rtx-pro-6000": (20, 80, {"asia-southeast1", "asia-south2", "europe-west4", "us-central1"}),
}  # fmt: skip
MEMORY_GIB = {1: 4, 2: 8, 4: 16, 8: 32}  # D, memory: the most of so many vCPUs
GIB = re.compile(r"([1-9][0-9]*)Gi")


def problems(service: api.Service, region: str) -> Iterator[str]:
    """What is wrong with a service, as the API would refuse it."""
    template = service.template
    yield from _metadata(service)
    yield from _metadata(template)
    if service.invoker_iam_disabled:
        yield "service.invoker_iam_disabled: a model of this project is private"
    if len(template.containers) != 1:
        yield f"template.containers: {len(template.containers)}, expected the single container"  # P
        return
    (container,) = template.containers
    for rule in (_image, _ports, _variables, _resources, _startup):
        yield from rule(container, template)
    yield from _gpu(container, template, region)
    yield from _volumes(container, template)
    yield from _scaling(service, template)
    account = template.service_account
    if account and not re.fullmatch(r"[^@\s]+@[^@\s]+\.gserviceaccount\.com", account):  # P
        yield f"template.service_account: {account!r} is no e-mail address of a service account"


def _metadata(message: api.Service | api.RevisionTemplate) -> Iterator[str]:
    """P: labels and annotations of these namespaces are rejected."""
    for key in (*message.labels, *message.annotations):
        if key.partition("/")[0] in RESERVED:
            yield f"labels and annotations: {key} is of a reserved namespace"


def _image(container: k8s_min.Container, _: api.RevisionTemplate) -> Iterator[str]:
    if not container.image:  # P
        yield "container.image: required"


def _ports(container: k8s_min.Container, _: api.RevisionTemplate) -> Iterator[str]:
    """P: a single port, 0 < port < 65536, by http1 or h2c."""
    if len(container.ports) > 1:
        yield "container.ports: only a single port can be specified"
    for port in container.ports:
        if not 0 < port.container_port < 65536:
            yield f"container.ports: {port.container_port} is no TCP port"
        if port.name not in ("", "http1", "h2c"):
            yield f"container.ports: {port.name} is neither http1 nor h2c"


def _variables(container: k8s_min.Container, _: api.RevisionTemplate) -> Iterator[str]:
    """P: the lengths; D, container contract: Cloud Run sets some itself."""
    for variable in container.env:
        if variable.name in ("PORT", "K_SERVICE", "K_REVISION", "K_CONFIGURATION"):
            yield f"container.env: {variable.name} is reserved"
        if not variable.name or len(variable.name) > 32768 or len(variable.value.encode()) > 32768:
            yield "container.env: a name of 1 to 32768 characters, a value of at most 32768 bytes"
    names = [variable.name for variable in container.env]
    if len(names) != len(set(names)):
        yield "container.env: a name twice"


def _resources(container: k8s_min.Container, _: api.RevisionTemplate) -> Iterator[str]:
    """P: the keys, and the values of CPU and GPU; D, memory: how much so many vCPUs may have."""
    limits = dict(container.resources.limits)
    if unknown := limits.keys() - {"memory", "cpu", "nvidia.com/gpu"}:
        yield f"resources.limits: {sorted(unknown)} are not supported"
    gpu = limits.get("nvidia.com/gpu")
    if gpu not in (None, "1"):
        yield f"resources.limits: nvidia.com/gpu {gpu}, of which only 1 is supported"
    cpu, memory = limits.get("cpu", "1"), GIB.fullmatch(limits.get("memory", "1Gi"))
    if cpu not in ("1", "2", "4", "8") and not (gpu and cpu == "20"):  # P; 20 by D, GPUs
        yield f"resources.limits: cpu {cpu} is not supported"
    elif memory is None:
        yield f"resources.limits: memory {limits['memory']} is no number of Gi"
    elif int(memory[1]) > MEMORY_GIB.get(int(cpu), 10**6):
        yield f"resources.limits: memory {memory[0]} is more than {cpu} vCPUs may have"


def _gpu(container: k8s_min.Container, template: api.RevisionTemplate, region: str) -> Iterator[str]:
    """D, GPUs."""
    limits = dict(container.resources.limits)
    accelerator = template.node_selector.accelerator
    if bool(limits.get("nvidia.com/gpu")) != bool(accelerator):
        yield "node_selector.accelerator and nvidia.com/gpu go together"
        return
    if not accelerator:
        if template.gpu_zonal_redundancy_disabled:
            yield "gpu_zonal_redundancy_disabled: there is no GPU"
        return
    if accelerator not in GPUS:
        yield f"node_selector.accelerator: {accelerator} is no GPU of Cloud Run"
        return
    cpu, memory_gib, regions = GPUS[accelerator]
    if region not in regions:
        yield f"node_selector.accelerator: {accelerator} is not in {region}"
    if int(limits.get("cpu", "1")) < cpu or int(limits.get("memory", "1Gi").removesuffix("Gi")) < memory_gib:
        yield f"resources.limits: {accelerator} needs at least {cpu} vCPUs and {memory_gib}Gi"
    if container.resources.cpu_idle:
        yield "resources.cpu_idle: a GPU needs instance-based billing, with CPU always allocated"
    if template.execution_environment == api.ExecutionEnvironment.EXECUTION_ENVIRONMENT_GEN1:
        yield "execution_environment: a GPU needs the second generation"


def _startup(container: k8s_min.Container, template: api.RevisionTemplate) -> Iterator[str]:
    """P: each bound; D, health checks: failure_threshold * period_seconds is at most 600, with a GPU 1800 seconds."""
    probe = container.startup_probe
    if not fields_of(probe):
        return
    period, timeout = probe.period_seconds or 10, probe.timeout_seconds or 1
    if not 0 <= probe.initial_delay_seconds <= 240:
        yield "startup_probe.initial_delay_seconds: from 0 to 240"
    if not 1 <= period <= 240:
        yield "startup_probe.period_seconds: from 1 to 240"
    if not 1 <= timeout <= 3600 or timeout > period:
        yield "startup_probe.timeout_seconds: from 1 to 3600, and not more than period_seconds"
    failures = probe.failure_threshold or 3
    longest = 1800 if template.node_selector.accelerator else 600
    if failures < 1 or failures * period > longest:
        yield f"startup_probe.failure_threshold: with period_seconds at most {longest} s"
    if len(fields_of(probe) & {"http_get", "tcp_socket", "grpc"}) != 1:
        yield "startup_probe: exactly one of http_get, tcp_socket and grpc"
    if "http_get" in fields_of(probe) and not (probe.http_get.path or "/").startswith("/"):
        yield "startup_probe.http_get.path: begins with /"


def _volumes(container: k8s_min.Container, template: api.RevisionTemplate) -> Iterator[str]:
    """P: names, types and options; D, volumes: paths that are not allowed."""
    for volume in template.volumes:
        kinds = fields_of(volume) & {"secret", "cloud_sql_instance", "empty_dir", "nfs", "gcs"}
        if not LABEL.fullmatch(volume.name) or len(kinds) != 1:
            yield f"volumes: {volume.name!r} has {len(kinds)} types, expected a name and one type"
        if "gcs" in kinds and not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", volume.gcs.bucket):
            yield f"volumes: {volume.gcs.bucket!r} is no bucket"
        if "gcs" in kinds and any(option.startswith("-") for option in volume.gcs.mount_options):
            yield "volumes: mount_options without the leading --"
    names = {volume.name for volume in template.volumes}
    for mount in container.volume_mounts:
        if mount.name not in names:
            yield f"volume_mounts: {mount.name} is no volume"
        if not mount.mount_path.startswith("/") or ":" in mount.mount_path:
            yield f"volume_mounts: {mount.mount_path} is no path"
        if re.match(r"/(dev|proc|sys)(/|$)", mount.mount_path):
            yield f"volume_mounts: {mount.mount_path} is not allowed"
    is_first = template.execution_environment == api.ExecutionEnvironment.EXECUTION_ENVIRONMENT_GEN1
    if is_first and any("gcs" in fields_of(volume) for volume in template.volumes):
        yield "execution_environment: a mounted bucket needs the second generation"


def _scaling(service: api.Service, template: api.RevisionTemplate) -> Iterator[str]:
    """D, concurrency and timeouts; the counts by their names."""
    if not 0 <= template.max_instance_request_concurrency <= 1000:
        yield "max_instance_request_concurrency: at most 1000"
    if template.timeout and template.timeout.total_seconds() > 3600:
        yield "timeout: at most 3600 s"
    of_service, of_revision = service.scaling, template.scaling
    highest = of_service.max_instance_count or of_revision.max_instance_count or 100
    if of_service.min_instance_count < 0 or of_revision.min_instance_count < 0 or highest < 1:
        yield "scaling: counts of instances"
    if max(of_service.min_instance_count, of_revision.min_instance_count) > highest:
        yield "scaling.min_instance_count: more than max_instance_count"


def traffic_problems(service_id: str, targets: list[api.TrafficTarget], revisions: set[str]) -> Iterator[str]:
    """P: shares, revisions and tags. T: a service's name and a tag together."""
    latest = api.TrafficTargetAllocationType.TRAFFIC_TARGET_ALLOCATION_TYPE_LATEST
    by_name = api.TrafficTargetAllocationType.TRAFFIC_TARGET_ALLOCATION_TYPE_REVISION
    if targets and sum(target.percent for target in targets) != 100:
        yield "traffic: percent must add up to 100"
    for target in targets:
        if target.percent < 0 or (target.tag and not LABEL.fullmatch(target.tag)):
            yield f"traffic: {target.percent} percent, tag {target.tag!r}"
        if target.type_ not in (latest, by_name) or (target.type_ == latest) != (not target.revision):
            yield "traffic: either the latest revision or one by its name"
        elif target.revision and target.revision not in revisions:
            yield f"traffic: there is no revision {target.revision}"
    tags = [target.tag for target in targets if target.tag]
    for tag in tags:
        if len(service_id) + len(tag) > 46:  # T
            yield f"traffic: tag '{tag}' and service name '{service_id}' together are too long"
    if len(tags) != len(set(tags)):
        yield "traffic: a tag twice"
