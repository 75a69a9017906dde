"""Assumptions about Vertex AI that a run confirms or contradicts, from what the service says of its tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vlmpipe.catalog.unproved import Sighting, note_sightings, refuted_by
from vlmpipe.runs.failure_patterns import Pattern
from vlmpipe.trainer.config.job import RUN_ID
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage import open_storage

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.types import PipelineJob

RAN = ("RUNNING", "SUCCEEDED", "FAILED")  # states of a task that has begun
# By assumption: tasks of which one must have succeeded, or for a step inside a loop begun.
BEGUN = {
    "vertex-accepts-the-graph": ("resolve-run",),
    "vertex-joins-branches": ("train",),
    "vertex-loops-in-an-exit-handler": ("prepare-chunks", "train-variants"),
    "vertex-exit-task-runs": ("notify",),
}


def sightings_of(job: PipelineJob, run_uri: str, pattern: Pattern | None = None) -> list[Sighting]:
    """Evidence on the assumptions in the service's answer about a run. pattern: the cause of its failure, if known."""
    run, states = job.name.rpartition("/")[2], _states(job)
    result = {
        name: (True, f"the task {step} began")
        for name, steps in BEGUN.items()
        for step in steps
        if states.get(step) in RAN
    }
    mail = states.get("mail")
    if mail in ("SUCCEEDED", "FAILED"):
        result["vertex-two-exit-tasks"] = (mail == "SUCCEEDED", f"the task mail ended as {mail}")
    if run_uri:
        folder = run_uri.rpartition("/")[2]
        result["vertex-placeholders-in-constants"] = ("{{" not in folder, f"the run's folder is {folder}")
    if job.schedule_name:
        result["vertex-scheduled-run-ids"] = (bool(RUN_ID.fullmatch(run)), f"{job.schedule_name} started {run}")
    if pattern:
        result |= {assumption.id: (False, f"the run failed: {pattern.cause}") for assumption in refuted_by(pattern.id)}
    return [Sighting(name, holds, text, "diagnose", run) for name, (holds, text) in result.items()]


def recorded_notes(run_uri: str, sightings: list[Sighting]) -> list[str]:
    """Record sightings in the folder of all runs; a note about what is new, or about why it was not recorded."""
    root_uri = run_uri.rpartition("/runs/")[0]
    if not root_uri or not sightings:
        return []
    try:
        new = note_sightings(open_storage(root_uri), sightings)
    except UserError as error:
        return [f"what this run shows about Vertex AI was not recorded: {error.found.splitlines()[0]}"]
    contradicted = [
        f"{sighting.id} is contradicted: {sighting.said} (vlmpipe docs unproved)"
        for sighting in new
        if not sighting.holds
    ]
    confirmed = [sighting.id for sighting in new if sighting.holds]
    if confirmed:
        contradicted.append(f"seen for the first time on Vertex AI: {', '.join(confirmed)} (vlmpipe docs unproved)")
    return contradicted


def _states(job: PipelineJob) -> Mapping[str, str]:
    """State by task, without a stage's name before it; of several tasks of a name one that has begun."""
    states: dict[str, str] = {}
    steps = {step for of_one in BEGUN.values() for step in of_one}
    suffix = re.compile(rf"(?:.+-)?({'|'.join(sorted(steps))})")
    for task in job.job_detail.task_details:
        match = suffix.fullmatch(task.task_name)
        name = match[1] if match else task.task_name
        if states.get(name) not in RAN:
            states[name] = str(task.state.name)
    return states
