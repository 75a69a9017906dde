"""Step: the source is cut into chunks, which the tasks of the next step share between them (data.tasks)."""


def plan_data(run_uri: str) -> int:
    """Read every record of the source once, without decoding its pictures, and store where chunks begin.

    Args:
        run_uri: The run's folder.

    Returns:
        How many chunks there are; 0 where the data is prepared already, or is too small to be shared out.
    """
    from components.shell import step
    from trainer.config import JobConfig
    from trainer.data.prepare import plan_chunks

    with step(run_uri, "plan-data") as progress:
        chunks = plan_chunks(JobConfig.load(f"{run_uri}/run.json"), progress)
        progress.finish(message=f"{chunks} chunks")
    return chunks
