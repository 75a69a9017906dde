"""Step: turns the files of a job into artifacts that the console shows. A job itself has none."""

from kfp.dsl import HTML, Metrics, Output


def collect_job(run_uri: str, job: str, gcp_resources: str, metrics: Output[Metrics], report: Output[HTML]) -> str:
    """Collect the results of one job.

    Args:
        run_uri: The run's folder, which is also the output.
        job: cache_features, train or benchmark.
        gcp_resources: Output of the job step; taking it makes this step wait for the job.
    """
    from components.runtime.step_context import exit_on_error
    from components.runtime.step_logic import job_metrics

    with exit_on_error():
        for name, value in job_metrics(run_uri, job).items():
            metrics.log_metric(name, value)
        if job in ("train", "benchmark"):  # the page shows what there is by then
            from vlmpipe.report.build import build_report

            with open(report.path, "w", encoding="utf-8") as file:
                file.write(build_report(run_uri))
    return run_uri
