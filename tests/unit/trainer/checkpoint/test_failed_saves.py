"""Saves that failed: when the next one begins, when training ends, and what is said."""

from __future__ import annotations

import re

import pytest

from vlmpipe.trainer.checkpoint.failed_saves import FailedSaves
from vlmpipe.trainer.errors import ExitCode, UserError

AWAY = UserError("the store does not answer", fix="check the network", code=ExitCode.UNAVAILABLE)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_the_next_save_begins_a_minute_after_the_failure() -> None:
    clock = Clock()
    failures = FailedSaves(3600.0, clock=clock)
    assert not failures.is_due and not failures.is_waiting
    assert failures.count(5, AWAY) is None
    for passed_s, due in ((0, False), (59, False), (1, True), (100, True)):
        clock.now_s += passed_s
        assert (failures.is_due, failures.is_waiting) == (due, not due)
    failures.committed(6)
    assert not failures.is_due and not failures.is_waiting


def test_training_ends_an_hour_after_the_first_failure_unless_a_save_is_committed() -> None:
    clock = Clock()
    failures = FailedSaves(3600.0, clock=clock)
    for minute in range(50):
        assert failures.count(minute, AWAY) is None
        clock.now_s += 60
    failures.committed(50)
    for minute in range(60):
        assert failures.count(minute, AWAY) is None, "counted from the first failure after the COMMIT"
        clock.now_s += 60
    ending = failures.count(60, AWAY)
    assert ending and ending.code == ExitCode.UNAVAILABLE and ending.fix == "check the network"
    found = r"no checkpoint was committed since [\d-]+ [\d:]+ UTC, 61 tries in 3,600 s: the store does not answer"
    assert re.fullmatch(found, ending.found)


@pytest.mark.parametrize("code", [ExitCode.SUPERSEDED, ExitCode.CONFIG, ExitCode.UNEXPECTED])
def test_what_does_not_pass_ends_training_at_once(code: ExitCode) -> None:
    error = UserError("taken over", code=code)
    assert FailedSaves(3600.0).count(1, error) is error


def test_each_failure_is_a_warning_for_the_log_and_once_for_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    failures = FailedSaves(600.0, clock=Clock())
    failures.count(5, AWAY)
    (text,) = failures.take_warnings()
    assert capsys.readouterr().err == f"train: warning: {text}\n"
    assert "Training continues and saves again in 60 s; without a COMMIT it ends in 600 s" in text
    assert failures.take_warnings() == []
