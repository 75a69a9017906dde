"""Steps that overflow fp16, under each strategy on two real processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.drivers.overflow import MARK
from tests.support.short_form import chosen
from tests.support.trainer.runs import run_ranks

RUNS = {name: name for name in ("ddp", "fsdp", "tp", "pp", "zero1", "zero2", "zero3")}
RUNS |= {name: name for name in ("fsdp:optimizer+weights", "zero2:optimizer", "zero3:optimizer+weights")}
TRIED = chosen(RUNS, lambda name: name in ("fsdp", "zero3"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    arguments = ["--folder", str(tmp_path_factory.mktemp("overflow")), "--runs", *TRIED]
    said = run_ranks("tests.support.drivers.overflow", arguments, processes=2)
    line = next(line for line in said.splitlines() if line.startswith(MARK))
    return dict(json.loads(line.removeprefix(MARK)))


@pytest.mark.parametrize("name", TRIED)
def test_such_a_step_is_skipped_by_all_ranks_and_changes_no_weight(name: str, found: dict[str, Any]) -> None:
    steps = found[name]
    (good, _), (before, skipped), (after, skipped_again), (then, _) = (
        steps[step] for step in ("good", "overflows", "after", "then")
    )
    assert skipped and not skipped_again and steps["halved"]
    assert before == pytest.approx(after, rel=1e-6), "the skipped step changed nothing"
    assert good > before and after > then, "and the others learned"


@pytest.mark.parametrize("name", TRIED)
def test_a_checkpoint_goes_on_with_the_same_scale_and_the_same_loss(name: str, found: dict[str, Any]) -> None:
    steps = found[name]
    assert steps["resumed"] == steps["goes on"]
    assert (steps["scale"], steps["counted"]) == (0.25, 1)
