"""Step: one of several tasks prepares its share of the chunks. prepare-data then finds them done."""


def prepare_chunks(run_uri: str, task: int, tasks: int) -> int:
    """Prepare every `tasks`-th chunk, from number `task` on, unless it is done already.

    Args:
        run_uri: The run's folder.
        task: Number of this task, from 0.
        tasks: How many tasks there are.

    Returns:
        How many chunks were prepared.
    """
    from components.shell import step
    from trainer.config import JobConfig
    from trainer.data.prepare import prepare_share

    with step(run_uri, f"prepare-chunks-{task}") as progress:
        prepared = prepare_share(JobConfig.load(f"{run_uri}/run.json"), task, tasks, progress)
        progress.finish(message=f"{prepared} chunks prepared")
    return prepared
