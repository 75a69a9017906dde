"""Compiled layers and 8-bit floats make computing faster by published ratios, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.planner.configs import H100, LLAVA_7B, machine, run_config
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.kernels import COMPILED, FLOAT8
from vlmpipe.planner.time.step_time import Time, estimate_time
from vlmpipe.planner.workload import Workload


def timed(**changes: Any) -> Time:
    config = run_config(train__strategy="fsdp", **changes)
    load = Workload.assumed(config, LLAVA_7B)
    return estimate_time(Scenario(config, LLAVA_7B, layout_of(config), load, machine(), H100))


def computing(time: Time) -> float:
    return next(each.s for each in time.parts if each.name == "computing")


@pytest.mark.parametrize(
    ("changes", "factor", "said"),
    [
        ({"train__compile": "on"}, COMPILED, "1.16 times"),
        ({"train__compile": "auto"}, COMPILED, "1.16 times"),  # at most 4,096 tokens
        ({"train__compile": "auto", "data__sequence_length": 8192, "train__float8": "rowwise"}, None, "23 % more"),
        ({"train__compile": "auto", "train__float8": "tensorwise"}, COMPILED * FLOAT8["tensorwise"], "1.25 times"),
        ({"train__compile": "auto", "train__float8": "rowwise"}, COMPILED * FLOAT8["rowwise"], "1.12 times"),
    ],
)
def test_computing_is_faster_by_the_published_ratio(changes: dict[str, Any], factor: float | None, said: str) -> None:
    eager, faster = timed(), timed(**changes)
    if factor:
        assert computing(eager) / computing(faster) == pytest.approx(factor)
    assert any(said in sentence for sentence in faster.assumptions)
    assert not any("1.16 times" in sentence for sentence in eager.assumptions)


def test_a_measured_efficiency_counts_whatever_ran() -> None:
    changes: dict[str, Any] = {"plan__efficiency": 0.5}
    faster = timed(**changes, train__compile="on", train__float8="tensorwise")
    assert computing(faster) == pytest.approx(computing(timed(**changes)))
    assert not any("times as fast" in sentence for sentence in faster.assumptions)
