"""A tiny run file in a folder of its own, and how a command that refuses it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.short_form import WHOLE
from tests.support.terminal import Answer
from tests.support.trainer.runs import TINY, merged

RUN_FILE = "tiny.yaml"
NUM_STEPS, FEW_STEPS = 160 if WHOLE else 100, 60
EVERY_STEPS = 20 if WHOLE else 5  # between checkpoints
CHANGES = {
    "train.max_steps": NUM_STEPS,
    "train.epochs": 1000,
    "train.checkpoint_every_steps": EVERY_STEPS,
    "evaluate.controls": [],
    "features.cache": "on" if WHOLE else "off",  # test_quickstart.py trains on what a job encodes
    "cluster": {"replica_count": 2 if WHOLE else 1},  # what more replicas add is in test_local_retries.py
}


def with_run_file(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / RUN_FILE).write_text(json.dumps(merged(TINY, CHANGES | changes), indent=1))
    return folder


def refused(answer: Answer, code: int, *words: str) -> None:
    """Assert that the command ended as a mistake should: in words, with this code, and without a stack trace."""
    assert answer.code == code, answer.said
    assert "error: " in answer.said and "Traceback" not in answer.said
    for word in words:
        assert word in answer.words, answer.said
