"""Step: divides the source into chunks, and the chunks into shares for parallel tasks (data.tasks)."""


def plan_data(run_uri: str) -> list[str]:
    """Read every record of the source once, without decoding its images, and store where chunks begin.

    Args:
        run_uri: The run's folder.

    Returns:
        One text for each task of the next step; empty where the data is prepared already, or too small to divide.
    """
    from vlmpipe.components.runtime.prepared_data import shares_of
    from vlmpipe.platforms.step_context import step_context
    from vlmpipe.trainer.config.job import JobConfig
    from vlmpipe.trainer.data.prepare.pipeline import plan_chunks

    with step_context(run_uri, "plan-data") as progress:
        job = JobConfig.load(f"{run_uri}/run.json")
        planned = plan_chunks(job, progress)
        shares = shares_of(run_uri, min(job.data.tasks, planned.chunks), planned.fingerprint)
        progress.finish(message=f"{planned.chunks} chunks for {len(shares)} tasks")
    return shares
