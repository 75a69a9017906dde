"""Step: prepares one share of the chunks, which prepare-data then reuses."""


def prepare_chunks(share: str) -> int:
    """Prepare every chunk of the share that is not done already.

    Args:
        share: The output of plan-data for this task.

    Returns:
        How many chunks were prepared.
    """
    from vlmpipe.components.runtime.prepared_data import read_share
    from vlmpipe.platforms.step_context import step_context
    from vlmpipe.trainer.config.job import JobConfig
    from vlmpipe.trainer.data.prepare.pipeline import prepare_share

    task, tasks, fingerprint, run_uri = read_share(share)
    with step_context(run_uri, f"prepare-chunks-{task}") as progress:
        prepared = prepare_share(JobConfig.load(f"{run_uri}/run.json"), fingerprint, task, tasks, progress)
        progress.finish(message=f"{prepared} chunks prepared")
    return prepared
