"""The planner's memory of every pipeline stage against what three real processes hold, four that split layers, and
eight over which two copies of the model are sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.planner.memory_bounds import COUNTED, PEAK
from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.pipeline_memory import CASES, COPIED_CASES, SPLIT_CASES, STAGES, predicted
from tests.support.trainer.runs import run_ranks

WEIGHED = chosen(CASES, lambda name: name == "pp bf16 checkpointing")
WEIGHED_SPLIT = chosen(SPLIT_CASES, lambda name: name == "tp+pp+dp adapters")
WEIGHED_COPIED = COPIED_CASES if WHOLE else {}  # in the short form copies are weighed in test_tensor_parallel.py


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output: Path = tmp_path_factory.mktemp("pipeline-memory") / "measured.json"
    found: dict[str, Any] = {}
    module = "tests.support.trainer.pipeline_memory"
    for cases, ranks in ((WEIGHED, STAGES), (WEIGHED_SPLIT, 4), (WEIGHED_COPIED, 8)):
        if not cases:
            continue
        run_ranks(module, ["--output", str(output), "--cases", *cases], processes=ranks)
        found |= json.loads(output.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WEIGHED, *WEIGHED_SPLIT, *WEIGHED_COPIED])
def test_each_stage_holds_what_the_planner_says(name: str, measured: dict[str, Any]) -> None:
    for stage, expected in enumerate(predicted({**CASES, **SPLIT_CASES, **COPIED_CASES}[name])):
        found = measured[name][stage]
        for part in ("weights", "gradients", "optimizer"):
            assert expected[part] == pytest.approx(found[part], rel=COUNTED), (stage, part)
        assert expected["peak"] == pytest.approx(found["peak"], rel=PEAK), stage
