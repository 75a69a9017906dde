"""Outcome of a training program, which its exit code alone does not tell.

A program that was asked to stop may save a model and end with 0, and torchrun ends with 1 whatever its workers did.
"""

from __future__ import annotations

import signal

from vlmpipe.trainer.config.external_trainer import ExternalTrainerConfig
from vlmpipe.trainer.errors import CAUSES, ExitCode, UserError
from vlmpipe.trainer.external.follow import TrainingProgress
from vlmpipe.trainer.external.result import bad_result


def steps_wanted(trainer: ExternalTrainerConfig, max_steps: int, progress: TrainingProgress) -> int:
    """Return the steps after which training is done; 0 if neither the run file nor the program says."""
    told = max_steps if "train.max_steps" in trainer.used_settings else 0
    return trainer.total_steps or told or progress.total_steps


def judge(trainer: ExternalTrainerConfig, code: int, progress: TrainingProgress, steps: int, *, stopped: bool) -> bool:
    """Return whether training is done; False when it was stopped and can be resumed. Raises UserError for a failure.

    Args:
        wanted: as `steps_wanted` says.
        stopped: the program was sent SIGTERM.
    """
    # The last logged step may be up to one interval before the last one made.
    too_few = bool(steps and progress.step) and progress.step + progress.interval - 1 < steps
    made = f"{progress.step} of {steps} steps" if steps else f"{progress.step} steps"
    if code == 0 and progress.not_finite:
        raise bad_result(
            f"train.trainer {trainer.name} ended with a loss that is no number at step {progress.not_finite}",
            expected="a finite loss",
            fix="lower train.optimizer.learning_rate, or look at metrics.jsonl for the step at which it was lost",
        )
    if code == 0 and not too_few and ((steps and progress.step) or not stopped):
        return True
    if code == ExitCode.PREEMPTED or (stopped and code not in CAUSES):
        return False
    if code == 0:
        raise bad_result(
            f"train.trainer {trainer.name} ended with exit code 0 after {made}",
            expected=f"{steps} steps, or exit code 75 for a stop that may be resumed",
            fix="read its log for what ended it early; if it is done, correct train.trainer.total_steps",
        )
    if code - 128 in set(signal.Signals):  # others are the program's own: sys.exit(-1) gives 255
        name = signal.Signals(code - 128).name
        memory = "if that was for lack of memory, lower the batch; " if name == "SIGKILL" else ""
        raise UserError(
            f"train.trainer {trainer.name} was ended by {name} after {made}",
            fix=f"{memory}start again: the run continues from its last checkpoint",
            code=code,
        )
    raise UserError(
        f"train.trainer {trainer.name} ended with exit code {code} after {made}",
        expected="exit code 0",
        fix="read its own error in the log above; the run continues from its last checkpoint, if there is one",
        code=code if code in CAUSES else ExitCode.UNEXPECTED,
    )
