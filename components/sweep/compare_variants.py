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
    from vlmpipe.comparison.curve.page import curve_section
    from vlmpipe.comparison.curve.write import write_curve
    from vlmpipe.comparison.sweep.comparison import compare_sweep
    from vlmpipe.comparison.sweep.page import write_page
    from vlmpipe.platforms.step_context import step_context

    with step_context(run_uri, "compare-variants") as progress:
        comparison = compare_sweep(run_uri)
        curve = write_curve(run_uri)
        page = write_page(run_uri, comparison, curve_section(curve) if curve else None)
        progress.finish(message=curve.decision if curve else comparison.sentence)
        for variant in comparison.variants:
            if variant.score:
                metrics.log_metric(variant.name, variant.score.value)
        with open(report.path, "w", encoding="utf-8") as file:
            file.write(page)
    return comparison.best
