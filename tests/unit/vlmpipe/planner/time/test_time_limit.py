"""Training that takes longer than its job, or the step that watches it, may run."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file
from vlmpipe.config.sections.cluster import MAX_WATCHED_S
from vlmpipe.planner.time.time_limit import time_limit_note, validation_notes

SPOT_FILE = ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml"
WEEK = "cluster.timeout=604800s"
FALLBACK = "cluster.capacity_fallback=[{scheduling_strategy: spot, wait: 36000s}, standard]"
OWN_STEP = "cluster.disable_retries=true"


@pytest.mark.parametrize(
    ("overrides", "hours", "said"),
    [
        ([WEEK], None, ""),
        ([WEEK], 168.0, ""),
        ([WEEK], 169.0, "Training takes 169 h, and its job is ended after 168 h by cluster.timeout: it needs 2 jobs"),
        (["cluster.timeout=7200s"], 5.0, "its job is ended after 2 h by cluster.timeout: it needs 3"),
        ([WEEK, OWN_STEP], 166.0, ""),
        ([WEEK, OWN_STEP], 167.0, "is ended after 166 h by the time of the pipeline's step that watches it"),
        ([WEEK, FALLBACK], 155.0, ""),
        ([WEEK, FALLBACK], 157.0, "after 156 h by the time of the pipeline's step that watches it, which Vertex AI "
         "limits, less 10.0 h of waits in cluster.capacity_fallback"),
        ([FALLBACK, "cluster.timeout=360000s"], 101.0, "is ended after 100 h by cluster.timeout"),
    ],
)  # fmt: skip
def test_training_that_takes_longer_than_its_job_may_is_told(
    overrides: list[str], hours: float | None, said: str
) -> None:
    extra = ["cluster.restart_job_on_worker_restart=false"] if OWN_STEP in overrides else []
    note = time_limit_note(load_run_file(SPOT_FILE, [*overrides, *extra]), hours)
    assert bool(note) == bool(said) and said in note
    assert MAX_WATCHED_S == 166 * 3600


@pytest.mark.parametrize(
    ("overrides", "steps", "said"),
    [
        ([], 1000, []),
        (["train.early_stopping={patience: 3}"], 1000, ["its cost are upper bounds: after 400 steps at the earliest"]),
        (["train.early_stopping={patience: 3}"], None, ["after 400 steps at the earliest"]),
        (
            ["train.early_stopping={patience: 3}"],
            400,
            ["has no effect: it ends training after 400 steps at the earliest"],
        ),
        (["checkpoint.export=best"], 100, ["has the last step alone to choose from: 100 steps, 100 apart"]),
        (["checkpoint.export=best", "train.checkpoint_every_steps=100"], 1000, []),
        (["checkpoint.export=best", "train.checkpoint_every_steps=250"], 1000, ["saves up to 8 more checkpoints"]),
    ],
)
def test_what_validations_may_change_is_said(overrides: list[str], steps: int | None, said: list[str]) -> None:
    """With a validation every 100 steps."""
    notes = list(validation_notes(load_run_file(SPOT_FILE, [*overrides, "train.validate_every_steps=100"]), steps))
    assert len(notes) == len(said) and all(text in note for text, note in zip(said, notes, strict=True))
