"""Step: shows what the replay job answered. A job itself has no artifacts."""

from kfp.dsl import Metrics, Output


def collect_replay(run_uri: str, gcp_resources: str, metrics: Output[Metrics]) -> str:
    """Collect the results of the job that asks the start model.

    Args:
        run_uri: The run's folder, which is also the output.
        gcp_resources: Output of the job step; taking it makes this step wait for the job.
    """
    from vlmpipe.components.runtime.run_results import job_metrics
    from vlmpipe.platforms.step_context import exit_on_error

    with exit_on_error():
        for name, value in job_metrics(run_uri, "replay").items():
            metrics.log_metric(name, value)
    return run_uri
