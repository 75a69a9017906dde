"""A slow rank is named under every strategy that times its ranks, though all ranks wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.short_form import only_whole
from tests.support.trainer.runs import make_run, metrics, run_ranks
from trainer.monitoring.rank_metrics import WAITLESS_LAYERS, WAITLESS_MODULE

SLOW = 1
OTHERS = [pytest.param(name, marks=only_whole) for name in (*WAITLESS_MODULE, *WAITLESS_LAYERS) if name != "fsdp"]


@pytest.mark.parametrize("strategy", ["fsdp", *OTHERS])
def test_a_slow_rank_is_named(strategy: str, tmp_path: Path) -> None:
    changes = {"train.strategy": strategy, "train.max_steps": 6, "train.log_every_steps": 2}
    job = make_run(tmp_path, "slow", changes, features="off")
    arguments = ["--config", f"{job.run.run_uri}/run.json", "--rank", str(SLOW), "--seconds", "0.05"]
    run_ranks("tests.support.drivers.train_on_slow_rank", arguments, processes=2)
    lines = metrics(job)
    assert len(lines) > 2 and {line["slowest_rank"] for line in lines} == {SLOW}
    # Of two ranks, the slow one cannot take more than twice the mean.
    assert all(1.2 < line["straggler_spread"] <= 2 for line in lines)
