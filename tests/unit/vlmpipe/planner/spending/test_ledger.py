"""What calls of a server of tools may cost is entered before it is spent, and refused above the caps."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vlmpipe.planner.spending.approval import Spending, require_approval
from vlmpipe.planner.spending.ledger import enter, entries
from vlmpipe.trainer.confinement import LIMITS_VARIABLE
from vlmpipe.trainer.confinement.limits import Limits
from vlmpipe.trainer.errors import ExitCode, UserError

PLAN = Spending("llava", "green", (), 20.0, 2.0, "1 x a2-highgpu-1g", "spot")


@pytest.fixture
def caps(tmp_path: Path) -> Limits:
    (tmp_path / "ledger").touch()
    return Limits(root=str(tmp_path), ledger=str(tmp_path / "ledger"), usd_per_call=25.0, usd_in_all=50.0)


def approve(plan: Spending, caps: Limits, monkeypatch: pytest.MonkeyPatch, *, yes: bool = False) -> None:
    monkeypatch.setenv(LIMITS_VARIABLE, caps.to_json())
    require_approval(plan, confirm_above_usd=1e9, force=False, yes=yes, dry_run=False, ask=None)


def spent(caps: Limits) -> float:
    return sum(entry.usd for entry in entries(caps.ledger))


def test_a_call_within_the_caps_is_approved_without_a_question_and_entered(
    caps: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    approve(PLAN, caps, monkeypatch)
    approve(PLAN, caps, monkeypatch)
    assert [(entry.name, entry.usd) for entry in entries(caps.ledger)] == [("llava", 20.0)] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"usd": 25.01}, "may cost $25.01, more than a call may"),
        ({"usd_range": (10.0, 30.0)}, "may cost $30.00"),
        ({"requests_usd": 6.0}, "may cost $26.00"),
        ({"serving_usd_per_month": 730.0}, "may cost $750.00"),
        ({"usd": None, "unknown": "no price of tpu"}, "not wholly known: no price of tpu"),
        ({"left_out": "a month of serving"}, "not wholly known: a month of serving"),
    ],
)
def test_what_is_above_the_cap_or_not_known_is_refused_whatever_the_run_file_and_the_client_say(
    caps: Limits, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        approve(dataclasses.replace(PLAN, **change), caps, monkeypatch, yes=True)  # type: ignore[arg-type]
    assert said in caught.value.found
    assert (caught.value.code, spent(caps)) == (ExitCode.NO_PERMISSION, 0.0)


def test_calls_together_stay_below_the_cap_of_all(caps: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        approve(PLAN, caps, monkeypatch)
    with pytest.raises(UserError, match="together is more than all calls may") as caught:
        approve(PLAN, caps, monkeypatch)
    assert "of which $40.00 are spent" in caught.value.expected
    assert spent(caps) == 40.0


def test_without_a_cap_only_what_costs_nothing_is_approved(caps: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = dataclasses.replace(caps, usd_per_call=0.0, usd_in_all=0.0)
    approve(dataclasses.replace(PLAN, usd=0.0), nothing, monkeypatch)
    with pytest.raises(UserError, match="more than a call may"):
        approve(dataclasses.replace(PLAN, usd=0.001), nothing, monkeypatch)


def test_a_dry_run_enters_nothing(caps: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMITS_VARIABLE, caps.to_json())
    require_approval(PLAN, confirm_above_usd=0, force=False, yes=False, dry_run=True, ask=None)
    assert spent(caps) == 0.0


def test_calls_at_the_same_time_do_not_pass_the_cap(caps: Limits) -> None:
    def attempt(index: int) -> bool:
        try:
            enter(caps, f"run-{index}", 20.0, "")
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(16))) == 2
    assert spent(caps) == 40.0


@pytest.mark.parametrize("content", [b"{}\n", b'{"name": "x", "usd": ', None])
def test_a_ledger_that_is_damaged_or_gone_approves_nothing(caps: Limits, content: bytes | None) -> None:
    if content is None:
        Path(caps.ledger).unlink()
    else:
        Path(caps.ledger).write_bytes(content)
    with pytest.raises(UserError):
        enter(caps, "run", 0.0, "")
