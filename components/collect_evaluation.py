"""Step: turns the files of the evaluation job into artifacts that the console shows."""

from kfp.dsl import HTML, ClassificationMetrics, Metrics, Output


def collect_evaluation(
    run_uri: str,
    gcp_resources: str,
    metrics: Output[Metrics],
    confusion: Output[ClassificationMetrics],
    report: Output[HTML],
) -> str:
    """Collect the results of the evaluation.

    Args:
        run_uri: The run's folder, which is also the output.
        gcp_resources: Output of the job step; taking it makes this step wait for the job.
    """
    from components.runtime.step_context import exit_on_error
    from components.runtime.step_logic import evaluated_confusion, job_metrics

    with exit_on_error():
        for name, value in job_metrics(run_uri, "evaluate").items():
            metrics.log_metric(name, value)
        categories, rows, note = evaluated_confusion(run_uri)
        if categories:  # an artifact without a matrix is not drawn; an empty matrix would be, as an empty picture
            confusion.log_confusion_matrix(categories, rows)
        confusion.metadata["note"] = note
        from vlmpipe.report.build import build_report

        with open(report.path, "w", encoding="utf-8") as file:
            file.write(build_report(run_uri))
    return run_uri
