"""Step: turns samples into checked, indexed shards, and tells whether features are missing."""

from typing import NamedTuple

from kfp.dsl import Metrics, Output


def prepare_data(
    run_uri: str,
    metrics: Output[Metrics],
) -> NamedTuple("Outputs", [("prepared_uri", str), ("features", str)]):  # type: ignore[valid-type]
    """Prepare the run's data, or reuse data prepared before from the same bytes.

    Args:
        run_uri: The run's folder.

    Returns:
        prepared_uri: Where the prepared data lie.
        features: encode when images have no cached features yet, reuse when all have, off without a cache.
    """
    from vlmpipe.components.runtime.prepared_data import prepare_run
    from vlmpipe.platforms.step_context import step_context
    from vlmpipe.trainer.config.job import JobConfig

    with step_context(run_uri, "prepare-data") as progress:
        pointers, counts = prepare_run(JobConfig.load(f"{run_uri}/run.json"), progress)
    for name, count in counts.items():
        metrics.log_metric(name, count)
    return (pointers.prepared_uri, pointers.features)
