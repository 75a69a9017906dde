"""Step: a job of a run on any target, in a pipeline of your own."""

from typing import NamedTuple


def run_job(
    run_uri: str,
    job: str = "train",
    target: str = "vertex",
) -> NamedTuple("Outputs", [("run_uri", str), ("gcp_resources", str)]):  # type: ignore[valid-type]
    """Run the job with the machines and settings that the run file in the run's folder names, and watch it to its end.

    Where such a job was interrupted before, training continues from its newest intact checkpoint.

    Args:
        run_uri: The run's folder, from open_run; prepare_data has run in it.
        job: replay, cache_features, train, evaluate, benchmark or audit. replay, which comes before prepare_data, does
            nothing where the start model's answers are there, cache_features where there is nothing to encode; evaluate
            and benchmark need what sync_checkpoint exports, audit the checkpoints of train.
        target: vertex for a CustomJob, kubeflow for a TrainJob in this step's namespace, local for processes beside
            this step; the same as open_run's.

    Returns:
        run_uri: The same folder: a step that takes it waits for this one.
        gcp_resources: A JSON text that names the job; sync_checkpoint and decide take it.
    """
    from vlmpipe.components.runtime.jobs_on_targets import run_job_of_run
    from vlmpipe.platforms.step_context import exit_on_error, stop_as_error

    with exit_on_error(), stop_as_error(job.replace("_", "-")):
        return (run_uri, run_job_of_run(run_uri, job, target))
