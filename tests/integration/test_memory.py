"""The planner's memory against what real runs hold: every strategy, built and stepped for real on two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory_cases import CASES, predicted
from tests.trainer_runs import torchrun

PROCESSES = 2
COUNTED = 0.02  # largest error of a part that can be counted, relative
PEAK = 0.03  # and of the fullest moment of a step


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output: Path = tmp_path_factory.mktemp("memory") / "measured.json"
    arguments = ["--output", str(output), "--cases", *CASES]
    torchrun("benchmarks.measure_memory", arguments, processes=PROCESSES)
    return dict(json.loads(output.read_text()))


@pytest.mark.parametrize("name", CASES)
def test_counted_parts_and_the_peak_are_what_a_real_run_holds(name: str, measured: dict[str, Any]) -> None:
    found, expected = measured[name], predicted(CASES[name], PROCESSES)
    for part in ("weights", "optimizer"):
        assert expected[part] == pytest.approx(found[part], rel=COUNTED), part
    assert expected["peak"] == pytest.approx(found["peak"], rel=PEAK)
