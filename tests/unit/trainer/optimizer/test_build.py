"""The learning-rate schedule and the parameter groups."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn
from transformers.optimization import get_wsd_schedule

from tests.support.trainer.flop_cases import model_config
from tests.support.trainer.tiny_native import model_section
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.optimizer import OptimizerConfig
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.optimizer.build import build_optimizer, rate_factor, set_rates


def settings_of(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate({"global_batch_size": 1, "optimizer": {"learning_rate": 1e-3}, **changes})


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    warmup=st.floats(0, 1),
    decay=st.floats(0, 1),
    final=st.floats(0, 1),
    total=st.integers(1, 300),
)
def test_rates_stay_between_zero_and_the_peak_and_never_rise_after_warm_up(
    schedule: str, warmup: float, decay: float, final: float, total: int
) -> None:
    decay *= 0.999 * (1 - warmup)
    config = settings_of(lr_schedule=schedule, warmup_fraction=warmup, decay_fraction=decay, final_rate_fraction=final)
    factors = [rate_factor(config, step, total) for step in range(total)]
    assert all(0 <= factor <= 1 + 1e-12 for factor in factors)
    peak = factors.index(max(factors))
    assert all(late <= early + 1e-12 for early, late in zip(factors[peak:], factors[peak + 1 :], strict=False))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])


def test_known_values() -> None:
    linear = settings_of(lr_schedule="linear", warmup_fraction=0.2, final_rate_fraction=0.5)
    assert [rate_factor(linear, step, 10) for step in (0, 1, 2, 6)] == pytest.approx([0.5, 1.0, 1.0, 0.75])
    cosine = settings_of(lr_schedule="cosine", warmup_fraction=0.0)
    assert [rate_factor(cosine, step, 4) for step in (0, 2)] == pytest.approx([1.0, 0.5])


@given(total=st.integers(1, 400), warmup=st.floats(0, 0.5), decay=st.floats(0, 0.5), final=st.floats(0, 1))
def test_wsd_is_the_published_schedule(total: int, warmup: float, decay: float, final: float) -> None:
    """After warm-up, step by step as transformers has it, with the decay of Haegele et al. 2024: 1 - sqrt(progress)."""
    config = settings_of(lr_schedule="wsd", warmup_fraction=warmup, decay_fraction=decay, final_rate_fraction=final)
    warmup_steps = math.ceil(warmup * total)
    decay_steps = min(math.ceil(decay * total), total - warmup_steps)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    published = get_wsd_schedule(
        optimizer, warmup_steps, decay_steps, total, decay_type="1-sqrt", min_lr_ratio=final
    ).lr_lambdas[0]
    after = range(warmup_steps, total)
    assert [rate_factor(config, step, total) for step in after] == pytest.approx([published(step) for step in after])


def test_wsd_refuses_to_warm_up_and_decay_for_more_than_all_steps() -> None:
    with pytest.raises(ValidationError, match=r"warmup_fraction 0.5 and decay_fraction 0.6 are more than all steps"):
        settings_of(lr_schedule="wsd", warmup_fraction=0.5, decay_fraction=0.6)
    wsd = settings_of(lr_schedule="wsd", warmup_fraction=0.1, decay_fraction=0.4, final_rate_fraction=0.1)
    rates = [rate_factor(wsd, step, 10) for step in (0, 5, 6, 7)]
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.1 + 0.9 * 0.5])


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]), total=st.integers(1, 300), share=st.floats(0, 1)
)
def test_warmup_in_steps_is_the_fraction_that_they_are(schedule: str, total: int, share: float) -> None:
    steps = math.floor(share * total)
    decay = 0.999 * (1 - steps / total)
    in_steps = settings_of(lr_schedule=schedule, warmup_steps=steps, decay_fraction=decay, max_steps=total)
    fraction = settings_of(lr_schedule=schedule, warmup_fraction=max(0.0, steps - 0.5) / total, decay_fraction=decay)
    rates = [[rate_factor(config, step, total) for step in range(total)] for config in (in_steps, fraction)]
    assert rates[0] == rates[1]
    assert in_steps.warmup_fraction is None and fraction.warmup_steps is None
    assert TrainConfig.model_validate(in_steps.model_dump()) == in_steps


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"warmup_steps": 5, "warmup_fraction": 0.03}, "warmup_steps 5 and warmup_fraction 0.03 both say"),
        ({"warmup_fraction": None}, "both null: give one of them, 0 for no warm-up"),
        ({"warmup_steps": 11, "max_steps": 10}, "11 are more than all 10 steps: use at most 10, or warmup_fraction"),
        (
            {"warmup_steps": 2, "max_steps": 10, "lr_schedule": "wsd", "decay_fraction": 0.9},
            "2 and decay_fraction 0.9 are more than all 10 steps: use at most 1,",
        ),
    ],
)
def test_warmup_that_is_given_twice_never_or_beyond_the_last_step_is_refused(
    settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        settings_of(**settings)
    if most := settings.get("max_steps"):
        fits = settings_of(**settings | {"warmup_steps": 10 if most == 10 and "lr_schedule" not in settings else 1})
        assert rate_factor(fits, fits.num_warmup_steps(10) - 1, 10) == 1.0


def test_groups_separate_the_projector_and_what_decays() -> None:
    module = nn.ModuleDict({"projector": nn.Linear(2, 2), "language_model": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    module["frozen"].requires_grad_(False)
    config = OptimizerConfig(learning_rate=1e-3, projector_learning_rate=5e-3, weight_decay=0.1)
    optimizer = build_optimizer(module, config)
    found = {(group["peak_rate"], group["weight_decay"], group["params"][0].ndim) for group in optimizer.param_groups}
    assert found == {(1e-3, 0.1, 2), (1e-3, 0.0, 1), (5e-3, 0.1, 2), (5e-3, 0.0, 1)}
    set_rates(optimizer, 0.5)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == pytest.approx([5e-4, 2.5e-3])


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_every_family_has_its_parts_and_their_rates(family: str) -> None:
    """Also where transformers calls them otherwise; each parameter is in one group."""
    config = model_config(freeze=()) if family == "llava" else ModelConfig(**model_section(family, freeze=()))
    module = family_of(config).training_module(config, family_of(config).skeleton(config, vocabulary=300), cached=False)
    rates = OptimizerConfig(learning_rate=1e-3, projector_learning_rate=5e-3, tower_learning_rate=1e-5)
    counts = Counter[float]()
    for group in build_optimizer(module, rates).param_groups:
        counts[group["peak_rate"]] += sum(parameter.numel() for parameter in group["params"])
    shape = family_of(config).shape(config)
    assert counts[5e-3] == shape.parameters["projector"]
    assert counts[1e-5] == shape.parameters["tower"] - shape.behind_features
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    assert counts[1e-3] == trained - counts[5e-3] - counts[1e-5]


def test_rates_follow_the_batch_only_where_the_run_file_says_how() -> None:
    def factor(**optimizer: object) -> float:
        settings = {"optimizer": {"learning_rate": 1e-3, **optimizer}, "global_batch_size": 64}
        return rate_factor(settings_of(**settings, lr_schedule="constant", warmup_fraction=0), 3, 10)

    assert factor() == 1
    assert factor(batch_scaling="linear", reference_batch_size=16) == pytest.approx(4)
    assert factor(batch_scaling="sqrt", reference_batch_size=16) == pytest.approx(2)
    for half in ({"batch_scaling": "sqrt"}, {"reference_batch_size": 16}):
        with pytest.raises(ValidationError, match="give both, or none and 0"):
            factor(**half)
