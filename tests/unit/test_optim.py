"""The learning-rate schedule and the parameter groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.config import OptimizerConfig, TrainConfig
from trainer.optim import build_optimizer, rate_factor, set_rates


def settings_of(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate({"global_batch_rows": 1, "optimizer": {"learning_rate": 1e-3}, **changes})


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    warmup=st.floats(0, 1),
    final=st.floats(0, 1),
    total=st.integers(1, 300),
)
def test_rates_stay_between_zero_and_the_peak_and_never_rise_after_warm_up(
    schedule: str, warmup: float, final: float, total: int
) -> None:
    config = settings_of(schedule=schedule, warmup_fraction=warmup, final_rate_fraction=final)
    factors = [rate_factor(config, step, total) for step in range(total)]
    assert all(0 <= factor <= 1 + 1e-12 for factor in factors)
    peak = factors.index(max(factors))
    assert all(late <= early + 1e-12 for early, late in zip(factors[peak:], factors[peak + 1 :], strict=False))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])


def test_known_values() -> None:
    linear = settings_of(schedule="linear", warmup_fraction=0.2, final_rate_fraction=0.5)
    assert [rate_factor(linear, step, 10) for step in (0, 1, 2, 6)] == pytest.approx([0.5, 1.0, 1.0, 0.75])
    cosine = settings_of(schedule="cosine", warmup_fraction=0.0)
    assert [rate_factor(cosine, step, 4) for step in (0, 2)] == pytest.approx([1.0, 0.5])


def test_groups_separate_the_projector_and_what_decays() -> None:
    module = nn.ModuleDict({"projector": nn.Linear(2, 2), "body": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    module["frozen"].requires_grad_(False)
    config = OptimizerConfig(learning_rate=1e-3, projector_learning_rate=5e-3, weight_decay=0.1)
    optimizer = build_optimizer(module, config)
    found = {(group["peak_rate"], group["weight_decay"], group["params"][0].ndim) for group in optimizer.param_groups}
    assert found == {(1e-3, 0.1, 2), (1e-3, 0.0, 1), (5e-3, 0.1, 2), (5e-3, 0.0, 1)}
    set_rates(optimizer, 0.5)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == pytest.approx([5e-4, 2.5e-3])
