"""Inputs of a job step as one value, which a platform runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from vlmpipe.job_spec.forms import CustomJobSpec


@dataclass(frozen=True)
class JobInputs:
    """Inputs of `vlmpipe.platforms.job_step.run_custom_job`, which has their defaults and descriptions."""

    display_name: str
    location: str
    worker_pool_specs: Sequence[Mapping[str, object]]
    timeout: str
    restart_job_on_worker_restart: bool
    service_account: str
    tensorboard: str
    enable_web_access: bool
    network: str
    reserved_ip_ranges: Sequence[str]
    base_output_directory: str
    labels: dict[str, str]
    encryption_spec_key_name: str
    persistent_resource_id: str
    project: str
    strategy: str
    max_wait_duration: str
    psc_interface_config: Mapping[str, object]

    def spec(self) -> CustomJobSpec:
        """Return the CustomJobSpec, snake_case, without empty fields."""
        fields = {
            "worker_pool_specs": self.worker_pool_specs,
            "scheduling": {
                "timeout": self.timeout,
                "restart_job_on_worker_restart": self.restart_job_on_worker_restart,
                "strategy": self.strategy,
                "max_wait_duration": self.max_wait_duration,
            },
            "service_account": self.service_account,
            "tensorboard": self.tensorboard,
            "enable_web_access": self.enable_web_access,
            "network": self.network,
            "reserved_ip_ranges": self.reserved_ip_ranges,
            "base_output_directory": {"output_uri_prefix": self.base_output_directory},
            "persistent_resource_id": self.persistent_resource_id,
            "psc_interface_config": self.psc_interface_config,
        }
        return cast(CustomJobSpec, {name: value for name, value in fields.items() if value})
