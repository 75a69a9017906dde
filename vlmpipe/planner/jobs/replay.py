"""Cost of the start model's answers, a source of the data that is generated once, and their subjects."""

from __future__ import annotations

import math

from vlmpipe.catalog.prices import Prices
from vlmpipe.catalog.steps import load_steps
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.jobs.hours import replay_hours, replay_questions
from vlmpipe.planner.scenario import Scenario
from vlmpipe.trainer.data.replay.part_size import part_rows
from vlmpipe.trainer.data.replay.start_data import start_data, trained_last
from vlmpipe.trainer.storage.model_folders import bucket_address

COPIES = 2  # of each image: with its question, and with its answer


def replay_notes(case: Scenario, prices: Prices | None) -> list[str]:
    """Questions, tokens, hours and disk of the answers; none without such a source.

    `prices`: None on this machine, which costs nothing.
    """
    replay = case.config.data.replay
    if replay is None:
        return []
    if (there := case.load.replayed) is not None:
        return [
            f"Replay: {there:,} answers of the start model are there, for the same weights, data and settings. They "
            "cost nothing: nothing is asked, and no job replay runs."
        ]
    questions = replay_questions(case.config, case.load)
    where = "kept under output.root_uri/replay and generated once: a run that resumes or is repeated finds them"
    if questions is None:
        return [f"Replay: how many answers the start model gives is not known; give plan.samples. They are {where}."]
    hours, tokens = replay_hours(case), questions * replay.replay_max_new_tokens
    disk_gb = COPIES * questions * load_steps().rates["image_bytes"] / 1e9
    took = "hours not known" if hours is None else f"{hours:,.2f} hours"
    cost = " of job replay, in the cost above" if prices else " on this machine"
    about = asked_about(case.config)
    return [
        f"Replay: at most {questions:,} answers of the start model with {tokens:,} tokens, {took}{cost}, and about "
        f"{disk_gb:,.2g} GB; {where}. {about[0].upper()}{about[1:]}.{_idle(case, questions)}"
    ]


def _idle(case: Scenario, questions: int) -> str:
    """A sentence where some processes of the job have nothing to ask; empty where all have."""
    rows, ranks = part_rows(questions), case.config.cluster.of_job("evaluate").world_size
    files = math.ceil(questions / rows)
    if files >= ranks:
        return ""
    return f" {ranks - files} of {ranks} processes of job replay have nothing to ask: each takes {rows} questions."


def asked_about(config: RunConfig) -> str:
    """Name the data that the start model is asked about, with the reason where that is not its own training data."""
    replay = config.data.replay
    assert replay
    images = "prompts about the other sources' images"
    if replay.why_about_images:
        return f"it is asked {images}: {replay.why_about_images}"
    weights = trained_last(config.model)
    otherwise = "the run ends" if replay.replay_about == "start_data" else images
    if bucket_address(weights):
        return (
            f"where {weights} is a run's export whose prepared data is there, its questions are asked; else {otherwise}"
        )
    if (about := start_data(config.model)).uri:
        return f"it is asked questions and images of its own training data, {about.uri}"
    return f"it is asked {images}, as {about.obstacle}" if otherwise == images else f"the run ends, as {about.obstacle}"
