"""Step: collects the results of the evaluation; the gate decides whether the model may replace the champion."""

from kfp.dsl import HTML, ClassificationMetrics, Metrics, Output


def decide(
    run_uri: str,
    gcp_resources: str,
    evaluation: Output[Metrics],
    confusion: Output[ClassificationMetrics],
    metrics: Output[Metrics],
    report: Output[HTML],
) -> str:
    """Compare the evaluation with the gate's thresholds and the registered champion.

    Its artifacts: `evaluation`, the scores; `confusion`, the confusion matrix; `metrics`, what the gate compared.

    Args:
        run_uri: The run's folder.
        gcp_resources: Output of the last evaluating job's step; taking it makes this step wait for the job.

    Returns:
        accepted or rejected.
    """
    from vlmpipe.components.runtime.run_results import evaluated_confusion, evaluation_metrics
    from vlmpipe.platforms.step_context import step_context
    from vlmpipe.registry.release import decide_run
    from vlmpipe.report.build import build_report

    with step_context(run_uri, "decide") as progress:
        for name, value in evaluation_metrics(run_uri).items():
            evaluation.log_metric(name, value)
        categories, rows, note = evaluated_confusion(run_uri)
        if categories:  # an artifact without a matrix is not drawn; an empty matrix would be, as an empty picture
            confusion.log_confusion_matrix(categories, rows)
        confusion.metadata["note"] = note
        decision = decide_run(run_uri)
        answer = "accepted" if decision.accepted else "rejected"
        progress.update(0, answer=answer)
        progress.finish(message=decision.reason)
        for check in decision.checks:
            if check.value is not None:
                metrics.log_metric(check.name, check.value)
        with open(report.path, "w", encoding="utf-8") as file:
            file.write(build_report(run_uri))
    return answer
