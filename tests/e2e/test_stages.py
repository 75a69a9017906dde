"""Two stages in one run, killed between them and in the middle of the second one, in real commands.

The graph's part of it, in which no model is trained, is in test_local_pipeline.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.terminal import Answer, Terminal
from tests.support.trainer.tiny_runs import TINY, merged

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.slow]

STAGES = [
    {"name": "align", "freeze": ["tower", "language_model"], "train": {"max_steps": 20}},
    {"name": "finetune", "train": {"max_steps": 400, "checkpoint_every_steps": 20}},
]
RUN_FILE = merged(TINY, {"train.epochs": 1000, "evaluate.controls": [], "stages": STAGES, "gate": {"bounds": "none"}})


def killed(folder: Path, when: Callable[[Path], object]) -> Answer:
    """Run until it has made something in the run's folder, and kill the command then."""
    with Terminal(folder, "run", "stages.yaml", "--run-id", "r1") as terminal:
        terminal.when(lambda: when(folder / "runs/runs/r1"), deadline_s=600)
        terminal.process.kill()
        return terminal.answer()


def record(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / f"{name}.json").read_text()))


def test_a_run_killed_between_and_in_stages_continues_there(tmp_path: Path) -> None:
    (tmp_path / "stages.yaml").write_text(json.dumps(RUN_FILE))
    run = tmp_path / "runs/runs/r1"
    align = run / "stages/align"

    killed(tmp_path, lambda run: (run / "stages/align/decision.json").exists())
    trained, exported = record(align, "steps/train"), (align / "export/vlmpipe.json").read_bytes()
    assert not (run / "steps/train.json").exists()
    killed(tmp_path, lambda run: list(run.glob("checkpoints/*/COMMIT")))
    assert not (run / "decision.json").exists()
    with Terminal(tmp_path, "run", "stages.yaml", "--run-id", "r1") as terminal:
        answer = terminal.answer(deadline_s=900)

    assert answer.code == 0, answer.said
    assert record(align, "steps/train") == trained, "the first stage was trained once"
    assert (align / "export/vlmpipe.json").read_bytes() == exported
    assert record(run, "summary")["resumed_from_step"] > 0
    assert record(run, "run")["model"]["projector"]["weights"] == str(align / "export")
    assert record(run, "registered")["uri"]
