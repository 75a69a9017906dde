"""The planner's memory against what real runs hold: every strategy, built and stepped for real on two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.planner.activations import activations, is_cached
from pipelines.planner.layout import layout_of
from pipelines.planner.memory import training_parts
from tests.memory_cases import CASES
from tests.trainer_runs import torchrun
from trainer.models.table import family_of

PROCESSES = 2
COUNTED = 0.02  # largest error of a part that can be counted, relative
PEAK = 0.03  # and of the fullest moment of a step


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output: Path = tmp_path_factory.mktemp("memory") / "measured.json"
    arguments = ["--output", str(output), "--cases", *CASES]
    torchrun("tests.drivers.measure_memory", arguments, processes=PROCESSES)
    return dict(json.loads(output.read_text()))


def predicted(name: str) -> dict[str, int]:
    case = CASES[name]
    config = case.config(PROCESSES)
    shape = family_of(config.model).shape(config.model)
    _, parts = training_parts(
        shape,
        layout_of(config),
        activations(
            config, shape, mixes=[(case.rows.images // case.rows.rows, case.rows.label_tokens // case.rows.rows)]
        ),
        cached=is_cached(config),
        precision=config.train.precision,
        passes=case.passes,
        checkpointing=config.train.activation_checkpointing == "full",
    )
    sizes = {part.name: part.bytes for part in parts}
    return {
        "weights": sizes["weights"] + sizes.get("frozen weights", 0),
        "optimizer": sizes["optimizer"],
        "peak": sum(sizes.values()),
    }


@pytest.mark.parametrize("name", CASES)
def test_counted_parts_and_the_peak_are_what_a_real_run_holds(name: str, measured: dict[str, Any]) -> None:
    found, expected = measured[name], predicted(name)
    for part in ("weights", "optimizer"):
        assert expected[part] == pytest.approx(found[part], rel=COUNTED), part
    assert expected["peak"] == pytest.approx(found["peak"], rel=PEAK)
