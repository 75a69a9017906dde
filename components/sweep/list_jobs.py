"""Step: lists the jobs of a sweep, once its data are prepared."""


def list_jobs(run_uri: str, prepared: list[str]) -> list[str]:
    """The jobs whose trainings are not all done.

    Args:
        run_uri: The run's folder.
        prepared: Outputs of the steps before; taking them makes this step wait for all of them.

    Returns:
        One text for each job.
    """
    from vlmpipe.components.runtime.sweep_steps import open_jobs
    from vlmpipe.platforms.step_context import exit_on_error

    with exit_on_error():
        return open_jobs(run_uri)
