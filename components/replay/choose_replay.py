"""Step: chooses what the start model is asked, and tells whether its answers are missing."""

from typing import NamedTuple


def choose_replay(
    run_uri: str,
) -> NamedTuple("Outputs", [("replay", str), ("pools", list[dict[str, object]])]):  # type: ignore[valid-type]
    """Choose training images of the other sources and write the questions about them, unless an earlier run did.

    Args:
        run_uri: The run's folder.

    Returns:
        replay: answer when the start model's answers are missing, reuse when they are there.
        pools: Worker pools of the job that answers.
    """
    from vlmpipe.components.runtime.replay_steps import choose_for_run
    from vlmpipe.platforms.step_context import step_context

    with step_context(run_uri, "choose-replay") as progress:
        state, pools = choose_for_run(run_uri, progress)
    return (state, pools)
