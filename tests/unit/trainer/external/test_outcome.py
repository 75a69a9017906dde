"""The outcome follows from steps, signals and losses; the exit code alone decides nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.trainer.config.external_trainer import ExternalTrainerConfig
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.external.follow import TrainingProgress
from vlmpipe.trainer.external.outcome import judge, steps_wanted

TRAINER = ExternalTrainerConfig(name="t", command=("t", "{max_steps}"))


def seen(step: int = 0, *, interval: int = 1, total: int = 0, not_finite: int = 0) -> TrainingProgress:
    return TrainingProgress([], Path("none"), step=step, total_steps=total, interval=interval, not_finite=not_finite)


@pytest.mark.parametrize(
    ("code", "progress", "wanted", "stopped", "done"),
    [
        (0, seen(400), 400, False, True),
        (0, seen(400), 400, True, True),  # asked to stop when it was done
        (0, seen(16), 400, True, False),  # stopped, saved, and ended with 0
        (1, seen(16), 400, True, False),  # the same under torchrun
        (143, seen(16), 400, True, False),
        (75, seen(16), 400, False, False),
        (0, seen(0), 0, True, False),  # nothing is known: a stopped program is not done
        (0, seen(0), 0, False, True),
        (0, seen(390, interval=30), 400, False, True),  # it logs each 30th step
    ],
)
def test_done_or_stopped(code: int, progress: TrainingProgress, wanted: int, stopped: bool, done: bool) -> None:
    assert judge(TRAINER, code, progress, wanted, stopped=stopped) == done


@pytest.mark.parametrize(
    ("code", "progress", "stopped", "exit_code", "sentence"),
    [
        (0, seen(360, interval=30), False, ExitCode.BAD_RESULT, "after 360 of 400 steps"),
        (0, seen(400, not_finite=400), False, ExitCode.BAD_RESULT, "no number at step 400"),
        (1, seen(7), False, ExitCode.UNEXPECTED, "exit code 1 after 7 of 400 steps"),
        (137, seen(7), False, 137, "was ended by SIGKILL"),
        (255, seen(7), False, ExitCode.UNEXPECTED, "exit code 255"),  # of sys.exit(-1)
        (ExitCode.DATA, seen(7), True, ExitCode.DATA, "exit code 65"),  # a cause counts, also in a stop
    ],
)
def test_failures_have_a_sentence_and_a_code(
    code: int, progress: TrainingProgress, stopped: bool, exit_code: int, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        judge(TRAINER, code, progress, 400, stopped=stopped)
    assert caught.value.code == exit_code


def test_the_run_files_steps_count_only_where_the_program_is_told() -> None:
    untold = ExternalTrainerConfig(name="t", command=("t",))
    assert steps_wanted(TRAINER, 400, seen(total=300)) == 400
    assert steps_wanted(untold, 400, seen(total=300)) == 300
    assert steps_wanted(untold.model_copy(update={"total_steps": 200}), 400, seen(total=300)) == 200
