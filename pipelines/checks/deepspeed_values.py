"""Values of train.deepspeed, judged by DeepSpeed's own classes in a process of their own, for they import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Literal

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.errors import ExitCode

READER = "vlmpipe.trainer.strategies.deepspeed.values"
LIMIT_S = 120.0


def deepspeed_verdict(train: TrainConfig) -> tuple[Literal["ok", "failed", "unchecked"], str, int]:
    """State, text and exit code of the finding about train.deepspeed, which is not empty."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", READER], input=train.model_dump_json(), capture_output=True, text=True,
            encoding="utf-8", timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "unchecked", f"DeepSpeed did not read train.deepspeed in {LIMIT_S:.0f} s", 0
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return "unchecked", f"DeepSpeed cannot be imported here: {last}", 0
    if refused := json.loads(done.stdout.splitlines()[-1]):
        return "failed", refused, int(ExitCode.CONFIG)
    return "ok", f"DeepSpeed accepts train.deepspeed: {', '.join(train.deepspeed)}", 0
