"""A snapshot is the state when it was taken: training goes on before it is written, on two real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.drivers.late_write import MARK
from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.runs import run_ranks

PLAIN = ("ddp", "zero1", "zero2", "zero3", "fsdp") if WHOLE else ("zero2", "fsdp")
OFFLOADED = chosen(
    {
        "zero1": "optimizer",
        "zero2": "optimizer",
        "zero3": "optimizer+weights",
        "fsdp": "optimizer+weights",
    },
    lambda name: name in ("zero2", "fsdp"),
)
RUNS = [*PLAIN, *(f"{strategy}:{offload}" for strategy, offload in OFFLOADED.items())]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    folder: Path = tmp_path_factory.mktemp("snapshots")
    arguments = ["--folder", str(folder), "--runs", *RUNS]
    printed = run_ranks("tests.support.drivers.late_write", arguments, processes=2, timeout_s=400)
    line = next(line for line in printed.splitlines() if line.startswith(MARK))
    return dict(json.loads(line.removeprefix(MARK)))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_late_writes_contain_the_snapshots_state(run: str, losses: dict[str, dict[str, list[float]]]) -> None:
    """Bit for bit, with the buffers of an earlier snapshot used again."""
    went_on = losses[run]["went on"]
    assert losses[run]["resumed"] == went_on
    assert len(set(went_on)) == len(went_on), "training must have changed the weights"


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "offload"), OFFLOADED.items())
def test_offloading_changes_no_loss(strategy: str, offload: str, losses: dict[str, dict[str, list[float]]]) -> None:
    assert losses[f"{strategy}:{offload}"]["went on"] == pytest.approx(losses[strategy]["went on"], rel=1e-5)
