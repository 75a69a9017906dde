"""The planner's memory against what real runs hold: every strategy, built and stepped for real."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.planner.memory_bounds import COUNTED, PEAK
from tests.support.planner.planned_memory import predicted
from tests.support.short_form import chosen
from tests.support.trainer.memory_cases import CASES, Case
from tests.support.trainer.runs import run_ranks
from tests.support.trainer.split_memory_cases import HYBRID_CASES

PROCESSES = 2  # on each node
# Each strategy, and each part that takes memory under one whose share of it is its own.
SHORT = {
    "ddp bf16", "zero3", "zero3 selective", "fsdp nf4 bf16 selective",
    "qwen2_5_vl zero2 bf16 checkpointing",
}  # fmt: skip
OF_ONE_NODE = chosen(CASES, SHORT.__contains__)
# Not with adapters alone: frozen layers keep little without checkpointing, and selective keeps what matrices give.
LESS = {
    f"{name} selective": name
    for name in OF_ONE_NODE
    if f"{name} selective" in OF_ONE_NODE and not name.endswith("adapters")
}
OF_TWO_NODES = chosen(HYBRID_CASES, lambda name: name == "hsdp")
TOGETHER = 40


class Measured:
    """Real runs of all cases, some of them under one launch: all of the long form take a quarter of an hour."""

    def __init__(self, cases: Mapping[str, Case], folder: Path, *, nodes: int) -> None:
        self._names, self._folder, self._nodes = list(cases), folder, nodes
        self._found: dict[str, dict[str, int]] = {}

    def of(self, name: str) -> dict[str, int]:
        if name not in self._found:
            first = self._names.index(name) // TOGETHER * TOGETHER
            output = self._folder / f"{first}.json"
            arguments = ["--output", str(output), "--cases", *self._names[first : first + TOGETHER]]
            run_ranks(
                "tests.support.trainer.measure_memory", arguments, processes=PROCESSES, nodes=self._nodes, timeout_s=600
            )
            self._found |= json.loads(output.read_text())
        return self._found[name]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(OF_ONE_NODE, tmp_path_factory.mktemp("memory"), nodes=1)


@pytest.fixture(scope="module")
def measured_on_two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(OF_TWO_NODES, tmp_path_factory.mktemp("memory"), nodes=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ONE_NODE)
def test_counted_parts_and_the_peak_are_what_a_real_run_holds(name: str, measured: Measured) -> None:
    _compare(CASES[name], PROCESSES, measured.of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", LESS)
def test_selective_checkpointing_holds_less(name: str, measured: Measured) -> None:
    assert measured.of(name)["peak"] < 0.9 * measured.of(LESS[name])["peak"]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TWO_NODES)
def test_hybrid_sharding_holds_what_is_said(name: str, measured_on_two_nodes: Measured) -> None:
    _compare(HYBRID_CASES[name], 2 * PROCESSES, measured_on_two_nodes.of(name))


def _compare(case: Case, processes: int, found: dict[str, int]) -> None:
    expected = predicted(case, processes)
    for part in ("weights", "bf16_weights", "quantized", "optimizer", "gradients", "node_weights"):
        if found[part]:  # offloaded, DeepSpeed's gradients are in no one place
            assert expected[part] == pytest.approx(found[part], rel=COUNTED), part
    assert bool(found["bf16_weights"]) == bool(expected["bf16_weights"])
    assert bool(found["quantized"]) == bool(expected["quantized"])
    assert bool(found["node_weights"]) == bool(expected["node_weights"])
    assert found["gradients"] or "train.offload" in case.changes
    assert expected["peak"] == pytest.approx(found["peak"], rel=PEAK)
