"""Disk of the jobs that ask the start weights, or a quantized copy."""

from __future__ import annotations

from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file
from vlmpipe.planner.plan import plan_basis
from vlmpipe.planner.steps.needs import StepNeeds

BF16_BYTES = 2


def test_the_disk_of_an_evaluation_has_room_for_the_start_weights_as_published_and_as_written() -> None:
    path = ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml"
    drawn = load_run_file(path)
    config = load_run_file(path, ["model.projector={weights: gs://example-bucket/projector}"])
    model, load, _ = plan_basis(drawn)
    shape = load.sized(model.shape)
    model_bytes = BF16_BYTES * shape.total_parameters
    needs = [
        StepNeeds(run, shape, 1000, {}, is_later_stage=later).of_job("evaluate")[0]
        for run, later in ((drawn, False), (config, False), (drawn, True))
    ]
    assert needs[0] is not None
    assert needs[1:] == [needs[0] + 2 * model_bytes] * 2
    quantized = load_run_file(path, ["evaluate.quantize={formats: [int4, fp8]}"])
    with_copy, why = StepNeeds(quantized, shape, 1000, {}, is_later_stage=False).of_job("evaluate")
    assert (with_copy, why) == (needs[0] + model_bytes, "the export and a quantized copy"), "one at a time"
