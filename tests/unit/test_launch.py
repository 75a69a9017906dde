"""How a node's job ends: one exit code from what each of its ranks left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from trainer.errors import ExitCode, UserError
from trainer.launch import TorchrunEnd, _exit_code

FAILED = TorchrunEnd(ExitCode.UNEXPECTED)


def left(folder: Path, *codes: int) -> Path:
    for rank, code in enumerate(codes):
        (folder / f"rank-{rank}").write_text(str(code))
    return folder


@pytest.mark.parametrize(
    ("codes", "ended", "expected"),
    [
        ([0, 0], TorchrunEnd(ExitCode.OK), ExitCode.OK),
        ([75, 75], FAILED, ExitCode.PREEMPTED),
        ([75, 1], FAILED, ExitCode.UNEXPECTED),
        ([1, 65], FAILED, ExitCode.DATA),
        ([75, 73, 1], FAILED, ExitCode.CANNOT_WRITE),
        ([], FAILED, ExitCode.UNEXPECTED),
        ([73], TorchrunEnd(ExitCode.UNEXPECTED, killed=(1, signal.SIGKILL)), ExitCode.CANNOT_WRITE),
    ],
)
def test_the_code_that_names_a_cause_wins(codes: list[int], ended: TorchrunEnd, expected: int, tmp_path: Path) -> None:
    assert _exit_code(left(tmp_path, *codes), ended) == expected


@pytest.mark.parametrize(
    ("number", "about_memory"), [(signal.SIGKILL, True), (signal.SIGSEGV, False), (signal.SIGBUS, False)]
)
def test_a_killed_rank_is_named_whatever_the_others_say_of_their_lost_peer(
    number: signal.Signals, about_memory: bool, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"rank 3 was ended by {number.name}") as caught:
        _exit_code(left(tmp_path, 1, 1), TorchrunEnd(ExitCode.UNEXPECTED, killed=(3, number)))
    assert caught.value.code == 128 + number
    assert ("lack of memory" in caught.value.fix) == about_memory
