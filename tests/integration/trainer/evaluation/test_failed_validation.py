"""A validation that fails or is killed loses no step: the checkpoint is there before it, and a restart makes up for
it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.short_form import chosen
from tests.support.trainer.runs import ends_of_ranks, losses, make_run, metrics, train_runs
from vlmpipe.trainer.checkpoint.attempts import step_of
from vlmpipe.trainer.checkpoint.commit import committed
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import open_storage

NUM_STEPS, HALFWAY = 4, 2
RUN = {
    "train.max_steps": NUM_STEPS, "features.cache": "off", "data.pack": False, "data.validation_fraction": 0.2,
    "train.validation_sequences": 5,
}  # fmt: skip
HALFWAY_TOO = {
    "train.validate_every_steps": HALFWAY, "train.checkpoint_every_steps": HALFWAY, "checkpoint.async_save": False,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], int]] = {  # settings, and the steps that are left to the restart
    "last": ({}, 0),
    "halfway": (HALFWAY_TOO, NUM_STEPS - HALFWAY),
}


def validated(job: JobConfig) -> dict[int, float]:
    return {line["step"]: line["validation_loss"] for line in metrics(job) if "validation_loss" in line}


WAYS = chosen(
    {f"{case} {ends_by}": (case, ends_by) for case in CASES for ends_by in ("error", "kill")},
    lambda name: name == "last kill",
)


@pytest.mark.parametrize(("case", "ends_by"), WAYS.values(), ids=WAYS)
def test_a_validation_that_ends_badly_is_taken_again_and_loses_no_step(case: str, ends_by: str, tmp_path: Path) -> None:
    changes, left = CASES[case]
    whole, job = (make_run(tmp_path, name, RUN | changes, features="off") for name in ("whole", "failing"))
    train_runs([whole], processes=1)
    config = ["--config", f"{job.run.run_uri}/run.json", "--nth", "1", "--ends-by", ends_by]
    codes, texts = ends_of_ranks("tests.support.drivers.train_failing_validation", config, processes=2)
    assert all(codes) and ("validation shard" in texts[0]) == (ends_by == "error"), texts[0]
    names = committed(open_storage(job.run.run_uri))
    assert [step_of(name) for name in names] == [NUM_STEPS - left]

    train_runs([job], processes=2)
    assert json.loads(open_storage(job.run.run_uri).read("summary.json"))["resumed_from_step"] == NUM_STEPS - left
    assert validated(job) == pytest.approx(validated(whole), rel=1e-5)
    assert list(validated(job)) == [*([HALFWAY] if left else []), NUM_STEPS]
    assert losses(job) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [[], ["--on-rank", "1"]], ids=["all ranks", "a rank that uploads nothing"])
def test_an_upload_under_way_is_finished_before_an_error_ends_the_job(failing: list[str], tmp_path: Path) -> None:
    changes = RUN | HALFWAY_TOO | {"checkpoint.async_save": True}
    job = make_run(tmp_path, "failing", changes, features="off")
    config = ["--config", f"{job.run.run_uri}/run.json", "--nth", "1", "--ends-by", "error", "--while-uploading"]
    codes, texts = ends_of_ranks("tests.support.drivers.train_failing_validation", [*config, *failing], processes=2)
    assert all(codes) and any("validation shard" in text for text in texts), texts
    assert [step_of(name) for name in committed(open_storage(job.run.run_uri))] == [HALFWAY], texts
