"""Step: a CustomJob on a platform, with the inputs and the output of CustomTrainingJobOp."""

from typing import NamedTuple


# KFP makes the step of this source, so that its inputs are written out here: a test compares them with JobOrder.
def run_custom_job(
    target: str,
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
    """Run the job of these worker pools, and watch it to its end.

    Args:
        target: The platform: local for one process a replica beside this step, kubeflow for a TrainJob in this step's
            namespace, vertex for a CustomJob that CustomTrainingJobOp cannot run.
        display_name: Name of the job, from which those of a TrainJob and of a fallback's options are made.
        worker_pool_specs: The API's WorkerPoolSpecs: chief, workers, reducers or parameter servers, evaluators.
        timeout: Longest time the job may run, for example "3600s".
        base_output_directory: The run's folder. On Kubeflow its run.json has the section kubeflow; on Vertex AI the
            options and the fields that are no inputs, and its plan.json the options' prices.
        labels: Labels of the job; vlmpipe-step names the step in whose record it reports.
        strategy: Unused, as max_wait_duration, by training with capacity fallback: each option has its own.
        location: For Vertex AI, as all inputs that only concern Google Cloud.
    """
    inputs = dict(locals())
    from vlmpipe.job_spec.order import JobOrder
    from vlmpipe.platforms.step_context import exit_on_error
    from vlmpipe.platforms.table import platform_of

    platform = platform_of(inputs.pop("target"))
    with exit_on_error():
        return (platform.run_job(JobOrder(**inputs)),)
