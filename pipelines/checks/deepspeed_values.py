"""Values of train.deepspeed, judged by DeepSpeed's own classes in a process of their own, for they import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vlmpipe.config.overrides import parse_overrides
from vlmpipe.config.sections.stages import with_overrides
from vlmpipe.config.validation_errors import Problem, RunFileError
from vlmpipe.config.yaml_loader import read_run_file
from vlmpipe.trainer.config.deepspeed_keys import without_problems
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.errors import ExitCode

READER = "vlmpipe.trainer.strategies.deepspeed.values"
FIELD = "train.deepspeed"
LIMIT_S = 120.0
LATER = "training reads it when it starts, and ends with exit code 64 where DeepSpeed refuses it"


def deepspeed_verdict(train: TrainConfig) -> tuple[Literal["ok", "failed", "unchecked"], str, int]:
    """State, text and exit code of the finding about train.deepspeed, which is not empty."""
    try:
        problems = _judged(train)
    except _NotJudgedError as error:
        return "unchecked", f"{error}; {LATER}", 0
    if problems:
        return "failed", f"DeepSpeed refuses {FIELD}: " + "\n".join(problems), int(ExitCode.CONFIG)
    return "ok", f"DeepSpeed accepts {FIELD}: {', '.join(train.deepspeed)}", 0


def with_values(error: RunFileError, file: Path, overrides: Sequence[str]) -> RunFileError:
    """A refused run file's error with what DeepSpeed says against the values of train.deepspeed, where keys of it are
    among the problems: one round for both.
    """
    if all(problem.field != FIELD for problem in error.problems):
        return error
    train: Any = with_overrides(read_run_file(file), parse_overrides(overrides))["train"]
    if not isinstance(train["deepspeed"], Mapping):
        return error
    strategy = str(train.get("strategy"))
    judged = {
        "strategy": strategy if strategy in ("zero1", "zero2", "zero3") else "zero2",
        "global_batch_size": 1,
        "optimizer": {"learning_rate": 1.0},
        "deepspeed": without_problems(train["deepspeed"]),
    }
    try:
        refused = _judged(TrainConfig.model_validate(judged)) if judged["deepspeed"] else []
    except _NotJudgedError:
        return error
    return RunFileError(error.source, [*error.problems, *(Problem(FIELD, text) for text in refused)])


class _NotJudgedError(Exception):
    """Why DeepSpeed did not judge the values."""


def _judged(train: TrainConfig) -> list[str]:
    """Problems of the values. Raises _NotJudgedError where they could not be read."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", READER], input=train.model_dump_json(), capture_output=True, text=True,
            encoding="utf-8", timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise _NotJudgedError(f"DeepSpeed did not read {FIELD} in {LIMIT_S:.0f} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise _NotJudgedError(f"reading {FIELD} by DeepSpeed's classes failed: {last}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if missing := answer.get("missing"):
        raise _NotJudgedError(f"DeepSpeed, which reads the values of {FIELD}, cannot be imported here ({missing})")
    problems: list[str] = answer["problems"]
    return problems
