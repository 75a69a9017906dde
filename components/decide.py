"""Step: the gate decides whether the model may replace the champion."""

from kfp.dsl import HTML, Metrics, Output


def decide(run_uri: str, metrics: Output[Metrics], report: Output[HTML]) -> str:
    """Compare the evaluation with the gate's thresholds and the registered champion.

    Args:
        run_uri: The run's folder.

    Returns:
        accepted or rejected.
    """
    from components.runtime.step_context import step_context
    from vlmpipe.registry.release import decide_run
    from vlmpipe.report.build import build_report

    with step_context(run_uri, "decide") as progress:
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
