"""Vertex AI takes a line's severity from its stream: what is ordinary must not be on stderr, and warnings must be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.trainer.runs import make_run
from tests.support.trainer.tiny_runs import TINY


def test_a_training_without_trouble_prints_nothing_to_stderr_and_a_warning_there(tmp_path: Path) -> None:
    """Nor are there progress bars, which transformers draws of weights that it reads."""
    text = TINY["model"]["language_model"]["config"] | {"vocab_size": 280}
    Qwen2ForCausalLM(Qwen2Config(**text)).save_pretrained(tmp_path / "base")
    changes = {
        "model.language_model": {"weights": str(tmp_path / "base")}, "features.cache": "off",
        "train.max_steps": 3, "train.strategy": "fsdp", "train.ema_decay": 0.999,
    }  # fmt: skip
    job = make_run(tmp_path, "run", changes, features="off")
    command = [sys.executable, "-m", "vlmpipe.trainer.launch", "--nproc-per-node", "1", "--", "vlmpipe.trainer.train"]
    command += ["--config", f"{job.run.run_uri}/run.json"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "train: done" in said.stdout
    (warning,) = said.stderr.splitlines()
    assert warning.startswith("train: warning: train.ema_decay 0.999: after all 3 steps the exported average")
    assert "warning" not in said.stdout
    assert json.loads(Path(job.run.run_uri, "steps/train.json").read_text(encoding="utf-8"))["state"] == "done"
