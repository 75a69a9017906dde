"""Cost of the start model's answers, a source of the data that is generated once."""

from __future__ import annotations

from vlmpipe.catalog.prices import Prices
from vlmpipe.catalog.steps import load_steps
from vlmpipe.planner.jobs.hours import replay_hours, replay_questions
from vlmpipe.planner.scenario import Scenario

COPIES = 2  # of each image: with its question, and with its answer


def replay_notes(case: Scenario, prices: Prices | None) -> list[str]:
    """Questions, tokens, hours and disk of the answers; none without such a source.

    `prices`: None on this machine, which costs nothing.
    """
    replay = case.config.data.replay
    if replay is None:
        return []
    questions = replay_questions(case.config, case.load)
    where = "kept under output.root_uri/replay and generated once: a run that resumes or is repeated finds them"
    if questions is None:
        return [f"Replay: how many answers the start model gives is not known; give plan.samples. They are {where}."]
    hours, tokens = replay_hours(case), questions * replay.replay_max_new_tokens
    disk_gb = COPIES * questions * load_steps().rates["image_bytes"] / 1e9
    took = "hours not known" if hours is None else f"{hours:,.2f} hours"
    cost = " of job replay, in the cost above" if prices else " on this machine"
    return [
        f"Replay: at most {questions:,} answers of the start model with {tokens:,} tokens, {took}{cost}, and about "
        f"{disk_gb:,.2g} GB; {where}."
    ]
