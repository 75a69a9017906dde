"""Vertex AI takes a line's severity from its stream: what is ordinary must not be on stderr, and warnings must be."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

from tests.support.trainer.runs import make_run


def test_reading_weights_draws_no_progress_bars_in_a_log() -> None:
    from transformers.utils import logging  # it takes seconds to import

    from vlmpipe.trainer.models.hf_native import pretrained

    logging.enable_progress_bar()  # as transformers itself begins
    runpy.run_path(pretrained.__file__)
    assert not logging.is_progress_bar_enabled()


def test_a_training_without_trouble_prints_nothing_to_stderr_and_a_warning_there(tmp_path: Path) -> None:
    changes = {"features.cache": "off", "train.max_steps": 3, "train.strategy": "fsdp", "train.ema_decay": 0.999}
    job = make_run(tmp_path, "run", changes, features="off")
    command = [sys.executable, "-m", "vlmpipe.trainer.launch", "--nproc-per-node", "1", "--", "vlmpipe.trainer.train"]
    command += ["--config", f"{job.run.run_uri}/run.json"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "train: done" in said.stdout
    (warning,) = said.stderr.splitlines()
    assert warning.startswith("train: warning: train.ema_decay 0.999: after all 3 steps the exported average")
    assert "warning" not in said.stdout
    assert json.loads(Path(job.run.run_uri, "steps/train.json").read_text(encoding="utf-8"))["state"] == "done"
