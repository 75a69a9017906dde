"""Step: replaces the replay job when the start model's answers are there."""


def reuse_replay(run_uri: str, replay: str) -> str:
    """Record that no answers are generated.

    Args:
        run_uri: The run's folder, which is also the output.
        replay: Output of choose_replay: reuse.
    """
    from vlmpipe.components.runtime.replay_steps import why_nothing_is_answered
    from vlmpipe.platforms.step_context import step_context

    with step_context(run_uri, "replay") as progress:
        progress.finish("reused", why_nothing_is_answered(run_uri))
    return run_uri
