"""Compiled layers move fewer bytes, 8-bit floats make products faster, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner.configs import H100, LLAVA_7B, machine, run_config
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.step_time import Time, estimate_time
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.sizing.model_shape import ModelShape


def timed(shape: ModelShape = LLAVA_7B, **changes: Any) -> Time:
    config = run_config(train__strategy="fsdp", **changes)
    load = Workload.assumed(config, shape)
    return estimate_time(Scenario(config, shape, layout_of(config), load, machine(), H100))


def computing(time: Time) -> float:
    return next(each.s for each in time.parts if each.name == "computing")


@pytest.mark.parametrize(
    ("changes", "least", "most", "said"),
    [
        ({"train__compile": "on"}, 1.1, 1.4, "36% of the bytes"),
        ({"train__compile": "auto"}, 1.1, 1.4, "36% of the bytes"),  # at most 4,096 tokens
        ({"train__compile": "auto", "train__float8": "tensorwise"}, 1.5, 2.1, "1.76 times"),
        ({"train__compile": "auto", "train__float8": "rowwise"}, 1.3, 1.7, "1.30 times"),
    ],
)
def test_computing_is_faster_and_the_plan_says_what_it_takes(
    changes: dict[str, Any], least: float, most: float, said: str
) -> None:
    eager, faster = timed(train__compile="off"), timed(**changes)
    assert least < computing(eager) / computing(faster) < most
    assert any(said in sentence for sentence in faster.assumptions)
    assert not any(said in sentence for sentence in eager.assumptions)


def test_narrow_models_gain_nothing_by_8_bit_floats() -> None:
    narrow = replace(LLAVA_7B, language=replace(LLAVA_7B.language, hidden=2048))
    compiled = timed(narrow, train__compile="on")
    faster = timed(narrow, train__compile="on", train__float8="tensorwise")
    assert computing(faster) == computing(compiled)
    assert any("below a width of 4,096" in sentence for sentence in faster.assumptions)


def test_rowwise_scales_take_memory_that_is_not_counted() -> None:
    said = timed(train__compile="auto", train__float8="rowwise").assumptions
    assert any("23 % more" in sentence for sentence in said)


def test_a_measured_efficiency_counts_whatever_ran() -> None:
    changes: dict[str, Any] = {"plan__efficiency": 0.5}
    faster = timed(**changes, train__compile="on", train__float8="tensorwise")
    assert computing(faster) == pytest.approx(computing(timed(**changes)))
    assert not any("times as fast" in sentence for sentence in faster.assumptions)
