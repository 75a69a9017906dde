"""A slow rank is named under every strategy, though all ranks wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.runs import make_run, metrics, run_ranks

SLOW = 1
# Settings and number of processes. The short form has the one whose ranks run different layers.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "pp": ({"train.strategy": "pp", "train.pipeline_parallel": 2}, 2),
    "tp": ({"train.strategy": "tp", "train.tensor_parallel": 2}, 2),
    **{name: ({"train.strategy": name}, 2) for name in ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")},
    "tp+pp+dp": ({"train.strategy": "tp+pp+dp", "train.tensor_parallel": 2, "train.pipeline_parallel": 2}, 4),
    "context parallel": ({"train.context_parallel": 2}, 2),
}


@pytest.mark.parametrize(
    "name", [next(iter(CASES)), *(pytest.param(one, marks=pytest.mark.slow) for one in [*CASES][1:])]
)
def test_a_slow_rank_is_named(name: str, tmp_path: Path) -> None:
    settings, processes = CASES[name]
    changes = settings | {"train.max_steps": 4, "train.log_every_steps": 1}
    job = make_run(tmp_path, "slow", changes, features="off")
    arguments = ["--config", f"{job.run.run_uri}/run.json", "--rank", str(SLOW), "--seconds", "0.01"]
    run_ranks("tests.support.drivers.train_on_slow_rank", arguments, processes=processes)
    lines = metrics(job)
    assert len(lines) > 2 and {line["slowest_rank"] for line in lines} == {SLOW}
    # The slow one cannot take more than all ranks' time, which is their number of times the mean.
    assert all(1.2 < line["straggler_spread"] <= processes for line in lines)
