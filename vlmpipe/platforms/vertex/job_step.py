"""Step: a CustomJob on Vertex AI that CustomTrainingJobOp cannot run, with its inputs and its output."""

from typing import NamedTuple


def run_vertex_job(
    display_name: str,
    location: str = "",
    worker_pool_specs: list[dict[str, object]] = [],  # noqa: B006 (kfp reads the default)
    timeout: str = "604800s",
    restart_job_on_worker_restart: bool = False,
    service_account: str = "",
    tensorboard: str = "",
    enable_web_access: bool = False,
    network: str = "",
    reserved_ip_ranges: list[str] = [],  # noqa: B006
    base_output_directory: str = "",
    labels: dict[str, str] = {},  # noqa: B006
    encryption_spec_key_name: str = "",
    persistent_resource_id: str = "",
    project: str = "",
    strategy: str = "STANDARD",
    max_wait_duration: str = "86400s",
    psc_interface_config: dict[str, object] = {},  # noqa: B006
) -> NamedTuple("Outputs", [("gcp_resources", str)]):  # type: ignore[valid-type]
    """Start the job, watch it and, with capacity fallback, go to the next option when no machines are found.

    Args:
        display_name: Name of the jobs, to which each option of a fallback adds its own.
        worker_pool_specs: The API's WorkerPoolSpecs.
        base_output_directory: The run's folder; its run.json has the options and the fields that are no inputs, its
            plan.json the options' prices.
        strategy: Unused, as max_wait_duration, by training with capacity fallback: each option has its own.
    """
    from vlmpipe.platforms.step_context import exit_on_error, stop_as_error
    from vlmpipe.platforms.vertex.jobs.capacity_fallback import run_with_fallback

    settings = {
        "display_name": display_name,
        "project": project,
        "location": location,
        "labels": labels,
        "encryption_spec_key_name": encryption_spec_key_name,
        "strategy": strategy,
        "max_wait_duration": max_wait_duration,
    }
    job_spec = {
        "worker_pool_specs": worker_pool_specs,
        "scheduling": {"timeout": timeout, "restart_job_on_worker_restart": restart_job_on_worker_restart},
        "service_account": service_account,
        "tensorboard": tensorboard,
        "enable_web_access": enable_web_access,
        "network": network,
        "reserved_ip_ranges": reserved_ip_ranges,
        "base_output_directory": {"output_uri_prefix": base_output_directory},
        "persistent_resource_id": persistent_resource_id,
        "psc_interface_config": psc_interface_config,
    }
    with exit_on_error(), stop_as_error(labels.get("vlmpipe-step", "train")):
        return (run_with_fallback(settings, {name: value for name, value in job_spec.items() if value}),)
