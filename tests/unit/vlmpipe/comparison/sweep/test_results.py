"""What a training of a sweep has left, read for the comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmpipe.comparison.sweep.comparison import compared
from vlmpipe.comparison.sweep.results import read_results
from vlmpipe.registry.recorded_answers import PREDICTIONS
from vlmpipe.trainer.records.sweep import Outcome, Sweep, SweepTraining, SweepVariant
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import write_record


@pytest.mark.parametrize("known", [True, False])
def test_a_training_whose_images_are_not_known_is_compared_by_samples(known: bool, tmp_path: Path) -> None:
    """Programs of others, and earlier versions, name no images beside their answers; prepared data may be pruned."""
    sweep, run = open_storage(str(tmp_path / "sweep")), open_storage(str(tmp_path / "run"))
    answer = {"turn": 0, "question": "which?", "answer": "a", "predicted": "a", "correct": True}
    group = {"image_group": "one"} if known else {}
    lines = [{"id": str(number), **answer, **group} for number in range(8)]
    run.write(PREDICTIONS, "\n".join(json.dumps(line) for line in lines).encode())
    write_record(
        run, "prepared.json", {"prepared_uri": str(tmp_path / "pruned"), "features_uri": "", "features": "off"}
    )
    write_record(run, "evaluate.json", {"questions": 8})
    Outcome(state="done", train_s=1.0, evaluate_s=1.0).write(run)
    places = {"run_uri": run.root_uri, "data_from": run.root_uri, "features_from": run.root_uri}
    Sweep(
        metric="exact_match",
        baseline="base",
        starts=2,
        parallelism=1,
        variants=(SweepVariant(name="base"),),
        trainings=tuple(SweepTraining(variant="base", start=start, **places) for start in range(2)),
        jobs=((0, 1),),
    ).write(sweep)
    results = read_results(sweep.root_uri)
    assert [one.error for one in results.trainings] == ["", ""]
    assert any("samples are drawn in their place" in note for note in compared(results).notes) is not known
