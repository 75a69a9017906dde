"""Waiting for a store that is away: what is repeated, for how long, and what is said."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from vlmpipe.trainer.errors import DataError, ExitCode, UserError, from_os_error
from vlmpipe.trainer.storage.base import CorruptObjectError
from vlmpipe.trainer.storage.outage import Outage, answering_soon, must_answer_soon, patiently, warned


class Time:
    """Passes by sleeping only."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def away(code: int = ExitCode.UNAVAILABLE) -> UserError:
    return UserError("the store does not answer", fix="check the network", code=code)


def failing(*errors: Exception) -> Callable[[], str]:
    """An action that raises these errors one after the other, and then succeeds."""
    left: Iterator[Exception] = iter(errors)

    def action() -> str:
        for error in left:
            raise error
        return "done"

    return action


def test_it_is_repeated_until_it_succeeds_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    time = Time()
    action = failing(*[away()] * 3)
    assert patiently("writing", action, limit_s=60, clock=time.clock, sleep=time.sleep) == "done"
    assert time.slept_s == [1.0, 2.0, 4.0]
    said = capsys.readouterr()
    assert said.err == "train: warning: writing failed, and is tried again for 60 s: the store does not answer\n"
    assert said.out == "train: writing succeeded after 7 s\n"


def test_after_the_limit_the_error_says_since_when() -> None:
    time = Time()
    with pytest.raises(UserError) as caught:
        patiently("writing", failing(*[away()] * 99), limit_s=200, clock=time.clock, sleep=time.sleep)
    assert sum(time.slept_s) == 200 and max(time.slept_s) == 60
    error = caught.value
    assert error.code == ExitCode.UNAVAILABLE and not error.passes and error.fix == "check the network"
    found = r"writing failed since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC, 10 tries in 200 s: the store does not answer"
    assert re.fullmatch(found, error.found)


def test_nothing_else_is_repeated() -> None:
    time = Time()
    for error in (DataError("damaged"), UserError("taken over", code=ExitCode.SUPERSEDED), ValueError("a bug")):
        with pytest.raises(type(error)):
            patiently("writing", failing(error), limit_s=60, clock=time.clock, sleep=time.sleep)
        with pytest.raises(type(error)), warned("writing"):
            raise error
    assert not time.slept_s


def test_an_error_that_passes_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with warned("writing a profile"):
        raise away()
    assert "warning: writing a profile failed: the store does not answer" in capsys.readouterr().err


# By number, as an operating system returns them: EIO, ENOSPC, EACCES, ESTALE, ETIMEDOUT, ENOENT, EADDRINUSE.
NUMBERS = {5: True, 28: True, 13: True, 116: True, 110: True, 2: False, 98: True}


@pytest.mark.parametrize(("number", "passes"), NUMBERS.items())
def test_errors_of_the_operating_system_pass_unless_a_name_is_wrong(number: int, passes: bool) -> None:
    assert from_os_error(OSError(number, "text"), "writing").passes is passes


@pytest.mark.parametrize("code", list(ExitCode))
def test_what_is_not_there_or_not_allowed_may_be_soon(code: ExitCode) -> None:
    expected = code in (ExitCode.UNAVAILABLE, ExitCode.CANNOT_WRITE, ExitCode.NO_PERMISSION)
    assert UserError("found", code=code).passes is expected
    assert CorruptObjectError("changed on the way").passes, "it is sent again from the disk"


def test_an_outage_ends_with_a_success() -> None:
    time = Time()
    outage = Outage(time.clock)
    assert outage.ended() == 0.0
    assert outage.failed() and not outage.failed()
    time.sleep(9)
    assert (outage.failures, outage.seconds, outage.ended()) == (2, 9.0, 9.0)
    assert outage.failed(), "a new one"


def test_stores_may_take_their_time_again_once_the_last_block_has_ended() -> None:
    with answering_soon():
        with answering_soon():
            pass
        assert must_answer_soon()
    assert not must_answer_soon()
