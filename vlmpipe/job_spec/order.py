"""The order of a job, from which the inputs of its step and the spec of the API's CustomJob are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from vlmpipe.job_spec.forms import CustomJobSpec, Scheduling, WorkerPool

NO_INPUTS = ("disable_retries", "enable_dashboard_access")  # fields that no job step takes: run.json has them


@dataclass(frozen=True, kw_only=True)
class JobOrder:
    """Request of a job to a platform. An empty value is left out of the step's inputs and of the spec.

    All but NO_INPUTS are the inputs of a job step, with the names of Google's CustomTrainingJobOp;
    `vlmpipe.platforms.job_step.run_custom_job` describes them.
    """

    display_name: str
    location: str = ""
    worker_pool_specs: Sequence[WorkerPool] = ()
    timeout: str = "604800s"
    restart_job_on_worker_restart: bool = False
    service_account: str = ""
    tensorboard: str = ""
    enable_web_access: bool = False
    network: str = ""
    reserved_ip_ranges: Sequence[str] = ()
    base_output_directory: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    encryption_spec_key_name: str = ""
    persistent_resource_id: str = ""
    project: str = ""
    strategy: str = "STANDARD"
    max_wait_duration: str = ""
    psc_interface_config: Mapping[str, object] = field(default_factory=dict)
    disable_retries: bool = False
    enable_dashboard_access: bool = False

    def inputs(self) -> dict[str, object]:
        """Return the inputs of the job step that are set; the others keep the step's defaults."""
        return {name: value for name, value in vars(self).items() if value and name not in NO_INPUTS}

    def spec(self) -> CustomJobSpec:
        """Return the CustomJobSpec, snake_case: each field where the form of the API has its name."""
        values = {
            **vars(self),
            "scheduling": {name: vars(self)[name] for name in Scheduling.__annotations__ if vars(self)[name]},
            "base_output_directory": {"output_uri_prefix": self.base_output_directory},
        }
        return cast(CustomJobSpec, {name: values[name] for name in CustomJobSpec.__annotations__ if values[name]})
