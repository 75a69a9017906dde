"""What the planner says that strategies send, against what their collectives carry between two real ranks."""

from __future__ import annotations

import json

import pytest

from benchmarks.flop_cases import model_config
from pipelines.planner.layout import make_layout
from pipelines.planner.network import FP32_BYTES, Work, traffic
from tests.drivers.count_traffic import MARK, MICRO_ROWS, MICRO_STEPS, ROW_TOKENS
from tests.trainer_runs import torchrun
from trainer.models.llava import LlavaFamily
from trainer.strategies.table import strategy_names

pytestmark = pytest.mark.slow

RANKS = 2
WORK = Work(MICRO_STEPS, MICRO_ROWS, ROW_TOKENS, precision="fp32", activation_checkpointing="none")
# A collective's input on each rank: all of the tensor that is reduced, or its own part of what is gathered. On CPUs,
# reduce-scatter is carried out as an all-reduce.
SENT_AS = {"all_reduce": ("all_reduce", 1), "reduce_scatter": ("all_reduce", 1), "all_gather": ("all_gather", RANKS)}


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, int]]:
    printed = torchrun("tests.drivers.count_traffic", ["--strategies", *strategy_names()], processes=RANKS).stdout
    line = next(line for line in printed.splitlines() if line.startswith(MARK))
    return dict(json.loads(line.removeprefix(MARK)))


@pytest.mark.parametrize("strategy", strategy_names())
def test_strategies_send_what_the_planner_says(strategy: str, counted: dict[str, dict[str, int]]) -> None:
    shape = LlavaFamily().shape(model_config())
    transfers = traffic(make_layout(strategy, 1, RANKS), shape, WORK)
    assert transfers
    expected = {"all_reduce": 0.0, "all_gather": 0.0}
    for transfer in transfers:
        kind, parts = SENT_AS[transfer.collective]
        expected[kind] += transfer.payload_bytes / FP32_BYTES / parts
    found = {kind: counted[strategy].get(kind, 0) for kind in expected}
    print(strategy, "planned", expected, "counted", found)
    assert found == pytest.approx(expected, rel=0.005, abs=0)  # norms and padding are not planned
