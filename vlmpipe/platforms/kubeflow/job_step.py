"""Step: a TrainJob on Kubeflow, with the inputs and the output of CustomTrainingJobOp."""

from typing import NamedTuple


def run_kubeflow_job(
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
    """Run the job of these worker pools as a TrainJob in the namespace of this step, and watch it to its end.

    Args:
        display_name: Name of the job, from which the TrainJob's is made.
        worker_pool_specs: The API's WorkerPoolSpecs: chief and workers.
        timeout: Longest time the job may run, for example "3600s".
        base_output_directory: The run's folder; its run.json has the section kubeflow.
        labels: Labels of the TrainJob; vlmpipe-step names the step in whose record it reports.
        location: Unused here, as all inputs that only concern Google Cloud.
    """
    from vlmpipe.platforms.kubeflow.jobs.job import run_on_kubeflow
    from vlmpipe.platforms.step_context import exit_on_error

    job_spec = {
        "worker_pool_specs": worker_pool_specs,
        "scheduling": {"timeout": timeout},
        "base_output_directory": {"output_uri_prefix": base_output_directory},
    }
    with exit_on_error():
        return (run_on_kubeflow(display_name, job_spec, labels=labels),)
