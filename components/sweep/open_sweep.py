"""Step: lists the data that a sweep's variants need, each once."""


def open_sweep(run_uri: str) -> list[str]:
    """Read the sweep that the step before has written into the run's folder.

    Args:
        run_uri: The run's folder.

    Returns:
        The folders of the trainings whose data are prepared, for themselves and for others with the same.
    """
    from vlmpipe.components.runtime.sweep_steps import preparations
    from vlmpipe.platforms.step_context import exit_on_error

    with exit_on_error():
        return preparations(run_uri)
