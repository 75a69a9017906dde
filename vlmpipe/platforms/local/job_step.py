"""Step: a CustomJob on this machine, with the inputs and the output of CustomTrainingJobOp."""

from typing import NamedTuple


def run_local_job(
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
    """Run the job of these worker pools here, one process for each replica of pools 0 and 1.

    Args:
        display_name: Name of the job.
        worker_pool_specs: The API's WorkerPoolSpecs: chief, workers, reducers, evaluators.
        timeout: Longest time the job may run, for example "3600s".
        base_output_directory: The run's folder; the job writes there.
        labels: Labels of the job; vlmpipe-step names the step in whose record it reports.
        location: Unused here, as all inputs that only concern machines in the cloud.
    """
    from vlmpipe.platforms.local.jobs.job import run_job
    from vlmpipe.platforms.step_context import exit_on_error

    job_spec = {
        "worker_pool_specs": worker_pool_specs,
        "scheduling": {
            "timeout": timeout,
            "restart_job_on_worker_restart": restart_job_on_worker_restart,
            "strategy": strategy,
            "max_wait_duration": max_wait_duration,
        },
        "service_account": service_account,
        "tensorboard": tensorboard,
        "enable_web_access": enable_web_access,
        "network": network,
        "reserved_ip_ranges": reserved_ip_ranges,
        "base_output_directory": {"output_uri_prefix": base_output_directory},
        "persistent_resource_id": persistent_resource_id,
        "psc_interface_config": psc_interface_config,
    }
    with exit_on_error():
        return (run_job(display_name, job_spec, labels=labels, project=project),)
