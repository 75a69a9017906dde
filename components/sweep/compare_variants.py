"""Step: compares the variants of a sweep."""

from kfp.dsl import HTML, Metrics, Output


def compare_variants(run_uri: str, jobs: list[str], metrics: Output[Metrics], report: Output[HTML]) -> str:
    """Write the comparison, as comparison.json and as the run's report; of shares of the samples curve.json too.

    Args:
        run_uri: The run's folder.
        jobs: How each job ended; taking them makes this step wait for all of them.

    Returns:
        The best variant.
    """
    from vlmpipe.comparison.sweep_report import write_sweep_report
    from vlmpipe.platforms.step_context import step_context

    with step_context(run_uri, "compare-variants") as progress:
        written = write_sweep_report(run_uri)
        comparison, curve = written.comparison, written.curve
        progress.finish(message=curve.decision if curve else comparison.sentence)
        for variant in comparison.variants:
            if variant.score:
                metrics.log_metric(variant.name, variant.score.value)
        with open(report.path, "w", encoding="utf-8") as file:
            file.write(written.page)
    return comparison.best
