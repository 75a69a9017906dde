"""A sweep in real commands: a variant without data leaves the others, and a sweep that was killed goes on.

What a job does with its trainings is tested in tests/integration/trainer/trials.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.terminal import Terminal
from tests.support.trainer.tiny_runs import TINY, merged

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
RATE = "train.optimizer.learning_rate"
SMALL = {"train.max_steps": 8, "evaluate.controls": [], "evaluate.max_samples": 20}


def write_run_file(folder: Path, **sweep: Any) -> None:
    turns = [{"from": "human", "value": "<image>\nwhich digit?"}, {"from": "gpt", "value": "7"}]
    records = [{"id": str(number), "image": "none.png", "conversations": turns} for number in range(20)]
    (folder / "empty.json").write_text(json.dumps(records))
    (folder / "sweep.yaml").write_text(json.dumps(merged(TINY, {**SMALL, "sweep": sweep})))


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_a_variant_without_data_leaves_the_others_and_the_report_says_so(tmp_path: Path) -> None:
    variants = {"slow": {RATE: 1e-4}, "fast": {RATE: 1e-2}, "dataless": {"data.source": "empty.json"}}
    claim = {"claim": "Fast is better", "variant": "fast", "against": ["slow"]}
    write_run_file(tmp_path, variants=variants, starts=1, trainings_per_job=3, hypotheses=[claim])
    with Terminal(tmp_path, "run", "sweep.yaml", "--run-id", "r1") as terminal:
        answer = terminal.answer(deadline_s=600)
    run = tmp_path / "runs/runs/r1"
    assert answer.code == 0, answer.said
    comparison = read(run / "comparison.json")
    found = {one["name"]: one for one in comparison["variants"]}
    assert (found["slow"]["starts"], found["fast"]["starts"], found["dataless"]["starts"]) == (1, 1, 0)
    assert "its data could not be prepared" in found["dataless"]["errors"][0]
    assert comparison["hypotheses"][0]["answer"] in ("supported", "not shown", "contradicted")
    assert "dataless" in (run / "report.html").read_text()
    # One preparation and one feature cache for both variants, and no model in the registry.
    assert len(list((tmp_path / "runs/prepared").iterdir())) == 1
    assert len(list(run.glob("variants/*/*/steps/cache-features.json"))) == 1
    assert not (tmp_path / "runs/registry").exists()
    with Terminal(tmp_path, "status", "r1", "--json") as terminal:
        status = json.loads(terminal.answer().said)
    states = {step["name"]: step["state"] for step in status["steps"]}
    assert states["train-variants"] == states["compare-variants"] == "done"
    assert status["comparison"]["best"] == comparison["best"]


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on_with_what_is_not_done(tmp_path: Path) -> None:
    write_run_file(tmp_path, grid={RATE: [1e-4, 1e-3, 1e-2]}, starts=2, trainings_per_job=3)
    run = tmp_path / "runs/runs/r1"
    with Terminal(tmp_path, "run", "sweep.yaml", "--run-id", "r1") as terminal:
        terminal.when(lambda: len(list(run.glob("variants/*/*/outcome.json"))) > 1, deadline_s=600)
        terminal.process.kill()
        terminal.answer()
    before = {path: path.read_text() for path in run.glob("variants/*/*/outcome.json")}
    assert 1 < len(before) < 6
    with Terminal(tmp_path, "run", "sweep.yaml", "--run-id", "r1") as terminal:
        answer = terminal.answer(deadline_s=600)
    assert answer.code == 0 and "Continuing run r1" in answer.said, answer.said
    after = {path: path.read_text() for path in run.glob("variants/*/*/outcome.json")}
    assert len(after) == 6 and {path: after[path] for path in before} == before
    assert read(run / "comparison.json")["failed"] == 0
