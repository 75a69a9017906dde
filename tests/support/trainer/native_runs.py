"""Runs of native models over several ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.short_form import WHOLE
from tests.support.trainer.native_models import write_data
from tests.support.trainer.runs import train_runs
from tests.support.trainer.tiny_native import model_section
from vlmpipe.trainer.config.job import JobConfig

Content = dict[str, Any]  # changes of the run file
STEPS, STOP_STEP = 4 if WHOLE else 3, 2


def base_of(root: Path, family: str) -> Content:
    return {
        "model": model_section(family), "data": {**write_data(root / family), "validation_fraction": 0.1},
        "features.cache": "off", "train.global_batch_size": 2, "train.micro_batch_size": 1, "train.max_steps": STEPS,
    }  # fmt: skip


def train(jobs: Iterable[tuple[int, JobConfig]], *, timeout_s: float = 240) -> None:
    """Runs by the number of processes that they need, all of one number within `timeout_s`."""
    by_processes: dict[int, list[JobConfig]] = defaultdict(list)
    for processes, job in jobs:
        by_processes[processes].append(job)
    for processes, several in by_processes.items():
        train_runs(several, processes=processes, timeout_s=timeout_s)
