"""How a run ended: from the records of its own steps, and only where they leave it open from the service's word.

The services' words mean different things. Vertex AI says SUCCEEDED, FAILED or CANCELLED. Kubeflow says COMPLETE of a
good run, from 2.17 on; before, RUNNING of every run with a condition, a loop or a pipeline in it, also of one that
failed there (kubeflow/pipelines 13321). It never gives an error's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from vlmpipe.records.decision import Decision
from vlmpipe.records.registered import Registered
from vlmpipe.records.stage_folders import earlier_stages
from vlmpipe.runs.steps import DECIDING, Step, step_of_record
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.records.step import FOLDER, parse_step, step_of_file
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import unseal

Outcome = Literal["done", "failed", "stopped"]
GOOD = ("SUCCEEDED", "COMPLETE", "CACHED")
FAILED = "FAILED"
STOPPED = ("CANCELLED", "CANCELLING", "CANCELED", "CANCELING", "stopped")
FIRST, LAST = "resolve-run", "notify"
WITHOUT_END = "recorded no end: it was killed, ran out of memory, or lost its machine"


@dataclass(frozen=True)
class Ending:
    """How a run ended. step, exit_code: of the step that failed, was stopped or left no end; empty where none is known.

    decision, version: of a run that is done, what its gate decided last and the registered version. note: what the
    service says, where the run's own records say otherwise.
    """

    outcome: Outcome
    step: str = ""
    exit_code: int | None = None
    error: str = ""
    decision: Decision | None = None
    version: int | None = None
    note: str = ""


def ending_of(run_uri: str, *, job_name: str, last_step: str, word: str, error: str = "") -> Ending:
    """How the run in this folder ended.

    Args:
        job_name: name of the pipeline job. Records count only from the moment at which this job's resolve-run began: an
            earlier job may have left others in the same folder.
        last_step: the step that completes an accepted run: register-model, deploy-model or compare-variants.
        word: the service's state of the run, or "stopped".
        error: the service's own message.
    """
    try:
        stores = {**earlier_stages(run_uri), "": run_uri}
        stages = {stage: open_storage(uri) for stage, uri in stores.items()}
        steps = [step for stage, store in stages.items() for step in _steps(stage, store, job_name)]
        return _ending(steps, stages, last_step, word, error)
    except UserError as problem:
        outcome: Outcome = "done" if word in GOOD else "stopped" if word in STOPPED else "failed"
        unread = f"the run's records could not be read: {problem.found.splitlines()[0]}"
        return Ending(outcome, error=error or unread, note=f"from the service's word {word}: {unread}")


def _ending(steps: list[Step], stages: Mapping[str, Storage], last_step: str, word: str, error: str) -> Ending:
    last = _completing(steps, last_step)
    if last is not None:
        note = f"the service reports {word}, although {last.title} completed the run" if word == FAILED else ""
        store = stages[_decided_stage(steps)]
        decision, registered = Decision.read_if_whole(store), Registered.read_if_whole(store)
        return Ending("done", decision=decision, version=registered.version if registered else None, note=note)
    for state in ("failed", "stopped", "running"):
        of_state = [step for step in steps if step.state == state]
        if of_state:
            return _at(min(of_state, key=lambda step: step.started_s), word, error)
    if word in STOPPED:
        return Ending("stopped", error=error)
    before = f"after {max(steps, key=lambda step: step.started_s).title}" if steps else "before any step began"
    unsaid = f"the run ended {before}, and no step recorded why"
    return Ending("failed", error=error or unsaid, note=_doubt(word))


def _at(step: Step, word: str, error: str) -> Ending:
    """The ending of a run at a step that failed, was stopped or left no end."""
    is_stopped = word in STOPPED or (step.state == "stopped" and word != FAILED)
    outcome: Outcome = "stopped" if is_stopped else "failed"
    message = WITHOUT_END if step.state == "running" and outcome == "failed" else step.message.strip()
    return Ending(
        outcome, step.title, step.detail.get("exit_code"), message or error, note="" if is_stopped else _doubt(word)
    )


def _doubt(word: str) -> str:
    return f"the service reports {word}" if word in GOOD else ""


def _completing(steps: list[Step], last_step: str) -> Step | None:
    """The step that completed the run: the last one, or a gate that rejected."""
    for step in steps:
        is_rejected = step.name in DECIDING and step.detail.get("answer") == "rejected"
        if step.state in ("done", "reused") and (step.name == last_step or is_rejected):
            return step
    return None


def _decided_stage(steps: list[Step]) -> str:
    """The stage whose gate decided last."""
    decided = [step for step in steps if step.name in DECIDING]
    return max(decided, key=lambda step: step.started_s).stage if decided else ""


def _steps(stage: str, store: Storage, job_name: str) -> list[Step]:
    """The steps of this job that left a record in a stage's folder."""
    steps = {}
    for info in store.list(FOLDER):
        name = step_of_file(info.name)
        if record := parse_step(name, _content(store, info.name)):
            steps[name] = replace(step_of_record(record, 0.0), stage=stage)
    first = steps.get(FIRST)
    if first is None or first.detail.get("job_name") != job_name:
        return []
    return [step for name, step in steps.items() if name != LAST and step.started_s >= first.started_s]


def _content(store: Storage, name: str) -> dict[str, object]:
    if store.stat(name) is None:
        return {}
    try:
        return unseal(store.read(name))
    except ValueError:
        return {}
