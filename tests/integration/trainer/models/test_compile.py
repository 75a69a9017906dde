"""Kernels that torch.compile makes, under strategies that several ranks share. Making them takes minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainer.runs import losses, make_run, metrics, run_ranks

RELATIVE = 1e-4  # fused kernels round elsewhere
STRATEGIES = ("ddp", "fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fused_kernels_train_as_eager_operations_do_on_every_rank(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    common = {"train.strategy": strategy, "train.activation_checkpointing": "full", "train.max_steps": 3}
    compiled = {**common, "train.compile": "on", "train.compile_backend": "inductor"}
    eager, fused = (make_run(tmp_path, *run, features="off") for run in (("eager", common), ("fused", compiled)))
    configs = [f"{job.run.run_uri}/run.json" for job in (eager, fused)]
    run_ranks("tests.support.drivers.train_many", ["--configs", *configs], processes=2, timeout_s=600)
    assert losses(fused) == pytest.approx(losses(eager), rel=RELATIVE)
    assert losses(fused) != losses(eager), "what was compiled computed exactly as before: was it?"
    assert metrics(fused)[-1]["compiled_graphs"] > 0
