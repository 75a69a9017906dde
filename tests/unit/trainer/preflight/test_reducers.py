"""Reducers that a job pays for: there in time, late, or not at all."""

from __future__ import annotations

import socket

import pytest

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.preflight.reducers import reach, require_reducers

TWO = ("reducer-0:2222", "reducer-1:2222")


def test_an_address_that_answers_or_refuses_is_reached_and_an_unknown_name_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reach(f"127.0.0.1:{port}") == ""
    assert reach(f"127.0.0.1:{port}") == "", "refused: the machine is there"
    assert reach("no-such-host.invalid:2222") == "unknown name"


def test_late_reducers_are_waited_for() -> None:
    answers = {TWO[0]: [""], TWO[1]: ["unknown name", "timed out", ""]}
    slept: list[float] = []
    require_reducers(TWO, timeout_s=60, fails=True, reach=lambda address: answers[address].pop(0), sleep=slept.append)
    assert len(slept) == 2 and not answers[TWO[0]], "asked again only where one was missing"


@pytest.mark.parametrize(("why", "looks"), [("unknown name", 11), ("timed out", 7)])
def test_the_time_that_looking_takes_counts(why: str, looks: int) -> None:
    """Each look takes as long as the pause after it. Names are waited for until the limit, an answer for a minute."""
    clock, made = [0.0], 0

    def reach(_: str) -> str:
        nonlocal made
        made += 1
        clock[0] += 5.0
        return why

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    require_reducers(TWO[:1], timeout_s=100, fails=False, reach=reach, sleep=sleep, now=lambda: clock[0])
    assert made == looks and clock[0] == 10.0 * looks - 5.0


def test_a_reducer_without_a_name_ends_the_job() -> None:
    with pytest.raises(UserError, match="1 of 2 reducers are not there: the name of reducer-1:2222") as caught:
        require_reducers(
            TWO,
            timeout_s=0,
            fails=True,
            reach=lambda address: "unknown name" if address == TWO[1] else "",
            sleep=lambda _: None,
        )
    assert caught.value.code == ExitCode.MACHINE


@pytest.mark.parametrize(("why", "fails"), [("timed out", True), ("unknown name", False)])
def test_a_reducer_that_does_not_answer_is_a_warning(why: str, fails: bool, capfd: pytest.CaptureFixture[str]) -> None:
    require_reducers(TWO[:1], timeout_s=0, fails=fails, reach=lambda _: why, sleep=lambda _: None)
    assert f"the reducer reducer-0:2222 does not answer: {why}" in capfd.readouterr().err
