"""Rules from comments of the API's messages (google.cloud.aiplatform_v1, SDK 1.165.1) that several resources share.

Each check raises ApiError (400). Where Google's documentation of labels is stricter than the comments, it counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import proto
from google.cloud.aiplatform_v1 import types as api

from vlmpipe.config.service_forms import (
    ENCRYPTION_KEY,
    LABEL_KEY,
    LABEL_VALUE,
    LABELS_OF_A_RESOURCE,
    NETWORK,
    RESERVED_LABELS,
    SERVICE_ACCOUNT,
    TENSORBOARD,
)
from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.messages import fields_of

DISPLAY_NAME_CHARS = 128
C_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_VARIABLES = MAX_PACKAGES = 100
BOOT_DISKS = ("", "pd-ssd", "pd-standard", "hyperdisk-balanced")


def check_display_name(name: str) -> None:
    """Required, at most 128 characters."""
    if not 0 < len(name) <= DISPLAY_NAME_CHARS:
        raise ApiError(400, f"display_name: required, at most {DISPLAY_NAME_CHARS} characters, found {len(name)}")


def check_labels(labels: Mapping[str, str]) -> None:
    """At most 64; lower-case letters, digits, underscores and dashes."""
    if len(labels) > LABELS_OF_A_RESOURCE:
        raise ApiError(400, f"labels: {len(labels)} are more than {LABELS_OF_A_RESOURCE}")
    for key, value in labels.items():
        if not LABEL_KEY.fits(key) or not LABEL_VALUE.fits(value) or key.startswith(RESERVED_LABELS):
            raise ApiError(400, f"labels: {key}={value} is not a label")


def check_encryption_key(resource: proto.Message, location: str) -> None:
    """Raise ApiError (400) unless the resource's key, if any, has the documented form and is in its region."""
    if "encryption_spec" not in fields_of(resource):
        return
    name = resource.encryption_spec.kms_key_name
    region = ENCRYPTION_KEY.region_of(name)
    if not region:
        problem = f"{name!r} does not match {ENCRYPTION_KEY.pattern}"
        raise ApiError(400, f"encryption_spec.kms_key_name: {problem}")
    if region != location:
        raise ApiError(400, f"encryption_spec.kms_key_name: the key is in {region}, the resource in {location}")


def check_account_and_network(account: str, network: str) -> None:
    """Each of its documented form, where it is set."""
    for field, value, form in (("service_account", account, SERVICE_ACCOUNT), ("network", network, NETWORK)):
        if value and not form.fits(value):
            raise ApiError(400, f"{field}: {value!r} does not match {form.pattern}")


def check_private_connect(config: api.PscInterfaceConfig) -> None:
    """Each DNS peering has a domain that ends with a dot, a project and a network."""
    for dns_peering_config in config.dns_peering_configs:
        if not (
            dns_peering_config.domain.endswith(".")
            and dns_peering_config.target_project
            and dns_peering_config.target_network
        ):
            raise ApiError(
                400, f"dns_peering_configs: a domain ending with a dot, project and network: {dns_peering_config!r}"
            )


def check_variables(variables: Iterable[api.EnvVar], where: str) -> None:
    """At most 100, each a C identifier with a value."""
    listed = list(variables)
    if len(listed) > MAX_VARIABLES:
        raise ApiError(400, f"{where}.env: {len(listed)} are more than {MAX_VARIABLES}")
    for variable in listed:
        if not C_IDENTIFIER.fullmatch(variable.name):
            raise ApiError(400, f"{where}.env: {variable.name!r} is no C identifier")
        if not variable.value:
            raise ApiError(400, f"{where}.env: {variable.name} has no value")


def check_custom_job_spec(spec: api.CustomJobSpec, location: str) -> None:
    """A CustomJobSpec: required fields, limits and forms. An empty pool after the first one is skipped."""
    if not spec.worker_pool_specs:
        raise ApiError(400, "Required field job_spec.worker_pool_specs is missing")
    check_account_and_network(spec.service_account, spec.network)
    if spec.network and spec.psc_interface_config.network_attachment:
        raise ApiError(400, "network and psc_interface_config are both set")
    check_private_connect(spec.psc_interface_config)
    output = spec.base_output_directory.output_uri_prefix
    if "base_output_directory" in fields_of(spec) and not output.startswith("gs://"):
        raise ApiError(400, f"base_output_directory.output_uri_prefix: not a gs:// path: {output!r}")
    if spec.tensorboard:
        if TENSORBOARD.region_of(spec.tensorboard) != location:
            raise ApiError(400, f"tensorboard: {spec.tensorboard!r} is not one of {location}")
        if not spec.service_account:
            raise ApiError(400, "service_account: required with tensorboard")
    for number, pool in enumerate(spec.worker_pool_specs):
        if fields_of(pool) or number == 0:
            _check_pool(pool, f"worker_pool_specs[{number}]")


def _check_pool(pool: api.WorkerPoolSpec, where: str) -> None:
    container, package = pool.container_spec, pool.python_package_spec
    problems = {
        "machine_spec.machine_type: required": not pool.machine_spec.machine_type,
        "replica_count: at least 1": pool.replica_count < 1,
        "one of container_spec and python_package_spec": not fields_of(pool)
        & {"container_spec", "python_package_spec"},
        "container_spec.image_uri: required": "container_spec" in fields_of(pool) and not container.image_uri,
        "python_package_spec: executor_image_uri, package_uris and python_module are required": "python_package_spec"
        in fields_of(pool)
        and not (package.executor_image_uri and package.package_uris and package.python_module),
        f"package_uris: at most {MAX_PACKAGES}": len(package.package_uris) > MAX_PACKAGES,
        f"disk_spec.boot_disk_type: one of {BOOT_DISKS[1:]}": pool.disk_spec.boot_disk_type not in BOOT_DISKS,
        "accelerator_count without accelerator_type": bool(pool.machine_spec.accelerator_count)
        != bool(pool.machine_spec.accelerator_type),
        "reservation_affinity_type: required": "reservation_affinity" in fields_of(pool.machine_spec)
        and not pool.machine_spec.reservation_affinity.reservation_affinity_type,
        "nfs_mounts: server, path and mount_point are required, path starts with /": not all(
            mount.server and mount.mount_point and mount.path.startswith("/") for mount in pool.nfs_mounts
        ),
    }
    for problem, is_wrong in problems.items():
        if is_wrong:
            raise ApiError(400, f"{where}.{problem}")
    check_variables((*container.env, *package.env), where)
