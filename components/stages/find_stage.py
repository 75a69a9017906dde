"""Step: whether an earlier attempt of the run has finished a stage."""


def find_stage(run_uri: str) -> str:
    """Look for the stage's accepted model, so that a run that is continued does not train it again.

    Args:
        run_uri: The stage's folder, with the run.json of this attempt.

    Returns:
        accepted, or open where the stage's steps must run.
    """
    from components.runtime.step_context import exit_on_error
    from vlmpipe.registry.release import was_accepted

    with exit_on_error():
        return "accepted" if was_accepted(run_uri) else "open"
