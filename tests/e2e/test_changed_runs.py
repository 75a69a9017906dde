"""A run goes on with changed settings: after a remedy, with other settings of later steps, and for more steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.terminal import Answer, Terminal
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import read_lines, read_record_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.slow]

STEPS, LONGER, EVERY_STEPS = 80, 84, 4  # a step is seen, and its fault injected, up to half a second later
RUN_FILE = merged(
    TINY,
    {
        "train.max_steps": STEPS,
        "train.epochs": 1000,
        "train.checkpoint_every_steps": EVERY_STEPS,
        "evaluate.controls": [],
        "evaluate.max_samples": 8,
        "gate": "none",
    },
)
FAULT = ("--inject-fault", "kill:rank=0,after_step=6", "--retries", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changed")
    (folder / "tiny.yaml").write_text(json.dumps(RUN_FILE))
    return folder


def vlmpipe(folder: Path, *arguments: str) -> Answer:
    with Terminal(folder, *arguments) as terminal:
        return terminal.answer(deadline_s=600)


def record(folder: Path, name: str) -> dict[str, Any]:
    return read_record_file(folder / f"runs/runs/r1/{name}.json")


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in read_lines(LocalStorage(folder / "runs/runs/r1"), "metrics.jsonl")]


def test_a_run_goes_on_with_what_diagnose_says_then_longer(folder: Path) -> None:
    failed = vlmpipe(folder, "run", "tiny.yaml", "--run-id", "r1", *FAULT)
    assert failed.code == 137, failed.said
    said = vlmpipe(folder, "diagnose", "r1").words
    assert "lower train.micro_batch_size" in said and "continue: vlmpipe run tiny.yaml --run-id r1" in said

    # The remedy cannot change the weights, so the same command takes it; a rate would need the run's name.
    other = vlmpipe(folder, "run", "tiny.yaml", "train.global_batch_size=16", "--run-id", "r1")
    assert other.code == 64 and "train.global_batch_size changed from 8 to 16" in other.words
    again = vlmpipe(folder, "run", "tiny.yaml", "train.micro_batch_size=1")
    assert again.code == 0, again.said
    assert "Continuing run r1" in again.words and "train.micro_batch_size changed from 2 to 1" in again.words
    resumed = record(folder, "summary")["resumed_from_step"]
    assert 4 <= resumed < STEPS and resumed % EVERY_STEPS == 0 and steps(folder) == list(range(1, STEPS + 1))
    assert record(folder, "registered")["version"] == 1

    # Finished: more steps, another rate and another setting of evaluation.
    longer = [f"train.max_steps={LONGER}", "train.optimizer.learning_rate=1e-4", "evaluate.batch_questions=4"]
    new = vlmpipe(folder, "run", "tiny.yaml", *longer, "--run-id", "r1")
    assert new.code == 0, new.said
    assert "Continuing run r1, which was finished" in new.words
    summary = record(folder, "summary")
    assert (summary["resumed_from_step"], summary["steps"]) == (STEPS, LONGER)
    assert steps(folder) == list(range(1, LONGER + 1))
    assert record(folder, "run")["evaluate"]["batch_questions"] == 4
    assert record(folder, "registered")["version"] == 2, "a further checkpoint is a further version"
    assert vlmpipe(folder, "run", "tiny.yaml", *longer, "--run-id", "r1").code == 64, "nothing has changed"
